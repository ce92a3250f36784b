"""guard.py: our own failures are counted, said once, and never reach the host."""

import logging

import pytest

from otel_rollout import guard as guard_module
from otel_rollout.guard import failures, guard, warn_once


@pytest.fixture
def swallowing(monkeypatch):
    monkeypatch.delenv(guard_module.RERAISE)


def test_a_failure_is_swallowed_counted_and_said_once_with_its_trace(swallowing, caplog):
    for _ in range(3):
        with guard("count beans"):
            raise KeyError("bean")
    assert failures == {"count beans": 3}
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("otel_rollout", logging.WARNING)
    assert "count beans" in record.getMessage()
    assert "KeyError" in record.getMessage()
    assert record.exc_info[0] is KeyError


def test_each_place_has_its_own_warning(swallowing, caplog):
    for place in ("first", "second"):
        with guard(place):
            raise ValueError
    assert [
        place in record.getMessage() for place, record in zip(("first", "second"), caplog.records, strict=True)
    ] == [True, True]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_passes_through(swallowing, error):
    with pytest.raises(error), guard("place"):
        raise error
    assert not failures


def test_as_a_decorator_it_keeps_result_name_and_gives_none_on_failure(swallowing):
    @guard("divide")
    def divide(a: int, b: int = 2) -> float:
        """Doc."""
        return a / b

    assert divide(4) == 2.0
    assert divide(4, b=0) is None
    assert (divide.__name__, divide.__doc__) == ("divide", "Doc.")
    assert failures["divide"] == 1


def test_under_the_tests_failures_are_raised():
    with pytest.raises(ZeroDivisionError), guard("place"):
        _ = 1 / 0
    assert not failures


def test_warn_once_formats_its_arguments_and_is_quiet_afterwards(caplog):
    for value in (1, 2):
        warn_once("key", "%s of %d", "one", value)
    warn_once("other key", "two")
    assert [record.getMessage() for record in caplog.records] == ["one of 1", "two"]


def test_a_log_handler_that_raises_does_not_reach_the_host(monkeypatch):
    class Broken(logging.Handler):
        def emit(self, record):
            raise RuntimeError

    broken = Broken()
    guard_module.logger.addHandler(broken)
    try:
        warn_once("key", "said")
    finally:
        guard_module.logger.removeHandler(broken)
    assert failures["log"] == 1

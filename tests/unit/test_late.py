"""late.py: work after an op has ended runs in order, on one thread, bounded."""

import os
import threading
import time

import pytest

from otel_rollout import guard as guard_module
from otel_rollout.guard import failures
from otel_rollout.late import LateWork


def test_jobs_run_in_order_on_one_other_thread():
    work, seen = LateWork(), []
    for number in range(100):
        assert work.submit(lambda number=number: seen.append((number, threading.get_ident())))
    assert work.flush(5)
    assert [number for number, _ in seen] == list(range(100))
    assert {ident for _, ident in seen}.isdisjoint({threading.get_ident()})
    assert len({ident for _, ident in seen}) == 1


def test_no_thread_without_a_job():
    before = threading.active_count()
    assert LateWork().flush(0.1)
    assert threading.active_count() == before


def test_a_job_that_fails_does_not_stop_the_next(monkeypatch):
    monkeypatch.delenv(guard_module.RERAISE)
    work, seen = LateWork(), []
    work.submit(lambda: 1 / 0)
    work.submit(lambda: seen.append("next"))
    assert work.flush(5)
    assert seen == ["next"]
    assert failures["complete a span"] == 1


def test_flush_gives_up_after_its_time_and_says_so():
    work, release = LateWork(), threading.Event()
    work.submit(lambda: release.wait(10))
    started = time.monotonic()
    assert work.flush(0.1) is False
    assert 0.1 <= time.monotonic() - started < 1
    release.set()
    assert work.flush(5)


def test_flush_waits_only_for_what_was_known():
    work, release = LateWork(), threading.Event()
    work.submit(lambda: None)
    assert work.flush(5)
    work.submit(lambda: release.wait(10))
    started = time.monotonic()
    threading.Timer(0.05, release.set).start()
    assert work.flush(5)
    assert time.monotonic() - started < 2


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr("otel_rollout.late._LIMIT", 3)
    work, release = LateWork(), threading.Event()
    try:
        assert [work.submit(lambda: release.wait(10)) for _ in range(5)] == [True, True, True, False, False]
    finally:
        release.set()
    assert work.flush(5)
    assert work.submit(lambda: None)
    assert work.flush(5)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_starts_anew():
    work, release = LateWork(), threading.Event()
    work.submit(lambda: release.wait(10))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        work.submit(lambda: os.write(writer, b"done"))
        work.flush(5)
        os._exit(0)
    os.close(writer)
    try:
        assert os.read(reader, 10) == b"done"
    finally:
        os.close(reader)
        os.waitpid(child, 0)
        release.set()

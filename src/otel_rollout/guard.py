"""Runs our own code so that it cannot fail the host: failures are counted, logged once per place, and swallowed."""

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

logger: Final = logging.getLogger("otel_rollout")

failures: Final[Counter[str]] = Counter()
"""How often each guarded place failed in this process."""

RERAISE: Final = "OTEL_ROLLOUT_RERAISE"
"""Set to ``1`` (our tests do) to let internal errors through instead of swallowing them."""


class guard:  # noqa: N801  (reads as a statement: `with guard("encode"):`)
    """Context manager and decorator around code of ours.

    Args:
        place: what the guarded code does; the key of `failures` and part of the log line.
    """

    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Swallow what is an error of ours; cancellation and interrupts pass."""
        if error is None or not isinstance(error, Exception):
            return False
        if os.environ.get(RERAISE) == "1":
            return False
        failures[self.place] += 1
        if failures[self.place] == 1:
            warn_once(
                f"guard:{self.place}",
                "otel-rollout failed to %s (%s); the rollout goes on without this record. "
                "Please report it: the trace below is ours, not yours.",
                self.place,
                type(error).__name__,
                exc_info=error,
            )
        return True

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Guard each call of a function; a call that fails gives ``None``."""

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            with self:
                return function(*args, **kwargs)
            return None

        return guarded


_said: Final[set[str]] = set()


def warn_once(key: str, message: str, *args: Any, exc_info: BaseException | None = None) -> None:
    """Log a warning the first time that `key` is seen in this process; never raises."""
    if key in _said:
        return
    _said.add(key)
    try:
        logger.warning(message, *args, exc_info=exc_info)
    except Exception:
        failures["log"] += 1

"""How an exception is written on a span."""

from typing import TYPE_CHECKING

from opentelemetry.trace import Span, StatusCode

from otel_rollout import content, semconv

if TYPE_CHECKING:
    from otel_rollout.call import Call
    from otel_rollout.trajectory import Trajectory

_MESSAGE: int = 4096
_STACK: int = 16_384
_FRAMES: int = 30


def error_type(error: BaseException) -> str:
    """The value of ``error.type`` for an exception."""
    return type(error).__qualname__


def record_error(
    span: Span, error: BaseException, within: "Trajectory | Call | None" = None, *, message: bool = True
) -> None:
    """Mark a span as failed: ``error.type``, status, and an event with the stack trace where it is first seen.

    Args:
        span: of what failed.
        error: the exception.
        within: what the span is part of; remembers whose stack trace was written.
        message: write the exception's text, which may quote what the model or a tool said.
    """
    event = exception_event(error, stack=within is None or within.last_error is not error)
    if not message:
        event["exception.message"] = ""
    kind, said = event["exception.type"], event["exception.message"]
    if within is not None:
        within.last_error = error
    span.add_event("exception", event)
    span.set_attribute(semconv.ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR, f"{kind}: {said}" if said else kind)


def exception_event(error: BaseException, *, stack: bool = True) -> dict[str, str]:
    """The attributes of an ``exception`` event."""
    kind = error_type(error)
    try:
        message = content.text(str(error), _MESSAGE)
    except Exception:  # the user's __str__
        message = f"<{kind} whose text cannot be read>"
    event = {"exception.type": kind, "exception.message": message}
    if stack:
        event["exception.stacktrace"] = content.text(_stack(error), _STACK)
    return event


def _stack(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_tb(error.__traceback__, limit=-_FRAMES))

"""A span that is a plain dict until it ends: what ops record with where the provider is our own.

The SDK's span copies and checks every attribute, asks the sampler and locks at each write: 45 microseconds on the event
loop where this takes 15. It is used below a sampled root of our own pipeline only, whose exporters read ended spans.
"""

import time
import traceback
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan, Tracer
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from otel_rollout import content, semconv
from otel_rollout._version import __version__
from otel_rollout.identity import scalar, word

_SCOPE: Final = InstrumentationScope(semconv.SCOPE, __version__)
_UNSET: Final = Status(StatusCode.UNSET)
_PLAIN: Final = (str, bool, int, float, bytes)


class LightSpan(trace.Span, ReadableSpan):
    """An OpenTelemetry span; see the module. `parent` must be a sampled span of the same trace."""

    def __init__(
        self,
        name: str,
        tracer: Tracer,
        parent: SpanContext,
        kind: SpanKind,
        attributes: dict[str, Any],
        start_time: int,
    ) -> None:
        span_id = tracer.id_generator.generate_span_id()
        self._own_context = self._context = SpanContext(
            parent.trace_id, span_id, is_remote=False, trace_flags=parent.trace_flags, trace_state=parent.trace_state
        )
        # The names are those of ReadableSpan, whose properties read them.
        self._name, self._parent, self._kind = name, parent, kind
        self._attributes: dict[str, Any] = attributes
        self._events: list[Event] = []
        self._links: list[Link] = []
        self._status = _UNSET
        self._start_time, self._end_time = start_time, None
        self._resource, self._processor = tracer.resource, tracer.span_processor
        self._instrumentation_scope, self._instrumentation_info = _SCOPE, None

    def get_span_context(self) -> SpanContext:
        """The span's identity."""
        return self._own_context

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What is set so far, to be read only."""
        return MappingProxyType(self._attributes)

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return self._end_time is None

    def set_attribute(self, key: str, value: Any) -> None:
        """Set one attribute; a value that an attribute cannot hold is written as JSON, an odd key is left out."""
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes; see `set_attribute`."""
        if self._end_time is None:
            self._attributes.update(_writable(attributes))

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: Any = None) -> None:
        """Add an event, now or at `timestamp` (epoch nanoseconds)."""
        if self._end_time is None:
            at = int(timestamp) if isinstance(timestamp, int | float) else None
            self._events.append(Event(word(name), _writable(attributes or {}), at))

    def add_link(self, context: Any, attributes: Mapping[str, Any] | None = None) -> None:
        """Link to another span."""
        if self._end_time is None and context is not None and context.is_valid:
            self._links.append(Link(context, _writable(attributes or {})))

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Add an ``exception`` event, as the SDK writes it."""
        module, name = type(exception).__module__, type(exception).__qualname__
        found = {
            "exception.type": name if module in ("builtins", None) else f"{module}.{name}",
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", found | dict(attributes or {}), timestamp)

    def set_status(self, status: Any, description: Any = None) -> None:
        """Set the status; OK is final and UNSET changes nothing, as the specification says."""
        if isinstance(status, StatusCode):
            text = content.text(description) if isinstance(description, str) and status is StatusCode.ERROR else None
            status = Status(status, text)
        if self._end_time is not None or not isinstance(status, Status) or status.status_code is StatusCode.UNSET:
            return
        if self._status.status_code is not StatusCode.OK:
            self._status = status

    def update_name(self, name: str) -> None:
        """Rename the span."""
        self._name = word(name)

    def end(self, end_time: int | None = None) -> None:
        """End the span, now or at `end_time` (epoch nanoseconds), and hand it to the processors."""
        if self._end_time is None:
            self._end_time = time.time_ns() if end_time is None else end_time
            self._processor.on_end(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        if error is not None and self.is_recording():
            self.record_exception(error, escaped=True)
            self.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self.end()


def _writable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if type(value) in _PLAIN else _other(value)
        for key, value in attributes.items()
        if type(key) is str and key
    }


def _other(value: Any) -> Any:
    if isinstance(value, list | tuple) and all(type(item) in _PLAIN for item in value):
        return tuple(value)
    return scalar(value)


def start_span(name: str, tracer: Any, kind: SpanKind, attributes: dict[str, Any], start_time: int) -> trace.Span:
    """Start a span below the current one; an ordinary one where that is not sampled or the tracer is not the SDK's."""
    parent = trace.get_current_span().get_span_context()
    if isinstance(tracer, Tracer) and parent.trace_flags.sampled and parent.is_valid:
        return LightSpan(name, tracer, parent, kind, attributes, start_time)
    return tracer.start_span(name, kind=kind, attributes=attributes, start_time=start_time)  # type: ignore[no-any-return]

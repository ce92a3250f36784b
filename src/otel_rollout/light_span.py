"""A span that is a plain dict until it ends: what ops record with where the provider is our own.

The SDK's span copies and checks every attribute, asks the sampler and locks at each write: 45 microseconds on the event
loop where this takes 15. It is used below a sampled root of our own pipeline only, whose exporters read ended spans.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan, Tracer
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from otel_rollout import semconv
from otel_rollout._version import __version__
from otel_rollout.failure import exception_event
from otel_rollout.identity import scalar

_SCOPE: Final = InstrumentationScope(semconv.SCOPE, __version__)
_UNSET: Final = Status(StatusCode.UNSET)
_PLAIN: Final = (str, bool, int, float)


class LightSpan(trace.Span):
    """An OpenTelemetry span; see the module. `parent` must be a sampled span of the same trace."""

    __slots__ = (
        "_attributes",
        "_context",
        "_ended",
        "_events",
        "_kind",
        "_name",
        "_parent",
        "_started",
        "_status",
        "_tracer",
    )

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
        self._context = SpanContext(
            parent.trace_id, span_id, is_remote=False, trace_flags=parent.trace_flags, trace_state=parent.trace_state
        )
        self._name, self._tracer, self._parent, self._kind = name, tracer, parent, kind
        self._attributes, self._started = attributes, start_time
        self._events: list[Event] = []
        self._status = _UNSET
        self._ended: int | None = None

    def get_span_context(self) -> SpanContext:
        """The span's identity."""
        return self._context

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return self._ended is None

    def set_attribute(self, key: str, value: Any) -> None:
        """Set one attribute; a value that OTLP cannot hold is written as JSON."""
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes; see `set_attribute`."""
        if self._ended is None:
            self._attributes.update(attributes)

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        """Add an event, now or at `timestamp` (epoch nanoseconds)."""
        if self._ended is None:
            self._events.append(Event(name, _writable(attributes or {}), timestamp))

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Add an ``exception`` event."""
        found = {**exception_event(exception), "exception.escaped": str(escaped), **(attributes or {})}
        self.add_event("exception", found, timestamp)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status; OK is final, as the specification says."""
        if self._ended is None and self._status.status_code is not StatusCode.OK:
            self._status = status if isinstance(status, Status) else Status(status, description)

    def update_name(self, name: str) -> None:
        """Rename the span."""
        self._name = name

    def end(self, end_time: int | None = None) -> None:
        """End the span, now or at `end_time` (epoch nanoseconds), and hand it to the processors."""
        if self._ended is not None:
            return
        self._ended = time.time_ns() if end_time is None else end_time
        ended = ReadableSpan(
            name=self._name,
            context=self._context,
            parent=self._parent,
            resource=self._tracer.resource,
            attributes=_writable(self._attributes),
            events=self._events,
            kind=self._kind,
            status=self._status,
            start_time=self._started,
            end_time=self._ended,
            instrumentation_scope=_SCOPE,
        )
        self._tracer.span_processor.on_end(ended)


def _writable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if type(value) in _PLAIN else _sequence(value) for key, value in attributes.items()}


def _sequence(value: Any) -> Any:
    if isinstance(value, list | tuple) and all(type(item) in _PLAIN for item in value):
        return tuple(value)
    return scalar(value)


def start_span(name: str, tracer: Any, kind: SpanKind, attributes: dict[str, Any], start_time: int) -> trace.Span:
    """Start a span below the current one; an ordinary one where that is not sampled or the tracer is not the SDK's."""
    parent = trace.get_current_span().get_span_context()
    if isinstance(tracer, Tracer) and parent.trace_flags.sampled and parent.is_valid:
        return LightSpan(name, tracer, parent, kind, attributes, start_time)
    return tracer.start_span(name, kind=kind, attributes=attributes, start_time=start_time)  # type: ignore[no-any-return]

"""OTLP/JSON in both directions: spans as standard request objects and lines, and lines read back as plain values."""

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

LINE_LIMIT: Final = 900_000
"""Bytes of a line: the Collector's ``otlpjsonfile`` receiver cuts lines at 1 MiB unless ``max_log_size`` says more."""

_FLAGS_REMOTE_KNOWN: Final = 0x100
_FLAGS_REMOTE: Final = 0x300
_INT64: Final = 1 << 63
_dumps: Final = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False
).encode

Groups = dict["Resource", dict["InstrumentationScope | None", list["ReadableSpan"]]]


def encode(spans: "Sequence[ReadableSpan]") -> dict[str, Any]:
    """Write spans as one ``ExportTraceServiceRequest`` in OTLP/JSON: ids in hex, 64-bit integers as strings.

    Means the same as ``opentelemetry.exporter.otlp.proto.common.encode_spans``, except that an integer beyond 64 bits,
    which OTLP cannot carry, is written as a string instead of being left out.
    """
    return {
        "resourceSpans": [
            {
                **_resource(resource),
                "scopeSpans": [
                    {**_scope(scope), "spans": [encode_span(span) for span in members]}
                    for scope, members in scopes.items()
                ],
            }
            for resource, scopes in _grouped(spans).items()
        ]
    }


def encode_lines(
    spans: "Sequence[ReadableSpan]",
    limit: int = LINE_LIMIT,
    *,
    on_error: "Callable[[ReadableSpan, Exception], None] | None" = None,
) -> Iterator[bytes]:
    """Write spans as OTLP JSON lines, each a request of its own with the spans of one resource and scope.

    Args:
        spans: finished spans, of any number of trajectories.
        limit: bytes after which a new line begins; a single span that is larger still gets a line for itself.
        on_error: told of a span that cannot be written, which is then left out; without it the error is raised.

    Yields:
        UTF-8 lines, each with its line break.
    """
    for resource, scopes in _grouped(spans).items():
        for scope, members in scopes.items():
            # Every resource and scope object ends with "}": the next member goes in its place.
            head = _utf8(
                f'{{"resourceSpans":[{_dumps(_resource(resource))[:-1]},"scopeSpans":[{_dumps(_scope(scope))[:-1]},"spans":['
            )
            pieces: list[bytes] = []
            size = len(head)
            for span in members:
                try:
                    piece = _utf8(_dumps(encode_span(span)))
                except Exception as error:  # one odd span must not take its batch with it
                    if on_error is None:
                        raise
                    on_error(span, error)
                    continue
                if pieces and size + len(piece) > limit:
                    yield head + b",".join(pieces) + _TAIL
                    pieces, size = [], len(head)
                pieces.append(piece)
                size += len(piece) + 1
            if pieces:
                yield head + b",".join(pieces) + _TAIL


_TAIL: Final = b"]}]}]}\n"


def encode_span(span: "ReadableSpan") -> dict[str, Any]:
    """Write one span as an OTLP/JSON ``Span`` object; empty fields are left out."""
    context = span.get_span_context()
    if context is None:
        raise ValueError(f"span {span.name!r} has no context")
    parent = span.parent
    record: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "flags": _flags(parent),
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
    }
    if parent is not None:
        record["parentSpanId"] = f"{parent.span_id:016x}"
    if context.trace_state:
        record["traceState"] = ",".join(f"{key}={value}" for key, value in context.trace_state.items())
    if span.attributes:
        record["attributes"] = _attributes(span.attributes)
    if span.events:
        record["events"] = [_event(event) for event in span.events]
    if span.links:
        record["links"] = [_link(link) for link in span.links]
    record["status"] = _status(span.status)
    dropped = {
        "droppedAttributesCount": span.dropped_attributes,
        "droppedEventsCount": span.dropped_events,
        "droppedLinksCount": span.dropped_links,
    }
    record.update((key, count) for key, count in dropped.items() if count)
    return record


def _grouped(spans: "Iterable[ReadableSpan]") -> Groups:
    # Hashing a Resource dumps it as JSON (4 us); its identity is known first.
    groups: Groups = {}
    known: dict[int, dict[InstrumentationScope | None, list[ReadableSpan]]] = {}
    for span in spans:
        scopes = known.get(id(span.resource))
        if scopes is None:
            scopes = known[id(span.resource)] = groups.setdefault(span.resource, {})
        scopes.setdefault(span.instrumentation_scope, []).append(span)
    return groups


def _resource(resource: "Resource") -> dict[str, Any]:
    record: dict[str, Any] = {"resource": {"attributes": _attributes(resource.attributes)}}
    if resource.schema_url:
        record["schemaUrl"] = resource.schema_url
    return record


def _scope(scope: "InstrumentationScope | None") -> dict[str, Any]:
    if scope is None:
        return {"scope": {}}
    inner: dict[str, Any] = {"name": scope.name}
    if scope.version:
        inner["version"] = scope.version
    if scope.attributes:
        inner["attributes"] = _attributes(scope.attributes)
    return {"scope": inner, "schemaUrl": scope.schema_url} if scope.schema_url else {"scope": inner}


def _event(event: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"timeUnixNano": str(event.timestamp), "name": event.name}
    if event.attributes:
        record["attributes"] = _attributes(event.attributes)
    if event.dropped_attributes:
        record["droppedAttributesCount"] = event.dropped_attributes
    return record


def _link(link: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "traceId": f"{link.context.trace_id:032x}",
        "spanId": f"{link.context.span_id:016x}",
        "flags": _flags(link.context),
    }
    if link.attributes:
        record["attributes"] = _attributes(link.attributes)
    if link.dropped_attributes:
        record["droppedAttributesCount"] = link.dropped_attributes
    return record


def _status(status: Any) -> dict[str, Any]:
    record: dict[str, Any] = {}
    if status.status_code.value:
        record["code"] = status.status_code.value
    if status.description:
        record["message"] = status.description
    return record


def _flags(context: "SpanContext | None") -> int:
    return _FLAGS_REMOTE if context is not None and context.is_remote else _FLAGS_REMOTE_KNOWN


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _any_value(value)} for key, value in attributes.items()]


def _any_value(value: Any) -> dict[str, Any]:
    writer = _WRITERS.get(type(value)) or next(
        (write for kind, write in _WRITERS.items() if isinstance(value, kind)), None
    )
    return writer(value) if writer is not None else {"stringValue": str(value)}


def _int_value(value: int) -> dict[str, Any]:
    return {"intValue": str(int(value))} if -_INT64 <= value < _INT64 else {"stringValue": str(value)}


def _double_value(value: float) -> dict[str, Any]:
    return {"doubleValue": float(value) if math.isfinite(value) else _NOT_FINITE[str(float(value))]}


def _array_value(value: Iterable[Any]) -> dict[str, Any]:
    return {"arrayValue": {"values": [_any_value(item) for item in value]}}


def _kvlist_value(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {"kvlistValue": {"values": [{"key": str(key), "value": _any_value(item)} for key, item in value.items()]}}


_NOT_FINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
# By exact type for speed, in this order for subtypes: a bool is an int, a str is a Sequence.
_WRITERS: Final[dict[type, Callable[[Any], dict[str, Any]]]] = {
    str: lambda value: {"stringValue": value},
    bool: lambda value: {"boolValue": value},
    int: _int_value,
    float: _double_value,
    tuple: _array_value,
    list: _array_value,
    dict: _kvlist_value,
    bytes: lambda value: {"bytesValue": b64encode(value).decode()},
    type(None): lambda _: {},
    Mapping: _kvlist_value,
    Sequence: _array_value,
}


def _utf8(text: str) -> bytes:
    # A lone surrogate (a half of an emoji that a model generated) has no UTF-8 form.
    return text.encode("utf-8", errors="replace")


def decode_line(line: str | bytes) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Read one OTLP JSON line, as `encode_lines` or the Collector's file exporter writes it.

    A line that another writer's crash tore and that was then continued is read from its last complete request on.

    Yields:
        (resource attributes, scope name, OTLP/JSON span object) of each span. The spans of a resource share its dict.

    Raises:
        ValueError: not JSON, or JSON of another shape.
    """
    request = _loads(line)
    if not isinstance(request, dict) or not any(key in request for key in _REQUESTS):
        raise ValueError("not an OTLP request: it has no resourceSpans")
    for block in _objects(request.get("resourceSpans")):
        resource = decode_attributes(_object(block.get("resource")).get("attributes"))
        for scope_block in _objects(block.get("scopeSpans")):
            scope = str(_object(scope_block.get("scope")).get("name") or "")
            for span in _objects(scope_block.get("spans")):
                yield resource, scope, span


# The Collector writes logs and metrics in the same form: valid lines without spans.
_REQUESTS: Final = ("resourceSpans", "resourceLogs", "resourceMetrics", "resourceProfiles")
_REQUEST_START: Final = b'{"resourceSpans":'


def _loads(line: str | bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raw = line.encode() if isinstance(line, str) else line
        start = raw.rfind(_REQUEST_START)
        if start <= 0:
            raise
        return json.loads(raw[start:])


def decode_attributes(items: Any) -> dict[str, Any]:
    """Read OTLP/JSON ``KeyValue`` objects as a dict of plain values (arrays as lists, bytes as bytes)."""
    return {str(item.get("key")): decode_value(item.get("value")) for item in _objects(items)}


def decode_value(value: Any) -> Any:
    """Read one OTLP/JSON ``AnyValue``; an unknown kind of value is None."""
    return next((_READERS[kind](content) for kind, content in _object(value).items() if kind in _READERS), None)


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "stringValue": lambda content: content,
    "boolValue": lambda content: content,
    "intValue": int,
    "doubleValue": float,
    "bytesValue": b64decode,
    "arrayValue": lambda content: [decode_value(item) for item in _object(content).get("values") or ()],
    "kvlistValue": lambda content: decode_attributes(_object(content).get("values")),
}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())

import base64
import json
import math
from collections.abc import Sequence

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from otel_rollout.otlp_json import decode_line, decode_value, encode, encode_lines


def recorded(build, *, resource=None, limits=None) -> Sequence[ReadableSpan]:
    memory = InMemorySpanExporter()
    provider = TracerProvider(
        resource=resource or Resource({"rollout.step": 3}), span_limits=limits or SpanLimits(), shutdown_on_exit=False
    )
    provider.add_span_processor(SimpleSpanProcessor(memory))
    build(provider)
    return memory.get_finished_spans()


def as_protobuf(line: str | bytes) -> ExportTraceServiceRequest:
    """What the line means, by Google's own parser: OTLP/JSON has hex where protobuf JSON has base64."""

    def rewrite(node):
        if isinstance(node, dict):
            return {
                key: base64.b64encode(bytes.fromhex(value)).decode()
                if key in ("traceId", "spanId", "parentSpanId")
                else rewrite(value)
                for key, value in node.items()
            }
        return [rewrite(item) for item in node] if isinstance(node, list) else node

    return json_format.ParseDict(rewrite(json.loads(line)), ExportTraceServiceRequest())


def rich_spans() -> Sequence[ReadableSpan]:
    remote = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1), trace_state=TraceState([("a", "1")]))

    def build(provider):
        tracer = provider.get_tracer("otel_rollout", "1.2", "https://schema", {"x": 1})
        parent = trace.set_span_in_context(NonRecordingSpan(remote))
        link = Link(SpanContext(1, 2, is_remote=False), {"rollout.link": "step"})
        with tracer.start_as_current_span(
            "chat m", context=parent, kind=SpanKind.CLIENT, links=[link, Link(remote)]
        ) as span:
            span.set_attribute("text", 'quote " newline \n emoji 🙂 中文 \x00')
            span.set_attribute("empty", "")
            span.set_attribute("int", -(2**63))
            span.set_attribute("bool", True)
            span.set_attribute("float", 0.1)
            span.set_attribute("nan", math.nan)
            span.set_attribute("inf", -math.inf)
            span.set_attribute("bytes", b"\x00\xff")
            span.set_attribute("strings", ["a", "b"])
            span.set_attribute("nested", {"a": [1, {"b": None}], "c": 2.0})
            span.add_event("rollout.token_mismatch", {"rollout.token_mismatch.position": 7})
            span.add_event("bare")
            span.set_status(Status(StatusCode.ERROR, "broke"))
        with provider.get_tracer("other").start_as_current_span("plain", kind=SpanKind.INTERNAL) as span:
            span.set_status(StatusCode.OK)

    return recorded(build)


def test_encode_means_what_the_stock_encoder_means():
    spans = rich_spans()
    ours, stock = as_protobuf(json.dumps(encode(spans), allow_nan=False)), encode_spans(spans)
    # NaN is unequal to itself, also inside of a message.
    assert ours.SerializeToString(deterministic=True) == stock.SerializeToString(deterministic=True)


def test_encode_groups_by_equal_resource_and_scope_as_the_stock_encoder_does():
    def build(provider):
        for name in ("a", "b", "a"):
            provider.get_tracer(name).start_span("op").end()

    spans = [*recorded(build), *recorded(build), *recorded(build, resource=Resource({"other": 1}))]
    request = encode(spans)
    assert [len(block["scopeSpans"]) for block in request["resourceSpans"]] == [2, 2]
    assert as_protobuf(json.dumps(request)) == encode_spans(spans)


def test_dropped_counts_travel():
    def build(provider):
        span = provider.get_tracer("x").start_span("op", attributes={"a": 1, "b": 2, "c": 3})
        span.add_event("one", {"k": 1})
        span.add_event("two")
        span.end()

    spans = recorded(build, limits=SpanLimits(max_span_attributes=2, max_events=1))
    record = encode(spans)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert (record["droppedAttributesCount"], record["droppedEventsCount"]) == (1, 1)
    assert as_protobuf(json.dumps(encode(spans))) == encode_spans(spans)


def test_an_integer_beyond_64_bits_becomes_a_string():
    spans = recorded(lambda provider: provider.get_tracer("x").start_span("op", attributes={"big": 2**64}).end())
    (_, _, span), *_ = decode_line(next(encode_lines(spans)))
    assert span["attributes"] == [{"key": "big", "value": {"stringValue": str(2**64)}}]


def test_a_lone_surrogate_does_not_stop_the_line():
    spans = recorded(lambda provider: provider.get_tracer("x").start_span("op", attributes={"text": "a\ud83d b"}).end())
    (_, _, span), *_ = decode_line(next(encode_lines(spans)))
    assert span["attributes"][0]["value"]["stringValue"] == "a? b"


def test_lines_hold_one_resource_each_and_stay_below_the_limit():
    def build(provider):
        for size in (10, 400, 400, 5_000, 10):
            provider.get_tracer("x").start_span("op", attributes={"text": "x" * size}).end()

    spans = [*recorded(build, resource=Resource({"rollout.trajectory_id": "a"})), *recorded(build)]
    lines = list(encode_lines(spans, 1_500))
    assert len(lines) > 4
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert [len(line) > 1_600 for line in lines].count(True) == 2  # the two spans that are too large for any line
    whole = [span for line in lines for span in as_protobuf(line).resource_spans[0].scope_spans[0].spans]
    expected = [span for block in encode_spans(spans).resource_spans for span in block.scope_spans[0].spans]
    assert whole == expected


def test_a_span_that_cannot_be_written_is_told_and_left_out():
    good = recorded(lambda provider: provider.get_tracer("x").start_span("good").end())
    bad = ReadableSpan("bad", resource=good[0].resource, instrumentation_scope=good[0].instrumentation_scope)
    told = []
    lines = list(encode_lines([bad, *good], on_error=lambda span, error: told.append((span.name, str(error)))))
    assert told == [("bad", "span 'bad' has no context")]
    assert [span["name"] for line in lines for _, _, span in decode_line(line)] == ["good"]
    with pytest.raises(ValueError, match="no context"):
        list(encode_lines([bad]))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(VALUES)
def test_any_value_comes_back(value):
    from otel_rollout.otlp_json import _any_value, _dumps

    assert decode_value(json.loads(_dumps(_any_value(value)))) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"intValue": 5}, 5),
        ({"intValue": "-5"}, -5),
        ({"doubleValue": "Infinity"}, math.inf),
        ({"doubleValue": 1}, 1.0),
        ({"arrayValue": {}}, []),
        ({"kvlistValue": {}}, {}),
        ({"valueOfTheFuture": 1}, None),
        ({}, None),
    ],
)
def test_both_spellings_of_values_are_read(value, expected):
    assert decode_value(value) == expected


def test_unknown_fields_and_other_signals_are_passed_over():
    line = json.dumps(
        {
            "extra": 1,
            "resourceSpans": [
                {
                    "resource": {"attributes": [{"key": "a", "value": {"intValue": 1}}], "entityRefs": []},
                    "scopeSpans": None,
                },
                {"scopeSpans": [{"spans": [{"name": "op", "new": {}}]}]},
            ],
        }
    )
    assert list(decode_line(line)) == [({}, "", {"name": "op", "new": {}})]
    assert list(decode_line('{"resourceLogs": []}')) == []


def test_a_line_that_goes_on_after_a_torn_one_is_read_from_there():
    whole = next(encode_lines(recorded(lambda provider: provider.get_tracer("x").start_span("op").end())))
    assert [span["name"] for _, _, span in decode_line(whole[:50] + whole)] == ["op"]


@pytest.mark.parametrize("line", ["", "nope", "[]", '{"a": 1}', "3", '{"resourceSpans": ['])
def test_another_format_is_an_error(line):
    with pytest.raises(ValueError):
        list(decode_line(line))

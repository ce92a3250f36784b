"""The spans of our own pipeline behave as the SDK's do, for users who reach for the current span."""

import multiprocessing

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from otel_rollout import configure, flush, rollout_trace_attr, rollout_trace_op
from otel_rollout.late import late
from otel_rollout.light_span import LightSpan
from otel_rollout.trace_view import read_trajectories


@pytest.fixture
def exporter():
    memory = InMemorySpanExporter()
    configure(exporters=[memory])
    return memory


def ended(exporter):
    assert flush()
    return {span.name: span for span in exporter.get_finished_spans()}


def in_an_op(function):
    @rollout_trace_op(name="op")
    def op():
        function(trace.get_current_span())

    with rollout_trace_attr(sample_index=1):
        op()


def test_an_op_is_light_and_below_the_root(exporter):
    in_an_op(lambda span: isinstance(span, LightSpan) or pytest.fail("an ordinary span"))
    found = ended(exporter)
    op, root = found["op"], found["invoke_agent rollout_trace"]
    assert (op.parent.span_id, op.context.trace_id) == (root.context.span_id, root.context.trace_id)
    assert op.resource.attributes["rollout.sample_index"] == 1
    assert root.start_time <= op.start_time <= op.end_time <= root.end_time


def test_what_users_read_of_a_span_is_there(exporter):
    seen = []
    in_an_op(lambda span: seen.append((span.name, span.attributes["input.value"], span.end_time, span.status.is_unset)))
    assert seen == [("op", "{}", None, True)]


def test_a_link_a_status_and_an_exception_are_kept(exporter):
    def touch(span):
        span.add_link(span.get_span_context(), {"why": "test"})
        span.set_status(StatusCode.ERROR, "mine")
        span.set_status(StatusCode.UNSET)
        span.set_status("ERROR")
        span.record_exception(KeyError("k"), {"more": 1})

    in_an_op(touch)
    op = ended(exporter)["op"]
    assert [dict(link.attributes) for link in op.links] == [{"why": "test"}]
    assert (op.status.status_code, op.status.description) == (StatusCode.ERROR, "mine")
    (event,) = op.events
    assert (event.attributes["exception.type"], event.attributes["more"]) == ("KeyError", 1)
    assert "KeyError" in event.attributes["exception.stacktrace"]


def test_odd_names_keys_and_values_cannot_spoil_a_batch(exporter):
    values = [1, 2]

    def touch(span):
        span.update_name("odd \ud800")
        span.add_event("\ud800", {5: 6}, timestamp=1.5)
        for key in (5, "", None):
            span.set_attribute(key, 1)
        span.set_attributes({"list": values, "object": object(), "none": None, "bytes": b"x"})
        values.append(3)

    in_an_op(touch)
    assert flush()
    spans = exporter.get_finished_spans()
    assert len(encode_spans(spans).SerializeToString()) > 100
    (odd,) = [span for span in spans if span.name.startswith("odd")]
    assert odd.attributes["list"] == (1, 2)
    assert odd.attributes["bytes"] == b"x"
    assert all(isinstance(key, str) and key for key in odd.attributes)


def test_an_ended_span_takes_nothing_more(exporter):
    kept = []
    in_an_op(kept.append)
    (span,) = kept
    assert flush()
    before = dict(span.attributes)
    span.set_attribute("late", 1)
    span.add_event("late")
    span.end(1)
    assert (dict(span.attributes), len(span.events), span.end_time != 1) == (before, 0, True)
    assert "late" not in ended(exporter)["op"].attributes


def test_late_work_goes_on_after_a_panic_and_keeps_its_order():
    order = []

    def panic():
        raise SystemExit(1)

    assert late.submit(panic)
    assert late.submit(lambda: late.submit(lambda: order.append("inside")) and order.append("outside"))
    assert late.submit(lambda: order.append("after"))
    assert late.flush(5)
    assert order == ["inside", "outside", "after"]


def _roll(count):
    for index in range(count):
        with rollout_trace_attr(sample_index=index):
            pass


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_of_multiprocessing_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_ROLLOUT_FILE", str(tmp_path / "traces"))
    configure(exporters="otlp_file")
    _roll(3)
    child = multiprocessing.get_context("fork").Process(target=_roll, args=(20,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert flush()
    assert len(list(read_trajectories(tmp_path / "traces"))) == 23

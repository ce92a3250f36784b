"""processor.py: nothing lost in a burst, nothing blocked by an exporter, everything counted."""

import os
import threading
import time

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from otel_rollout import configure, flush, pipeline, rollout_trace_attr, rollout_trace_op, tokens
from otel_rollout.processor import MEGABYTE, RolloutSpanProcessor


class Memory(SpanExporter):
    """Keeps batches; `outcome` may be an exception, `gate` holds every export until it is set."""

    def __init__(self, outcome=SpanExportResult.SUCCESS, gate=None, pause=0.0):
        self.batches, self.outcome, self.gate, self.pause = [], outcome, gate, pause
        self.entered = threading.Event()
        self.closed = self.threads = None

    def export(self, spans):
        assert self.closed is None, "export after shutdown"
        self.entered.set()
        self.threads = threading.current_thread().name
        if self.gate is not None:
            self.gate.wait(20)
        time.sleep(self.pause)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.batches.append(list(spans))
        return self.outcome

    def shutdown(self):
        self.closed = True

    @property
    def spans(self):
        return [span for batch in self.batches for span in batch]


@pytest.fixture
def processing(request):
    """Makes a tracer behind a processor with the given settings."""
    made = []

    def make(exporter, **settings):
        processor = RolloutSpanProcessor(exporter, **settings)
        provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
        provider.add_span_processor(processor)
        made.append((processor, exporter))
        return processor, provider.get_tracer("test")

    yield make
    for processor, exporter in made:
        if exporter.gate is not None:
            exporter.gate.set()
        processor.shutdown()


@pytest.fixture
def swallowing(monkeypatch):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")


def end(tracer, number=1, **attributes):
    for at in range(number):
        tracer.start_span(f"span {at}", attributes=attributes).end()


def test_a_burst_of_1024_trajectories_of_30_spans_loses_nothing(processing):
    exporter = Memory(pause=0.001)
    processor, tracer = processing(exporter)
    end(tracer, 1024 * 30, text="x" * 1000)
    assert processor.force_flush(60_000)
    assert processor.counts == {"sent": 30_720, "dropped": 0}
    assert len({span.context.span_id for span in exporter.spans}) == 30_720
    assert [span.name for span in exporter.spans] == [f"span {at}" for at in range(30_720)]
    assert max(len(batch) for batch in exporter.batches) == 64


def text_bytes(batch):
    return sum(len(str(value).encode()) for span in batch for value in span.attributes.values())


@pytest.mark.parametrize("letter", ["x", "é", "算", "\U0001f600"])
def test_batches_are_bounded_in_bytes(processing, letter):
    exporter = Memory()
    processor, tracer = processing(exporter, delay=60)
    end(tracer, 60, text=letter * 200_000)
    end(tracer, 1, text=letter * 4_000_000)
    end(tracer, 3, text="small")
    assert processor.force_flush(20_000)
    assert len(exporter.spans) == 64
    for batch in exporter.batches:
        assert len(batch) == 1 or text_bytes(batch) <= 3 * MEGABYTE
    assert any(len(batch) > 1 for batch in exporter.batches)


def test_what_stands_in_events_counts_too(processing):
    exporter = Memory()
    processor, tracer = processing(exporter, delay=60, max_batch_bytes=100_000)
    for _ in range(10):
        span = tracer.start_span("failed")
        span.add_event("exception", {"exception.stacktrace": "x" * 40_000})
        span.end()
    assert processor.force_flush(20_000)
    assert max(len(batch) for batch in exporter.batches) <= 2


def test_the_exporter_runs_on_a_thread_of_its_own_and_without_instrumentation(processing):
    from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, get_value

    suppressed = []

    class Looking(Memory):
        def export(self, spans):
            suppressed.append(get_value(_SUPPRESS_INSTRUMENTATION_KEY))
            return super().export(spans)

    exporter = Looking()
    processor, tracer = processing(exporter, name="mine")
    end(tracer)
    assert processor.force_flush(5000)
    assert exporter.threads == "otel-rollout-mine"
    assert suppressed == [True]


def test_no_thread_before_the_first_span(processing):
    before = threading.active_count()
    processor, _ = processing(Memory())
    assert processor.force_flush(1000)
    assert threading.active_count() == before


def test_spans_go_out_without_a_flush_after_the_delay(processing):
    exporter = Memory()
    _, tracer = processing(exporter, delay=0.05)
    end(tracer)
    assert exporter.entered.wait(5)


def test_hurry_does_not_wait_and_beats_the_delay(processing):
    exporter = Memory()
    processor, tracer = processing(exporter, delay=60)
    end(tracer)
    started = time.monotonic()
    processor.hurry()
    assert time.monotonic() - started < 0.1
    assert exporter.entered.wait(5)


@pytest.mark.parametrize("kind", ["slow", "hanging", "raising", "failing"])
def test_an_exporter_in_trouble_never_blocks_the_rollout(processing, swallowing, kind, caplog):
    gate = threading.Event()
    exporter = {
        "slow": Memory(pause=0.2),
        "hanging": Memory(gate=gate),
        "raising": Memory(OSError("refused")),
        "failing": Memory(SpanExportResult.FAILURE),
    }[kind]
    processor, tracer = processing(exporter, name="troubled", delay=0.01, shutdown_timeout=0.3)
    end(tracer)
    assert exporter.entered.wait(5)
    slowest = 0.0
    for _ in range(500):
        started = time.perf_counter()
        end(tracer)
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 0.15
    started = time.monotonic()
    flushed = processor.force_flush(200)
    assert time.monotonic() - started < 1.5
    assert flushed is (kind in ("raising", "failing"))
    if kind in ("raising", "failing"):
        assert processor.counts == {"sent": 0, "dropped": 501}
        said = [record.getMessage() for record in caplog.records if "troubled" in record.getMessage()]
        assert sum("dropped" in line for line in said) == 1


def test_shutdown_is_bounded_and_counts_what_it_leaves(processing, swallowing, caplog):
    exporter = Memory(gate=threading.Event())
    processor, tracer = processing(exporter, name="hung", delay=0.01, max_batch_spans=10, shutdown_timeout=0.3)
    end(tracer, 10)
    assert exporter.entered.wait(5)
    end(tracer, 25)
    started = time.monotonic()
    processor.shutdown()
    assert time.monotonic() - started < 2
    assert exporter.closed
    assert processor.counts["dropped"] == 25
    exporter.gate.set()
    time.sleep(0.3)
    assert len(exporter.batches) <= 1, "exported after shutdown"
    assert processor.counts["dropped"] + processor.counts["sent"] <= 35
    assert sum("hung" in record.getMessage() for record in caplog.records) >= 1


def test_after_shutdown_spans_are_refused_and_nothing_raises(processing):
    exporter = Memory()
    processor, tracer = processing(exporter)
    end(tracer, 3)
    processor.shutdown()
    end(tracer, 3)
    processor.shutdown()
    assert processor.force_flush(1000)
    assert len(exporter.spans) == 3
    assert exporter.closed


def test_shutdown_delivers_what_is_queued(processing):
    exporter = Memory()
    processor, tracer = processing(exporter, delay=60)
    end(tracer, 200)
    processor.shutdown()
    assert len(exporter.spans) == 200


@pytest.mark.parametrize("bound", [{"max_queue_spans": 20}, {"max_queue_bytes": 20 * (512 + 1000)}])
def test_a_full_queue_drops_the_oldest_and_counts_them(processing, bound, caplog):
    exporter = Memory(gate=threading.Event())
    processor, tracer = processing(exporter, name="tight", delay=0.01, max_batch_spans=1, **bound)
    end(tracer, 1, text="x" * 1000)
    assert exporter.entered.wait(5)
    end(tracer, 100, text="x" * 1000)
    assert processor.counts["dropped"] == 80
    exporter.gate.set()
    assert processor.force_flush(10_000)
    assert [span.name for span in exporter.spans[1:]] == [f"span {at}" for at in range(80, 100)]
    assert processor.counts == {"sent": 21, "dropped": 80}
    assert sum("tight" in record.getMessage() for record in caplog.records) == 1


def test_a_span_larger_than_the_whole_queue_is_still_taken(processing):
    exporter = Memory()
    processor, tracer = processing(exporter, max_queue_bytes=1000)
    end(tracer, 1, text="x" * 5000)
    assert processor.force_flush(5000)
    assert len(exporter.spans) == 1


def test_outcomes_are_counted_in_the_metric(processing, swallowing):
    from otel_rollout import metrics

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics.bind(provider)
    try:
        good, fails, hung = Memory(), Memory(SpanExportResult.FAILURE), Memory(gate=threading.Event())
        for exporter, name in ((good, "good"), (fails, "fails"), (hung, "hung")):
            processor, tracer = processing(exporter, name=name, delay=0.01, max_queue_spans=5, shutdown_timeout=0.2)
            end(tracer, 1)
            assert exporter.entered.wait(5)
            if exporter is not hung:
                assert processor.force_flush(5000)
        end(tracer, 8)
        processor.shutdown()
        # Threads that other tests left hanging count into the same instruments.
        mine = ("good", "fails", "hung")
        found = {key: value for key, value in points(reader, "rollout.export.spans").items() if key[0] in mine}
    finally:
        metrics.bind(None)
        provider.shutdown()
    assert found == {
        ("good", "sent", None): 1,
        ("fails", "dropped", "export_failed"): 1,
        ("hung", "dropped", "queue_full"): 3,
        ("hung", "dropped", "shutdown"): 5,
    }


def points(reader, name):
    found = {}
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                if metric.name == name:
                    assert metric.unit == "{span}"
                    for point in metric.data.data_points:
                        labels = point.attributes
                        key = labels["rollout.exporter"], labels["rollout.outcome"], labels.get("rollout.reason")
                        assert set(labels) <= {"rollout.exporter", "rollout.outcome", "rollout.reason"}
                        found[key] = point.value
    return found


def test_unsampled_spans_are_not_queued():
    exporter = Memory()
    processor = RolloutSpanProcessor(exporter)
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    end(provider.get_tracer("test"), 5)
    assert processor.force_flush(1000)
    assert exporter.batches == []


def test_compaction_changes_the_form_of_tokens_and_nothing_else():
    exporter, plain = Memory(), Memory()
    ids, more = list(range(3000, 4000)), list(range(50))

    @rollout_trace_op(kind="llm")
    def generate(prompt_ids):
        return {"token_ids": more}

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(PassOn(plain))
    configure(tracer_provider=provider, exporters=[exporter])
    with rollout_trace_attr(sample_index=1):
        generate(ids)
    assert flush(10)
    turn, before = exporter.spans[0], plain.spans[0]
    assert turn.attributes["rollout.token_delta.prompt"].startswith("u32.shuf.zlib;base64,")
    assert len(turn.attributes["rollout.token_delta.prompt"]) < len(before.attributes["rollout.token_delta.prompt"]) / 2
    keys = [
        key
        for key in before.attributes
        if key.startswith("rollout.token_delta.") and str(before.attributes[key]).count("base64")
    ]
    assert keys == ["rollout.token_delta.prompt", "rollout.token_delta.completion"]
    for key, value in before.attributes.items():
        same = (
            tokens.decode(value) == tokens.decode(turn.attributes[key])
            if key in keys
            else value == turn.attributes[key]
        )
        assert same, key
    assert set(turn.attributes) == set(before.attributes)
    for name in (
        "name",
        "context",
        "parent",
        "resource",
        "events",
        "links",
        "kind",
        "start_time",
        "end_time",
        "instrumentation_scope",
    ):
        assert getattr(turn, name) == getattr(before, name), name
    assert turn.status.status_code is before.status.status_code


class PassOn(RolloutSpanProcessor):
    """Hands spans on at once, as they are."""

    def on_end(self, span):
        self.exporter.export([span])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("waiting", [0, 50])
def test_a_forked_child_sends_its_own_spans_and_not_the_parents(tmp_path, waiting):
    gate = threading.Event()

    class Files(Memory):
        def export(self, spans):
            if os.getpid() == parent:
                gate.wait(20)
            with (tmp_path / f"{os.getpid()}").open("a") as file:
                file.writelines(f"{span.name}\n" for span in spans)
            return SpanExportResult.SUCCESS

    parent = os.getpid()
    provider = TracerProvider(shutdown_on_exit=False)
    configure(tracer_provider=provider, exporters=[Files()])
    tracer = provider.get_tracer("test")
    for at in range(waiting):
        tracer.start_span(f"parent {at}").end()
    child = os.fork()
    if child == 0:
        try:
            with rollout_trace_attr(name="child"):
                pass
            os._exit(0 if flush(5) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()
    tracer.start_span("parent after").end()
    assert flush(10)
    assert (tmp_path / f"{child}").read_text().splitlines() == ["invoke_agent child"]
    assert (tmp_path / f"{parent}").read_text().splitlines() == [
        *(f"parent {at}" for at in range(waiting)),
        "parent after",
    ]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_makes_its_exporter_anew(processing, tmp_path):
    class Labelled(Memory):
        def __init__(self, label):
            super().__init__()
            self.label = label

        def export(self, spans):
            (tmp_path / self.label).write_text(str(os.getpid()))
            return SpanExportResult.SUCCESS

    processor, tracer = processing(Labelled("old"), rebuild=lambda: Labelled("new"))
    end(tracer)
    assert processor.force_flush(5000)
    child = os.fork()
    if child == 0:
        try:
            end(tracer)
            os._exit(0 if processor.force_flush(5000) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    end(tracer)
    assert processor.force_flush(5000)
    assert (tmp_path / "new").read_text() == str(child)
    assert (tmp_path / "old").read_text() == str(os.getpid())


def test_the_end_of_the_last_trajectory_sends_at_once(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    exporter = Memory()
    configure(exporters=[exporter])
    with rollout_trace_attr():
        with rollout_trace_attr():
            pass
        assert not exporter.entered.wait(0.1)
    assert exporter.entered.wait(5)
    assert pipeline.flush(5)
    assert len(exporter.spans) == 2

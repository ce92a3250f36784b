"""binding.py: which tracer records, and that tracing is off where nobody asked for it."""

import random

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator

from otel_rollout import __version__, binding, configure, rollout_trace_attr, rollout_trace_op
from otel_rollout.binding import Binding, bind, configure_on_first_use, current_binding, scoped_tracer, unbind
from otel_rollout.settings import Settings


def host(**settings):
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False, **settings)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return memory, provider


@rollout_trace_op
def op():
    return trace.get_current_span().is_recording()


def test_off_where_nothing_is_configured():
    assert current_binding() is None
    assert op() is False
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_a_provider_that_the_host_has_set_is_enough():
    memory, provider = host()
    assert op() is False
    trace.set_tracer_provider(provider)
    assert op() is True
    with rollout_trace_attr(sample_index=1):
        pass
    _, root = memory.get_finished_spans()
    assert root.resource.attributes["rollout.sample_index"] == 1
    assert (root.instrumentation_scope.name, root.instrumentation_scope.version) == ("otel_rollout", __version__)


def test_the_ambient_binding_is_made_once():
    _, provider = host()
    trace.set_tracer_provider(provider)
    assert current_binding() is current_binding() is not None


def test_bind_and_unbind():
    memory, provider = host()
    bound = Binding(tracer=scoped_tracer(provider), project_name="p", settings=Settings(content=False))
    bind(bound)
    assert current_binding() is bound
    bind(None)
    assert current_binding() is None
    assert op() is False
    unbind()
    assert current_binding() is None
    trace.set_tracer_provider(provider)
    assert current_binding().tracer is scoped_tracer(provider)
    assert memory.get_finished_spans() == ()


def test_a_disabled_sdk_is_off(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    memory, provider = host()
    assert scoped_tracer(provider) is None
    trace.set_tracer_provider(provider)
    assert current_binding() is None
    assert op() is False
    assert memory.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("value", "called"), [("otlp_file", 1), (" console ", 1), ("none", 0), ("NONE", 0), ("", 0), (None, 0)]
)
def test_the_environment_configures_on_first_use_and_once(monkeypatch, value, called):
    if value is not None:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", value)
    calls = []
    configure_on_first_use(lambda: calls.append(1))
    for _ in range(3):
        assert current_binding() is None
    assert len(calls) == called


def test_a_first_use_that_fails_does_not_reach_the_rollout(monkeypatch, caplog):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp_file")
    configure_on_first_use(lambda: 1 / 0)
    for _ in range(3):
        assert op() is False
    assert len(caplog.records) == 1


def test_a_first_use_with_an_unknown_exporter_is_said_and_goes_on(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nowhere")
    op()
    said = [record.getMessage() for record in caplog.records if "nowhere" in record.getMessage()]
    assert len(said) == 1
    assert "otlp_file" in said[0]


def traces_of_a_seeded_run():
    memory, provider = host()
    bind(Binding(tracer=scoped_tracer(provider)))
    random.seed(42)
    for _ in range(5):
        with rollout_trace_attr(sample_index=1):
            op()
    return {span.context.trace_id for span in memory.get_finished_spans()}, random.getstate()


def test_workers_seeded_alike_do_not_share_trace_ids_and_the_seed_is_not_used_up():
    first, after = traces_of_a_seeded_run()
    second, _ = traces_of_a_seeded_run()
    assert len(first) == len(second) == 5
    assert first.isdisjoint(second)
    random.seed(42)
    assert after == random.getstate()


def test_an_id_generator_of_the_host_is_kept():
    class Counting(IdGenerator):
        count = 0

        def generate_span_id(self):
            self.count += 1
            return self.count

        def generate_trace_id(self):
            return 1000 + self.generate_span_id()

    memory, provider = host(id_generator=Counting())
    configure(tracer_provider=provider)
    with rollout_trace_attr():
        pass
    (root,) = memory.get_finished_spans()
    assert root.context.trace_id < 2000


def test_a_binding_is_frozen():
    with pytest.raises(AttributeError):
        Binding(tracer=trace.NoOpTracer()).tracer = None
    assert not hasattr(Binding(tracer=trace.NoOpTracer()), "__dict__")
    assert binding.Binding(tracer=trace.NoOpTracer()).settings == Settings()

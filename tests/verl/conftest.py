"""The real verl, imported once: a small model directory for all tests, and a fresh switch for each."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from verl_loop import CALCULATOR, ScriptedServer, client, config, model_dir, run_v0, run_v1, worker_v0, worker_v1

import otel_rollout
from otel_rollout import pipeline
from otel_rollout.frameworks.verl import worker
from otel_rollout.frameworks.verl.groups import FirstGroups
from otel_rollout.frameworks.verl.switch import switch
from otel_rollout.trace_view import SpanView, TrajectoryView, from_spans


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Path of a model directory; its vocabulary is small, because each worker reads it anew."""
    return model_dir(tmp_path_factory.mktemp("verl") / "tiny", vocabulary=6000)


class Lasting(InMemorySpanExporter):
    """Outlives the pipeline that it belongs to."""

    def shutdown(self):
        pass

    def clear(self):
        assert otel_rollout.flush()
        super().clear()


def forget_own_provider():
    """Take our provider back, which `configure` made global: a process has only one."""
    if trace._TRACER_PROVIDER is not None:
        trace._TRACER_PROVIDER, pipeline._own_provider = None, None
        trace._TRACER_PROVIDER_SET_ONCE._done = False


@pytest.fixture(params=["provider of the host", "own pipeline"])
def spans(request, clean_telemetry):
    """What was exported: by a provider of the host, complete at once, or by our own, completed by a thread."""
    exporter = Lasting()
    if request.param == "own pipeline":
        exporter.where = {"exporters": [exporter]}
    else:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        exporter.where = {"tracer_provider": provider}
    otel_rollout.configure(**exporter.where)
    yield exporter
    pipeline.shutdown()


@pytest.fixture(autouse=True)
def fresh_switch(monkeypatch):
    """Tracing is off until a worker's configuration or the environment turns it on."""
    monkeypatch.setattr(worker, "_kept", FirstGroups())
    worker._legacy.clear()
    for name, value in (("active", False), ("requested", False), ("token2text", False), ("max_samples", None)):
        monkeypatch.setattr(switch, name, value)


class Rollout:
    """Runs a step of the real verl with a scripted policy, and reads what was traced."""

    def __init__(self, model, exporter):
        self.model, self.exporter = model, exporter

    def config(self, **settings):
        return config(self.model, **{"tools": CALCULATOR, "backend": "otel", **settings})

    def server(self, **settings):
        return ScriptedServer(self.model, **settings)

    async def v0(self, batch, *, server=None, reward=False, fully_async=False, **settings):
        """Trainer v0: the worker's output."""
        cfg = self.config(reward=reward, **settings)
        llm_client = client(cfg, server or self.server(), fully_async=fully_async)
        return await run_v0(worker_v0(cfg, llm_client, reward=reward), batch)

    async def v1(self, batch, *, server=None, reward=False, fully_async=False, **settings):
        """Trainer v1: the rows in the queue, by key; every group has finished."""
        cfg = self.config(reward=reward, **settings)
        own = worker_v1(cfg, client(cfg, server or self.server(), fully_async=fully_async), reward=reward)
        statuses = await run_v1(own, batch=batch)
        assert set(statuses.values()) == {"finished"}
        return {key: row for part in own.queue.store for key, row in own.queue.rows(list(statuses), part).items()}

    def reconfigure(self):
        """Read the environment again, with the same provider and exporter."""
        pipeline.shutdown()
        forget_own_provider()
        otel_rollout.configure(**self.exporter.where)

    def spans(self) -> list[SpanView]:
        """All spans so far."""
        assert otel_rollout.flush()
        return [SpanView.from_readable(span) for span in self.exporter.get_finished_spans()]

    def trajectories(self) -> list[TrajectoryView]:
        """All trajectories so far, by step, sample and serial number."""
        return sorted(
            from_spans(self.spans()), key=lambda view: (view.step or 0, str(view.sample_index), view.rollout_n)
        )

    def only(self) -> TrajectoryView:
        """The one trajectory."""
        (view,) = self.trajectories()
        return view


@pytest.fixture
def forget():
    return forget_own_provider


@pytest.fixture
def rollout(model, spans):
    return Rollout(model, spans)


@pytest.fixture
def tree():
    """A trajectory's spans by name, each with its children in order of start: ``("root", [("child", []), ...])``."""

    def of(view, span=None):
        span = span or view.root
        return (span.name, [of(view, child) for child in view.children(span.span_id)])

    return of


@pytest.fixture
def turn_spans():
    """``(number of calls) -> `` the tree of one turn of ToolAgentLoop.run, tool calls by name."""

    def of(*tools):
        return [
            ("chat tiny", []),
            ("HermesToolParser.extract_tool_calls", []),
            *[(f"execute_tool {name}", []) for name in tools],
        ]

    return of

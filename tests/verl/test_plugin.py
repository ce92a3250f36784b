import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from verl_loop import batch_v0, client, run_v0, worker_v0

from otel_rollout import semconv
from otel_rollout.frameworks.verl_instrumentor import VerlInstrumentor
from otel_rollout.trace_view import read_trajectories

LOADED = """
import json, sys
before = sorted(name for name in sys.modules if name.startswith("otel_rollout"))
import verl
from verl.utils import rollout_trace
state = sys.modules["otel_rollout.frameworks.verl"].status()
print(json.dumps({"before": before, "state": state, "op": rollout_trace.rollout_trace_op.__code__.co_filename}))
"""
ROLLOUT = """
import asyncio, json, sys
from verl_loop import *
model = sys.argv[1]
cfg = config(model, tools=CALCULATOR, group=2)
async def step():
    return await run_v0(worker_v0(cfg, client(cfg, ScriptedServer(model))), batch_v0(1, group=2))
asyncio.run(step())
from otel_rollout.frameworks.verl import status
print(json.dumps(status()))
"""
INSTRUMENT = [str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable]
NO_ENTRY_POINT = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
PROCESSES = {
    "entry point": ([sys.executable, "-c", LOADED], {}),
    "external module": (
        [sys.executable, "-c", LOADED],
        {**NO_ENTRY_POINT, "VERL_USE_EXTERNAL_MODULES": "otel_rollout.frameworks.verl"},
    ),
    "instrument": ([*INSTRUMENT, "-c", ROLLOUT], NO_ENTRY_POINT),
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, model):
    """``(name) -> (the JSON that the process printed, its directory)``; all start at once, since each imports torch."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "VERL_"))}
    running = {}
    for name, (command, variables) in PROCESSES.items():
        directory = tmp_path_factory.mktemp("process")
        process = subprocess.Popen(
            [*command, model],
            env=clean | variables,
            cwd=directory,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running[name] = (process, directory)

    @functools.lru_cache
    def finished(name):
        process, directory = running[name]
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        assert "Traceback" not in errors
        return json.loads(printed.splitlines()[-1]), directory

    yield finished
    for process, _ in running.values():
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["entry point", "external module"])
def test_importing_verl_hooks_it_in_a_fresh_process(fresh, way):
    found, directory = fresh(way)
    assert found["before"] == []
    assert found["op"].endswith("otel_rollout/frameworks/verl/decorators.py")
    assert found["state"] == {
        "active": False,
        "installed": True,
        "applied": ["verl.utils.rollout_trace"],
        "missing": [],
        "verl_version": "0.9.1",
    }
    assert list(directory.iterdir()) == []


@pytest.mark.slow
def test_opentelemetry_instrument_traces_without_verl_s_configuration(fresh):
    found, directory = fresh("instrument")
    assert found["active"] is True
    assert found["missing"] == []
    views = list(read_trajectories(directory / "otel-rollout", on_problem=pytest.fail))
    assert sorted(view.rollout_n for view in views) == [0, 1]
    assert {view.status for view in views} == {"completed"}
    assert {len(view.spans) for view in views} == {10}


async def test_the_instrumentor_switches_on_and_off_in_a_running_process(rollout):
    instrumentor = VerlInstrumentor()
    assert list(instrumentor.instrumentation_dependencies()) == ["verl >= 0.9, < 0.10"]
    instrumentor.instrument()
    cfg = rollout.config(backend=None)
    try:
        worker = worker_v0(cfg, client(cfg, rollout.server()))
        await run_v0(worker, batch_v0(1))
        assert rollout.only().status == "completed"
    finally:
        instrumentor.uninstrument()
    rollout.exporter.clear()
    assert len(await run_v0(worker, batch_v0(1))) == 1
    assert rollout.spans() == []


async def test_the_instrumentor_takes_a_provider(model):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from verl_loop import CALCULATOR, ScriptedServer, config

    import otel_rollout

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    VerlInstrumentor().instrument(tracer_provider=provider)
    try:
        cfg = config(model, tools=CALCULATOR)
        await run_v0(worker_v0(cfg, client(cfg, ScriptedServer(model))), batch_v0(1))
        otel_rollout.flush()
    finally:
        VerlInstrumentor().uninstrument()
    (root,) = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert root.resource.attributes[semconv.PROJECT_NAME] == "demo"

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
before = {name for name in sys.modules if name.startswith("otel_rollout")}
import verl
from verl.utils import rollout_trace
ours = "otel_rollout.frameworks.verl" in sys.modules
state = sys.modules["otel_rollout.frameworks.verl"].status() if ours else None
print(json.dumps({"before": sorted(before), "ours": ours, "state": state, "op": rollout_trace.rollout_trace_op.__code__.co_filename,
    "sdk": any(name.startswith("opentelemetry.sdk") for name in sys.modules)}))
"""
ROLLOUT = """
import asyncio, json, sys
from verl_loop import *
model = sys.argv[1]
cfg = config(model, tools=CALCULATOR, group=2)
async def go():
    return await run_v0(worker_v0(cfg, client(cfg, ScriptedServer(model))), batch_v0(1, group=2))
asyncio.run(go())
from opentelemetry import trace
from otel_rollout.frameworks.verl import status
print(json.dumps({"state": status(), "provider": type(trace.get_tracer_provider()).__name__}))
"""


def run(source, *arguments, directory, command=None, **variables):
    """Run `source` in a fresh process and read the JSON that it prints last."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "VERL_"))}
    done = subprocess.run(
        [*(command or [sys.executable]), "-c", source, *map(str, arguments)],
        env=clean | variables, cwd=directory, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_entry_point_hooks_a_fresh_process(tmp_path):
    found, _ = run(LOADED, directory=tmp_path)
    assert found["before"] == []
    assert found["ours"] is True
    assert found["op"].endswith("otel_rollout/frameworks/verl/decorators.py")
    assert found["state"] == {
        "active": False,
        "installed": True,
        "applied": ["verl.utils.rollout_trace"],
        "missing": [],
        "verl_version": "0.9.1",
    }
    assert list(tmp_path.iterdir()) == []


def test_external_modules_hook_it_where_entry_points_are_off(tmp_path):
    own = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "otel_rollout.frameworks.verl"}
    found, _ = run(LOADED, directory=tmp_path, **own)
    assert found["ours"] is True
    assert found["state"]["installed"] is True
    assert found["op"].endswith("otel_rollout/frameworks/verl/decorators.py")


@pytest.mark.slow
def test_opentelemetry_instrument_traces_without_verl_s_configuration(tmp_path, model):
    pytest.importorskip("opentelemetry.instrumentation.auto_instrumentation")
    command = [str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable]
    found, errors = run(
        ROLLOUT, model, directory=tmp_path, command=command, VERL_USE_EXTERNAL_PLUGINS="none", OTEL_ROLLOUT_FILE=str(tmp_path / "t")
    )
    assert found["state"]["active"] is True
    assert found["state"]["missing"] == []
    views = list(read_trajectories(tmp_path / "t", on_problem=pytest.fail))
    assert sorted(view.rollout_n for view in views) == [0, 1]
    assert {view.status for view in views} == {"completed"}
    assert {len(view.spans) for view in views} == {10}
    assert "Traceback" not in errors


async def test_the_instrumentor_switches_on_and_off_in_a_running_process(rollout):
    instrumentor = VerlInstrumentor()
    assert list(instrumentor.instrumentation_dependencies()) == ["verl >= 0.9, < 0.10"]
    instrumentor.instrument()
    try:
        await rollout.v0(batch_v0(1), backend=None)
        assert rollout.only().status == "completed"
    finally:
        instrumentor.uninstrument()
    rollout.exporter.clear()
    await rollout.v0(batch_v0(1), backend=None)
    assert rollout.spans() == []


async def test_the_instrumentor_takes_a_provider(model):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    import otel_rollout

    from verl_loop import CALCULATOR, ScriptedServer, config

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

import logging
import sys
import types

import pytest
from verl.tools import function_tool  # noqa: F401
from verl.utils import rollout_trace
from verl_loop import batch_v0, batch_v1, client, run_v0, worker_v0

import otel_rollout
from otel_rollout import exporters, pipeline
from otel_rollout.frameworks.verl import decorators, hooks, status
from otel_rollout.frameworks.verl.switch import switch
from otel_rollout.trace_view import read_trajectories


@pytest.fixture
def warnings(caplog):
    """Our own warnings, as text."""
    caplog.set_level(logging.WARNING, logger="otel_rollout")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "otel_rollout"]


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """Where OTEL_TRACES_EXPORTER=otlp_file writes; reads what is there, and None where nothing was written."""
    monkeypatch.setenv("OTEL_ROLLOUT_FILE", str(tmp_path / "traces"))
    monkeypatch.chdir(tmp_path)

    def read():
        otel_rollout.flush()
        return list(read_trajectories(tmp_path / "traces")) if (tmp_path / "traces").exists() else None

    return read


async def plain_run(model, batch=None, **settings):
    """A step of trainer v0 with nothing configured but verl."""
    from verl_loop import CALCULATOR, ScriptedServer, config

    cfg = config(model, tools=CALCULATOR, **settings)
    return await run_v0(worker_v0(cfg, client(cfg, ScriptedServer(model))), batch or batch_v0(1))


async def test_with_no_backend_and_no_variable_nothing_is_recorded_or_configured(model, traces, warnings):
    output = await plain_run(model)
    assert len(output) == 1
    assert traces() is None
    assert warnings() == []
    assert switch.active is False
    assert status()["active"] is False
    assert pipeline._pipeline is None


async def test_an_exporter_none_is_off_too(model, traces, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    await plain_run(model)
    assert traces() is None
    assert switch.active is False


async def test_off_verl_s_own_decorator_and_scope_run_as_without_us(monkeypatch):
    """A stand-in for trackio shows whom verl's decorator calls: itself, with its own arguments."""
    logged = []
    monkeypatch.setattr(
        rollout_trace, "_log_trackio_trace", lambda name, inputs, **more: logged.append((name, inputs, more))
    )
    rollout_trace.RolloutTraceConfig.reset()
    monkeypatch.setattr(rollout_trace.RolloutTraceConfig.get_instance(), "backend", "trackio")

    class Loop:
        @rollout_trace.rollout_trace_op
        async def run(self, x, y=2):
            assert rollout_trace._current_trace_attributes() == {
                "sample_index": 3, "step": 4, "rollout_n": 5, "validate": True, "experiment_name": None,
            }  # fmt: skip
            return x + y

    with rollout_trace.rollout_trace_attr(sample_index=3, step=4, rollout_n=5, name="n", validate=True):
        assert await Loop().run(1) == 3
    with rollout_trace.rollout_trace_attr(sample_index=3, trace=False):
        assert rollout_trace._trace_enabled.get() is False
    rollout_trace.RolloutTraceConfig.reset()
    assert [(name.rsplit(".", 1)[-1], inputs, more) for name, inputs, more in logged] == [
        ("run", {"x": 1, "y": 2}, {"output": 3})
    ]


async def test_the_variable_alone_switches_on(model, traces, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp_file")
    await plain_run(model)
    (view,) = traces()
    assert (view.status, len(view.turns), view.project_name, view.experiment_name) == ("completed", 3, "demo", "exp")


async def test_backend_otel_means_the_exporters_of_the_variable_and_a_file_without_it(model, traces):
    await plain_run(model, backend="otel")
    (view,) = traces()
    assert len(view.turns) == 3
    assert pipeline._pipeline.names == ["otlp_file"]


async def test_the_backend_may_be_the_name_of_an_exporter(model, traces):
    await plain_run(model, backend="otlp_file")
    assert len(traces()) == 1


async def test_the_old_spelling_switches_on_and_its_options_hold(model, traces):
    old = {"backend": "otlp_file", "token2text": True, "max_samples_per_step_per_worker": 1}
    await plain_run(model, batch_v0(2, group=2), group=2, trainer__rollout_trace=old)
    views = traces()
    assert [view.rollout_n for view in views] in ([0, 1], [1, 0])
    assert switch.token2text is True
    assert '"prompt_text":' in views[0].turns[0].span.attributes["output.value"]
    assert views[0].project_name == "demo"


async def test_the_new_spelling_wins_over_the_old(model, traces):
    await plain_run(model, backend="otlp_file", trainer__rollout_trace={"backend": "nonsense"})
    assert len(traces()) == 1


async def test_verl_s_own_backend_stays_off_where_we_trace(rollout):
    await rollout.v0(batch_v0(1))
    config = rollout_trace.RolloutTraceConfig.get_instance()
    assert (config.backend, config.client, config.max_samples_per_step_per_worker) == (None, None, None)
    assert (config.project_name, config.experiment_name) == ("demo", "exp")


async def test_an_unknown_backend_is_one_warning_that_names_the_known_ones(model, warnings):
    for _ in range(2):
        assert len(await plain_run(model, backend="jaeger")) == 1
    (said,) = warnings()
    assert said == (
        "actor_rollout_ref.rollout.trace.backend=jaeger: exporter 'jaeger' is unknown; known here: "
        f"{', '.join(exporters.known_names())}; rollouts are not traced"
    )
    assert switch.active is False


async def test_a_missing_extra_is_one_warning_with_the_pip_command_and_verl_s_own_trace(model, warnings, monkeypatch):
    """verl's own branch for trackio is real; trackio itself, which it imports, is not there."""
    monkeypatch.setattr(exporters, "entry_points", lambda group: {})
    asked = []

    def get_backend(cls):
        asked.append(cls.get_instance().backend)

    monkeypatch.setattr(rollout_trace.RolloutTraceConfig, "get_backend", classmethod(get_backend))
    context = types.SimpleNamespace(current_run=types.SimpleNamespace(get=lambda: None))
    stand_in = types.SimpleNamespace(init=lambda **given: asked.append(given), context_vars=context)
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    assert len(await plain_run(model, backend="trackio")) == 1
    (said,) = warnings()
    assert said == (
        "actor_rollout_ref.rollout.trace.backend=trackio: exporter 'trackio' is not installed; "
        "run: pip install 'otel-rollout[trackio]'; until then verl's own rollout trace runs"
    )
    assert asked[0] == {"project": "demo", "name": "exp", "config": {"framework": "verl"}}
    assert asked[1:] == ["trackio"] * len(asked[1:])
    assert len(asked) > 4


async def test_the_first_configuration_of_a_process_stays_as_in_verl(rollout):
    cfg = rollout.config(experiment="first")
    first = worker_v0(cfg, client(cfg, rollout.server()))
    init = rollout_trace.RolloutTraceConfig.init
    init("demo", "second", None)
    assert switch.active is True
    await run_v0(first, batch_v0(1))
    assert rollout.only().experiment_name == "first"


async def test_a_method_that_verl_lacks_is_one_warning_and_the_rest_works(rollout, warnings, monkeypatch):
    monkeypatch.setattr(hooks, "_missing", [])
    monkeypatch.setattr(hooks, "_applied", [])
    old = types.ModuleType("verl.experimental.agent_loop.tool_agent_loop")
    old.ToolAgentLoop = type("ToolAgentLoop", (), {"_call_tool": lambda self: None})
    before = old.ToolAgentLoop._call_tool
    for _ in range(2):
        hooks._hook_methods(old)
    (said,) = warnings()
    assert said == (
        "verl 0.9.1 has no verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop._handle_generating_state: "
        "what it does is not traced (otel-rollout works with verl 0.9.1 to 0.9.x); rollouts go on"
    )
    assert old.ToolAgentLoop._call_tool is not before
    assert (
        status()["missing"]
        == ["verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop._handle_generating_state"] * 2
    )
    await rollout.v0(batch_v0(1))
    assert rollout.only().status == "completed"


def test_a_verl_without_the_trace_module_s_names_is_one_warning(warnings, monkeypatch):
    monkeypatch.setattr(hooks, "_missing", [])
    old = types.ModuleType("verl.utils.rollout_trace")
    old.rollout_trace_op = old.rollout_trace_attr = object()
    hooks._hook_decorators(old)
    (said,) = warnings()
    assert said.startswith("verl 0.9.1 has no verl.utils.rollout_trace.RolloutTraceConfig: ")


async def test_without_a_turn_hook_generations_are_still_recorded(rollout, monkeypatch):
    """As on a verl whose ToolAgentLoop has no such method."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

    monkeypatch.setattr(ToolAgentLoop, "_handle_generating_state", ToolAgentLoop._handle_generating_state.__wrapped__)
    await rollout.v0(batch_v0(1))
    view = rollout.only()
    assert (view.status, [turn.number for turn in view.turns]) == ("completed", [1, 2, 3])
    assert all(turn.prompt_ids for turn in view.turns)


async def test_a_module_that_was_imported_before_us_is_decorated_again(rollout):
    module = types.ModuleType("early")

    class Early:
        async def run(self, x):
            return x + 1

    Early.__module__ = "early"
    module.Early = Early
    theirs = rollout_trace.rollout_trace_op.__wrapped__
    Early.run = theirs(Early.run)
    module.rollout_trace_attr = rollout_trace.rollout_trace_attr.__wrapped__
    decorators.redecorate(module, rollout_trace)
    assert module.rollout_trace_attr is rollout_trace.rollout_trace_attr
    await rollout.v0(batch_v0(1), turns=1)
    assert await Early().run(1) == 2
    rollout.exporter.clear()
    assert await Early().run(1) == 2
    (span,) = rollout.spans()
    assert (span.kind, span.attributes["input.value"], span.attributes["output.value"]) == ("CHAIN", '{"x":1}', "2")


def test_every_hook_fits_this_verl():
    found = status(load=True)
    assert found["missing"] == []
    assert found["verl_version"] == "0.9.1"
    assert sorted(found["applied"]) == sorted(
        [
            "verl.utils.rollout_trace",
            *(f"{module}.{path}" for module, methods in hooks._METHODS.items() for path in methods),
        ]
    )


async def test_v1_with_no_backend_records_nothing(model, spans):
    from verl_loop import CALCULATOR, ScriptedServer, config, run_v1, worker_v1

    cfg = config(model, tools=CALCULATOR)
    worker = worker_v1(cfg, client(cfg, ScriptedServer(model)))
    statuses = await run_v1(worker, batch=batch_v1(1))
    assert set(statuses.values()) == {"finished"}
    assert spans.get_finished_spans() == ()

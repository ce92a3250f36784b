"""verl's own decorators, replaced: whatever verl or a user's agent loop decorates is recorded by us."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from otel_rollout.call import Call
from otel_rollout.content import to_json
from otel_rollout.frameworks.verl import turns, worker
from otel_rollout.frameworks.verl.run import current_run
from otel_rollout.frameworks.verl.switch import switch, turn_on
from otel_rollout.op import instrument
from otel_rollout.recorders import Chain, Recorder


def _active() -> bool:
    return switch.active


class VerlOp(Chain):
    """An op of verl or of a user's agent loop; token ids are counted here, they stand on the turns."""

    def inputs(self, call: Call) -> Any:
        """The inputs, without the messages that the root holds already."""
        return {key: _unboxed(value) for key, value in call.arguments.items() if key != "raw_prompt"}

    def outputs(self, call: Call, result: Any) -> Any:  # noqa: ARG002
        """An agent loop's output as lengths and scores; anything else as it is."""
        outputs = result if isinstance(result, list) else [result]
        if not outputs or not all(
            hasattr(output, "response_mask") and hasattr(output, "prompt_ids") for output in outputs
        ):
            return result
        shown = [_agent_loop_output(output) for output in outputs]
        return shown if isinstance(result, list) else shown[0]

    def end(self, call: Call, result: Any) -> None:
        """Record the result; with token2text after its texts are decoded off the event loop."""
        run, trajectory = current_run(), call.trajectory
        shown = self.outputs(call, result)
        wants_text = switch.token2text and run is not None and isinstance(shown, dict) and shown is not result
        if not wants_text or run is None or trajectory is None or not call.binding.settings.content:
            super().end(call, result)
            return

        def write() -> None:
            try:
                texts = run.texts(result.prompt_ids, result.response_ids)
                call.span.set_attributes(turns.output_attributes(to_json(shown | texts, limit=turns.TEXT_LIMIT)))
            finally:
                call.end_span()

        call.held = trajectory.later(write)
        if not call.held:
            super().end(call, result)


def _agent_loop_output(output: Any) -> dict[str, Any]:
    mask = output.response_mask
    return {
        "prompt_tokens": len(output.prompt_ids),
        "response_tokens": len(mask),
        "policy_tokens": sum(mask),
        "num_turns": output.num_turns,
        "reward_score": output.reward_score,
        "metrics": dict(vars(output.metrics)),
        "extra_fields": {key: value for key, value in output.extra_fields.items() if key != "raw_prompt"},
    }


def _unboxed(value: Any) -> Any:
    """A numpy scalar, as rows of a batch are, as Python's."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


class ToolParsing(Chain):
    """``extract_tool_calls``: how many tokens went in, which calls came out; the text stands on the turn."""

    def inputs(self, call: Call) -> Any:
        """The number of tokens."""
        ids = call.arguments.get("responses_ids")
        return {"tokens": len(ids)} if ids is not None else {}

    def outputs(self, call: Call, result: Any) -> Any:  # noqa: ARG002
        """The calls that were found."""
        if not (isinstance(result, tuple) and len(result) == 2):  # noqa: PLR2004  (content, tool calls)
            return result
        text, calls = result
        return {"content_length": len(text or ""), "tool_calls": [getattr(found, "name", None) for found in calls]}


_VERL_OP, _PARSING, _GENERATION = VerlOp(), ToolParsing(), turns.VerlGeneration()


def _recorder_for(function: Callable[..., Any]) -> Recorder:
    qualname = getattr(function, "__qualname__", "")
    if qualname.endswith("LLMServerClient.generate"):
        return _GENERATION
    return _PARSING if qualname.endswith(".extract_tool_calls") else _VERL_OP


def replace(module: ModuleType) -> None:
    """Put our decorators in the place of ``verl.utils.rollout_trace``'s, before anything is decorated with them."""
    their_op, their_attr, config = module.rollout_trace_op, module.rollout_trace_attr, module.RolloutTraceConfig

    @functools.wraps(their_op)
    def rollout_trace_op(func: Any) -> Any:
        # Where we do not trace, verl's own decorator runs as if we were not installed; it only takes methods.
        if isinstance(func, classmethod | staticmethod):
            return instrument(cast("Any", func), _VERL_OP, gate=_active)
        is_method = next(iter(inspect.signature(func).parameters), None) == "self"
        return instrument(func, _recorder_for(func), off=their_op(func) if is_method else None, gate=_active)

    @functools.wraps(their_attr)
    def rollout_trace_attr(
        sample_index: Any = None,
        step: Any = None,
        rollout_n: Any = None,
        name: str = "rollout_trace",
        validate: Any = False,
        trace: bool = True,
        **extra: Any,
    ) -> Any:
        if not switch.active:
            return their_attr(sample_index, step, rollout_n, name, validate, trace)
        return worker.trajectory_of(sample_index, step, rollout_n, name, validate, trace, **extra)

    module.rollout_trace_op, module.rollout_trace_attr = rollout_trace_op, rollout_trace_attr  # type: ignore[attr-defined]
    _replace_config_init(config)


def _replace_config_init(config: Any) -> None:
    their_init = config.init.__func__

    @functools.wraps(their_init)
    def init(
        cls: Any,
        project_name: str,
        experiment_name: str,
        backend: str,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        if cls.get_instance()._initialized:  # noqa: SLF001  verl's rule: the first configuration of a process stays
            return
        chosen = worker.legacy_trace_config(
            {
                "project_name": project_name,
                "experiment_name": experiment_name,
                "backend": backend,
                "token2text": token2text,
                "max_samples_per_step_per_worker": max_samples_per_step_per_worker,
            }
        )
        ours = turn_on(
            chosen["project_name"],
            chosen["experiment_name"],
            chosen["backend"],
            token2text=bool(chosen["token2text"]),
            max_samples=chosen["max_samples_per_step_per_worker"],
        )
        if ours:  # verl keeps the names; its own backend and its sampling with the global random state stay off
            their_init(cls, project_name, experiment_name, None)
        else:
            their_init(cls, project_name, experiment_name, backend, token2text, max_samples_per_step_per_worker)

    config.init = classmethod(init)


def redecorate(module: ModuleType) -> None:
    """Replace what verl's own decorator wrapped in a module that was imported before us."""
    for owner in [
        value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__
    ]:
        for name, method in list(vars(owner).items()):
            code = getattr(method, "__code__", None)
            if (
                code is not None
                and code.co_filename.endswith("verl/utils/rollout_trace.py")
                and hasattr(method, "__wrapped__")
            ):
                function = method.__wrapped__
                setattr(owner, name, instrument(function, _recorder_for(function), off=method, gate=_active))

"""verl's own decorators, replaced: whatever verl or a user's agent loop decorates is recorded by us."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from opentelemetry.trace import StatusCode

from otel_rollout import semconv
from otel_rollout.call import Call
from otel_rollout.content import LONG_NUMBERS, to_json
from otel_rollout.frameworks.verl import tools, turns, worker
from otel_rollout.frameworks.verl.run import AgentRun, current_run
from otel_rollout.frameworks.verl.switch import switch, turn_on
from otel_rollout.guard import guard
from otel_rollout.op import instrument
from otel_rollout.recorders import Chain, Recorder


def _active() -> bool:
    return switch.active


class VerlOp(Chain):
    """An op of verl or of a user's agent loop; token ids are counted here, they stand on the turns."""

    def inputs(self, call: Call) -> Any:
        """The inputs, without the messages that the root holds already."""
        return {key: _unboxed(value) for key, value in call.arguments.items() if key != "raw_prompt"}

    background = True

    def keep(self, call: Call, result: Any) -> Any:
        """Lengths and scores of an agent loop's output, beside the output; of anything else its JSON as of now."""
        if not (call.recording and call.binding.settings.content):
            return None
        if _is_agent_loop_output(result):
            call.notes = current_run()
            return _agent_loop_output(result), result
        if isinstance(result, list) and result and all(_is_agent_loop_output(output) for output in result):
            result = [_agent_loop_output(output) for output in result]
        return to_json(result, images=call.binding.settings.images, numbers=LONG_NUMBERS)

    def end(self, call: Call, result: Any) -> None:
        """Record the result; with token2text after its texts are decoded off the event loop."""
        if result is None or isinstance(result, str):
            call.span.set_attributes({} if result is None else turns.output_attributes(result))
            return
        shown, output = result
        run: AgentRun | None = call.notes

        def write() -> None:
            try:
                texts = run.texts(output.prompt_ids, output.response_ids) if run is not None else {}
                call.span.set_attributes(turns.output_attributes(to_json(shown | texts, limit=turns.TEXT_LIMIT)))
            finally:
                call.end_span()

        call.held = switch.token2text and call.trajectory is not None and call.trajectory.later(write)
        if not call.held:
            call.span.set_attributes(turns.output_attributes(to_json(shown, numbers=LONG_NUMBERS)))


def _is_agent_loop_output(result: Any) -> bool:
    return hasattr(result, "response_mask") and hasattr(result, "prompt_ids")


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
    """``extract_tool_calls``: how many tokens went in, which calls came out; the text stands on the turn.

    A call that the parser could not read is dropped by verl without a word: it is counted and marked here.
    """

    background = True

    def inputs(self, call: Call) -> Any:
        """The number of tokens."""
        ids = call.arguments.get("responses_ids")
        return {"tokens": len(ids)} if ids is not None else {}

    def begin(self, call: Call, args: tuple[Any, ...]) -> bool:
        """Remember the parser: it knows the token that opens a call."""
        call.notes = args[0]
        return super().begin(call, args)

    def outputs(self, call: Call, result: Any) -> Any:  # noqa: ARG002
        """The calls that were found."""
        text, calls = result
        return {"content_length": len(text or ""), "tool_calls": [getattr(found, "name", None) for found in calls]}

    def count(self, call: Call, result: Any, error: BaseException | None) -> None:
        """Count the calls that could not be parsed as tool errors."""
        super().count(call, result, error)
        if error is not None or call.trajectory is None:
            return
        lost = _opened_calls(call.notes, call.arguments.get("responses_ids")) - len(result[1])
        if lost > 0:
            call.trajectory.tally.tool_errors += lost
            call.span.set_attribute(semconv.ERROR_TYPE, tools.INVALID_ARGUMENTS)
            call.span.set_status(StatusCode.ERROR, f"{lost} tool calls could not be parsed")


def _opened_calls(parser: Any, ids: Any) -> int:
    """How many tool calls the model began, where the parser has one token for that."""
    token = getattr(parser, "tool_call_start_token", None)
    if token is None or ids is None:
        return 0
    number = parser.tokenizer.convert_tokens_to_ids(token)
    return list(ids).count(number) if isinstance(number, int) and number != parser.tokenizer.unk_token_id else 0


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
        is_method = _first_parameter(func) == "self"
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


def _first_parameter(func: Any) -> str | None:
    try:
        return next(iter(inspect.signature(func).parameters), None)
    except (TypeError, ValueError):  # a callable without a signature
        return None


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
        ours = False
        with guard("switch on rollout tracing"):
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


def redecorate(module: ModuleType, replaced: ModuleType) -> None:
    """Replace verl's own decorators, and what they wrapped, in a module that was imported before us."""
    for name in ("rollout_trace_op", "rollout_trace_attr"):
        ours = getattr(replaced, name)
        if vars(module).get(name) is ours.__wrapped__:
            setattr(module, name, ours)
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

"""verl's AgentLoopWorker: who each trajectory is, when it begins and ends, its reward and its status."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from opentelemetry import context as otel_context

from otel_rollout import rollout_trace_attr, semconv
from otel_rollout.call import Call
from otel_rollout.frameworks.verl import step
from otel_rollout.frameworks.verl.groups import FirstGroups
from otel_rollout.frameworks.verl.run import AgentRun, current_run, enter_run, leave_run
from otel_rollout.frameworks.verl.switch import switch, trace_config
from otel_rollout.guard import guard
from otel_rollout.messages import messages_json, tool_definitions_json
from otel_rollout.op import instrument
from otel_rollout.recorders import Recorder, is_number
from otel_rollout.trajectory import current_trajectory, describe_reward

REWARD: str = "reward"
_batch: ContextVar["_Batch | None"] = ContextVar("otel_rollout_verl_batch", default=None)
_kept = FirstGroups()
_legacy: dict[str, Any] = {}


def legacy_trace_config(given: dict[str, Any]) -> dict[str, Any]:
    """What ``RolloutTraceConfig.init`` was given, completed with the old spelling ``trainer.rollout_trace``."""
    return {key: given[key] if given[key] not in (None, False) else _legacy.get(key, given[key]) for key in given}


def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Read the old spelling of the switch before verl initialises its trace."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  the method's name
        with guard("read verl's trace configuration"):
            _legacy.clear()
            _legacy.update(trace_config(config))
        original(self, config, *args, **kwargs)

    return __init__


class _Batch:
    """Serial numbers of the rows of one ``generate_sequences``, unique also where a group is spread over workers."""

    def __init__(self, worker: Any, batch: Any) -> None:
        columns = batch.non_tensor_batch
        config = worker.rollout_config
        self.n = int((config.val_kwargs.n if batch.meta_info.get("validate", False) else config.n) or 1)
        keys = columns.get("uid", columns.get("index"))
        self._seen: Counter[Any] = Counter()
        self.positions = _positions(columns.get("priority"), keys, self.n)

    def serial(self, key: Any, row: dict[str, Any]) -> int:
        if self.positions:
            return int(row["priority"]) % self.n
        self._seen[key] += 1
        return self._seen[key] - 1


def _positions(priorities: Any, keys: Any, n: int) -> bool:
    """Whether ``priority`` is a row's place in the whole batch, as AgentLoopManager sets it, with groups of n rows."""
    if priorities is None or n <= 1:
        return False
    places = [int(place) for place in priorities]
    if places != list(range(places[0], places[0] + len(places))):
        return False
    changes = [at for at in range(1, len(places)) if keys is not None and keys[at] != keys[at - 1]]
    return all(places[at] % n == 0 for at in changes)


def wrap_generate_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trainer v0: number the rows of the batch, and take what the driver says of the step."""

    async def generate_sequences(self: Any, batch: Any) -> Any:
        token = None
        if switch.active:
            with guard("number the rows of a batch"):
                step.receive(batch.meta_info.get(step.HINT), batch.meta_info)
                token = _batch.set(_Batch(self, batch))
        try:
            return await original(self, batch)
        finally:
            if token is not None:
                _batch.reset(token)

    return generate_sequences


def wrap_run_agent_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    """Collect what identifies the trajectory that the method is about to open."""

    async def _run_agent_loop(
        self: Any, sampling_params: Any, trajectory: Any, *, agent_name: str, trace: bool = True, **kwargs: Any
    ) -> Any:
        hint = kwargs.pop(step.HINT, None)
        run = None
        if switch.active:
            with guard("identify a trajectory"):
                run = AgentRun(
                    self, list(kwargs.get("raw_prompt", ())), _identity(trajectory, agent_name, trace, kwargs)
                )
                step.receive(hint, {"global_steps": trajectory["step"], "validate": trajectory["validate"]})
        token = None if run is None else enter_run(run)
        try:
            return await original(self, sampling_params, trajectory, agent_name=agent_name, trace=trace, **kwargs)
        finally:
            if token is not None:
                leave_run(token)

    return _run_agent_loop


def _identity(trajectory: dict[str, Any], agent_name: str, trace: bool, row: dict[str, Any]) -> dict[str, Any]:
    session, uid, batch = row.get("session_id"), row.get("uid"), _batch.get()
    key = str(uid) if uid is not None else trajectory["sample_index"]
    if session is not None:
        rollout_n = session
    elif batch is not None:
        rollout_n = batch.serial(key, row)
    else:
        rollout_n = trajectory["rollout_n"]
    # Trainer v1 passes trace=False for every sample, because its own trace is not written yet.
    wanted = trace or session is not None
    if wanted and switch.max_samples is not None:
        wanted = _kept.keeps((trajectory["step"], bool(trajectory["validate"])), key, switch.max_samples)
    return {"rollout_n": rollout_n, "group_id": None if uid is None else str(uid), "name": agent_name, "trace": wanted}


class _Opened(contextlib.ContextDecorator):
    """What stands in verl's ``with rollout_trace_attr(...)``: a trajectory with its conversation."""

    def __init__(self, scope: rollout_trace_attr, run: AgentRun | None) -> None:
        self._scope, self._run = scope, run

    def _recreate_cm(self) -> Any:
        return _Opened(self._scope, self._run)

    def __enter__(self) -> Any:
        token = None
        with guard("link to the trainer's step"):
            remote = step.remote_context()
            token = None if remote is None else otel_context.attach(remote)
        trajectory = self._scope.__enter__()
        with guard("describe a trajectory"):
            if self._run is not None and trajectory.recording and trajectory.binding.settings.content:  # type: ignore[union-attr]
                run, images = self._run, trajectory.binding.settings.images  # type: ignore[union-attr]
                trajectory.texts = {
                    semconv.INPUT_MESSAGES: lambda: messages_json(run.raw_prompt, images=images),
                    semconv.OUTPUT_MESSAGES: lambda: messages_json(run.conversation(), images=images),
                }
        self._step_token = token
        return trajectory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        with guard("describe the end of a trajectory"):
            trajectory, run = current_trajectory(), self._run
            if trajectory is not None and run is not None and trajectory.recording and run.definitions():
                trajectory.texts[semconv.TOOL_DEFINITIONS] = lambda: tool_definitions_json(run.definitions())
        self._scope.__exit__(kind, error, stack)
        if self._step_token is not None:
            with guard("leave the trainer's step"):
                otel_context.detach(self._step_token)


def trajectory_of(
    sample_index: Any,
    step_number: Any,
    rollout_n: Any,
    name: str,
    validate: Any,
    trace: bool,
    **extra: Any,
) -> Any:
    """What our ``rollout_trace_attr`` gives verl: the trajectory of the worker's run, or of whoever else calls it."""
    run = current_run()
    identity: dict[str, Any] = {"rollout_n": rollout_n, "group_id": None, "name": name, "trace": trace}
    if run is not None and run.identity:
        identity, run.identity = run.identity, {}
    else:
        run = None
    asked = {"sample_index": sample_index, "step": step_number, "validate": validate, **identity, **extra}
    return _Opened(rollout_trace_attr(**asked), run)


class RewardScore(Recorder):
    """``AgentLoopWorker._compute_score``: verl's reward path, with the reward's components."""

    kind = semconv.KIND_EVALUATOR
    phase = "reward"
    background = True

    def begin(self, call: Call, args: tuple[Any, ...]) -> bool:
        """A span only where there is a reward: computed here, or by the agent loop itself."""
        super().begin(call, args)
        call.name = f"{semconv.EVALUATE} {REWARD}"
        outputs = call.arguments["outputs"]
        call.silent = args[0].reward_loop_worker_handles is None and outputs[-1].reward_score is None
        call.notes = current_run()
        return True

    def keep(self, call: Call, result: Any) -> Any:  # noqa: ARG002  _compute_score writes into its argument
        """The scores and the status, read before the worker goes on with the output."""
        output = call.arguments["outputs"][-1]
        return _scores(output), _status(call.notes, output)

    def count(self, call: Call, result: Any, error: BaseException | None) -> None:
        """Keep the reward and its components, and read the status from the output."""
        super().count(call, result, error)
        trajectory = call.trajectory
        if trajectory is None or error is not None:
            return
        scores, trajectory.status = result
        for name, score in scores.items():
            trajectory.note_reward(score, name)

    def end(self, call: Call, result: Any) -> None:
        """Write the reward, and an event for each component."""
        for name, score in result[0].items():
            if name == REWARD:
                describe_reward(call.span, name, score)
            else:
                call.span.add_event(
                    semconv.EVALUATION_EVENT, {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: score}
                )


def _scores(output: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    if output.reward_score is not None:
        found[REWARD] = float(output.reward_score)
    for name, value in (output.extra_fields.get("reward_extra_info") or {}).items():
        if name != "score" and is_number(value):
            found[str(name)] = float(value)
    return found


def _status(run: AgentRun | None, output: Any) -> str:
    finish = run.last_finish if run is not None else None
    if finish == "abort":
        return semconv.STATUS_ABORTED
    worker = run.worker if run is not None else None
    limit = getattr(getattr(worker, "rollout_config", None), "response_length", None)
    if finish == "length" or (isinstance(limit, int) and len(output.response_mask) >= limit):
        return semconv.STATUS_TRUNCATED
    return semconv.STATUS_COMPLETED


def wrap_compute_score(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AgentLoopWorker._compute_score`` as an op."""
    return functools.wraps(original)(instrument(original, RewardScore(), gate=lambda: switch.active))

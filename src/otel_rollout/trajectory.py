"""Who a rollout is: its identity, its resource and tracer, what happened in it, and `rollout_trace_attr` that opens it."""

import copy
import functools
import inspect
import operator
import threading
import time
import uuid
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from otel_rollout import content, semconv
from otel_rollout.binding import Binding, current_binding
from otel_rollout.guard import guard, warn_once
from otel_rollout.late import late
from otel_rollout.metrics import instruments
from otel_rollout.tokens import TokenLedger

_INT64: Final = 1 << 63
_current: Final[ContextVar["Trajectory | None"]] = ContextVar("otel_rollout_trajectory", default=None)


def current_trajectory() -> "Trajectory | None":
    """The trajectory that the calling code runs in, or ``None``."""
    return _current.get()


@dataclass(slots=True)
class Tally:
    """What happened in a trajectory, counted whether or not its spans are sampled. Times in seconds, lengths in tokens."""

    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int | None = None
    observation_tokens: int = 0
    last_length: int = 0
    mismatches: int = 0
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)

    def saw_policy(self, version: int) -> None:
        """Widen the range of policy versions that generated tokens."""
        low, high = self.policy_version_min, self.policy_version_max
        self.policy_version_min = version if low is None else min(low, version)
        self.policy_version_max = version if high is None else max(high, version)


class Trajectory:
    """One complete attempt at a sample, as `rollout_trace_attr` yields it.

    Attributes:
        id: unique; the attribute ``rollout.trajectory_id``.
        active: False under ``trace=False`` or where nothing is configured: then every method does nothing.
        recording: False as well when the trajectory is sampled out: metrics only.
        ledger, tally: tokens and counts so far; for adapters of frameworks.
        status: set by an adapter that knows better than "no exception"; one of CONVENTIONS' ``rollout.status``.
    """

    __slots__ = (
        "_context", "_late", "_reason", "_span", "_started", "active", "binding", "id", "identity", "initial_messages", "labels",
        "last_error", "ledger", "messages", "recording", "status", "tally", "tool_definitions", "tracer",
    )  # fmt: skip

    def __init__(self, trajectory_id: str | None = None) -> None:
        self.id = trajectory_id or uuid.uuid4().hex
        self.active = self.recording = False
        self.binding: Binding | None = None
        self.identity: dict[str, Any] = {}
        self.labels: dict[str, Any] = {}
        self.tracer: trace.Tracer | None = None
        self.tally = Tally()
        self.ledger = TokenLedger()
        self.status: str | None = None
        self.last_error: BaseException | None = None
        self.messages: Callable[[], str] | None = None
        self.initial_messages: Callable[[], str] | None = None
        self.tool_definitions: str | None = None
        self._reason: str | None = None
        self._span: Span = trace.INVALID_SPAN
        self._context = otel_context.Context()
        self._late = False
        self._started = 0.0

    def reward(self, value: float, name: str = "reward") -> None:
        """Record a reward: ``name="reward"`` is the trajectory's own, any other name one of its components.

        Args:
            value: a number, or what ``float()`` takes (bool, numpy or 0-d tensor).
            name: low in cardinality; dots become ``_``.
        """
        if not self.active:
            return
        with guard("record a reward"):
            score = self.note_reward(value, name)
            if score is not None and self.recording and self.tracer is not None:
                span = self.tracer.start_span(f"{semconv.EVALUATE} {name}", attributes={semconv.SPAN_KIND: semconv.KIND_EVALUATOR})
                describe_reward(span, name, score)
                span.end()

    def note_reward(self, value: Any, name: str) -> float | None:
        """Keep a reward for the root and the metrics, without a span of its own; ``None`` if it is no number."""
        try:
            score = float(value)
        except Exception:  # noqa: BLE001  whatever float() raises on the user's object
            warn_once(f"reward:{name}", "reward %r is no number but a %s; it is not recorded", name, type(value).__name__)
            return None
        self.tally.rewards[str(name).replace(".", "_")] = score
        return score

    def reject(self, reason: str) -> None:
        """Mark the trajectory as not used for training, with a reason that is low in cardinality."""
        self._reason = content.text(str(reason), 1024)

    def set(self, key: str | None = None, value: Any = None, /, **attributes: Any) -> None:
        """Add attributes ``rollout.attr.<name>`` to the root span: ``set("dataset", "gsm8k")`` or ``set(dataset="gsm8k")``."""
        with guard("set attributes of a trajectory"):
            if key is not None:
                attributes[key] = value
            self._span.set_attributes({semconv.USER_ATTRIBUTE_PREFIX + name: scalar(item) for name, item in attributes.items()})

    def event(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Add an event to the root span."""
        self._span.add_event(name, dict(attributes))

    @property
    def context(self) -> otel_context.Context:
        """OpenTelemetry context whose span is the root: exemplars point to it, late children hang below it."""
        return self._context

    def later(self, job: Callable[[], None]) -> bool:
        """Complete spans of this trajectory off the event loop, before its root ends. False if too much waits already."""
        taken = late.submit(job)
        self._late = self._late or taken
        return taken

    def _start(self, binding: Binding, identity: dict[str, Any], agent_name: str) -> None:
        self.binding, self.identity, self.active = binding, identity, True
        self.tracer = _tracer_of(binding.tracer, identity)
        self.labels = {semconv.AGENT_NAME: agent_name, "rollout.validate": identity[semconv.VALIDATE]}
        if binding.framework:
            self.labels[semconv.FRAMEWORK] = binding.framework
        step_span = trace.get_current_span().get_span_context()
        self._span = self.tracer.start_span(
            f"{semconv.OPERATION_INVOKE_AGENT} {agent_name}",
            context=otel_context.set_value(semconv.CONTEXT_IDENTITY, identity, otel_context.Context()),
            kind=SpanKind.INTERNAL,
            attributes={
                semconv.SPAN_KIND: semconv.KIND_AGENT,
                semconv.OPERATION_NAME: semconv.OPERATION_INVOKE_AGENT,
                semconv.AGENT_NAME: agent_name,
                semconv.CONVERSATION_ID: self.id,
                semconv.SESSION_ID: identity[semconv.GROUP_ID],
                **({} if hasattr(self.tracer, "resource") else identity),
            },
            links=[Link(step_span)] if step_span.is_valid else None,
        )
        self.recording = self._span.is_recording()
        self._context = trace.set_span_in_context(self._span)
        self._started = time.perf_counter()
        instruments().add(semconv.METRIC_TRAJECTORIES_ACTIVE, 1, self.labels)

    def _end(self, error: BaseException | None) -> None:
        ended, duration = time.time_ns(), time.perf_counter() - self._started
        status = self._final_status(error)
        self._measure(status, duration, error)
        span = self._span
        if not self.recording:
            span.end()
            return
        if error is not None and not isinstance(error, GeneratorExit):
            record_error(span, error, self)
        span.set_attributes(self._summary(status))

        def finish() -> None:
            with guard("write the conversation of a trajectory"):
                for name, messages in ((semconv.INPUT_MESSAGES, self.initial_messages), (semconv.OUTPUT_MESSAGES, self.messages)):
                    if messages is not None:
                        span.set_attribute(name, messages())
            span.end(ended)

        if not (self._late and late.submit(finish)):
            finish()

    def _final_status(self, error: BaseException | None) -> str:
        if isinstance(error, CancelledError | GeneratorExit):
            return semconv.STATUS_CANCELLED
        if error is not None:
            return semconv.STATUS_ERROR
        if self._reason is not None:
            return semconv.STATUS_REJECTED
        return self.status or semconv.STATUS_COMPLETED

    def _summary(self, status: str) -> dict[str, Any]:
        tally = self.tally
        found: dict[str, Any] = {
            semconv.STATUS: status,
            semconv.REJECTION_REASON: self._reason,
            semconv.TURNS: tally.turns,
            semconv.TOOL_CALLS: tally.tool_calls,
            semconv.TOOL_ERRORS: tally.tool_errors,
            semconv.INPUT_TOKENS: tally.input_tokens,
            semconv.OUTPUT_TOKENS: tally.output_tokens,
            semconv.CACHE_READ_TOKENS: tally.cache_read_tokens,
            semconv.RESPONSE_TOKENS: tally.output_tokens,
            semconv.OBSERVATION_TOKENS: tally.observation_tokens,
            semconv.POLICY_VERSION_MIN: tally.policy_version_min,
            semconv.POLICY_VERSION_MAX: tally.policy_version_max,
            semconv.TOOL_DEFINITIONS: self.tool_definitions,
        }
        for name, score in tally.rewards.items():
            found[semconv.REWARD if name == "reward" else semconv.REWARDS_PREFIX + name] = score
        return {key: value for key, value in found.items() if value is not None}

    def _measure(self, status: str, duration: float, error: BaseException | None) -> None:
        record, add, tally, here = instruments().record, instruments().add, self.tally, self._context
        labels = self.labels if error is None else {**self.labels, semconv.ERROR_TYPE: error_type(error)}
        add(semconv.METRIC_TRAJECTORIES_ACTIVE, -1, self.labels)
        add(semconv.METRIC_TRAJECTORIES, 1, {**self.labels, semconv.STATUS: status}, here)
        record(semconv.METRIC_AGENT_DURATION, duration, labels, here)
        record(semconv.METRIC_AGENT_INFERENCE_CALLS, tally.turns, self.labels, here)
        record(semconv.METRIC_AGENT_TOOL_CALLS, tally.tool_calls, self.labels, here)
        record(semconv.METRIC_TURNS, tally.turns, self.labels, here)
        record(semconv.METRIC_TOKENS, tally.last_length, self.labels, here)
        for name, score in tally.rewards.items():
            record(semconv.METRIC_REWARD, score, {**self.labels, semconv.LABEL_REWARD_NAME: name}, here)
        step, oldest = self.identity.get(semconv.STEP), tally.policy_version_min
        if isinstance(step, int) and oldest is not None:
            record(semconv.METRIC_POLICY_LAG, max(0, step - oldest), self.labels, here)
        rest = max(0.0, duration - sum(tally.seconds.values()))
        for phase, seconds in (*tally.seconds.items(), ("other", rest)):
            record(semconv.METRIC_TIME, seconds, {**self.labels, semconv.LABEL_PHASE: phase}, here)


def describe_reward(span: Span, name: str, score: float) -> None:
    """Write one reward on the span that computed it: the standard attributes and the standard event."""
    found = {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: score}
    span.set_attributes(found)
    span.add_event(semconv.EVALUATION_EVENT, found)


def error_type(error: BaseException) -> str:
    """The value of ``error.type`` for an exception."""
    return type(error).__qualname__


def record_error(span: Span, error: BaseException, trajectory: Trajectory | None = None) -> None:
    """Mark a span as failed: ``error.type``, status and an exception event; the stack trace only where it is first seen."""
    kind = error_type(error)
    try:
        message = content.text(str(error), 4096)
    except Exception:  # noqa: BLE001  the user's __str__
        message = f"<{kind} whose text cannot be read>"
    event = {"exception.type": kind, "exception.message": message}
    if trajectory is None or trajectory.last_error is not error:
        event["exception.stacktrace"] = content.text(_stack(error), 16_384)
    if trajectory is not None:
        trajectory.last_error = error
    span.add_event("exception", event)
    span.set_attribute(semconv.ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR, f"{kind}: {message}" if message else kind)


def _stack(error: BaseException) -> str:
    import traceback  # noqa: PLC0415  only a failure needs it

    return "".join(traceback.format_tb(error.__traceback__, limit=-30))


def scalar(value: Any) -> str | bool | int | float:
    """A value that an attribute can hold: itself if it is a plain scalar, else its JSON."""
    if isinstance(value, str):
        return content.text(value)
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return scalar(item())
    return content.to_json(value)


def whole_number(value: Any) -> int | str:
    """An id or a count: an int when its source is an int (numpy's too), else its text."""
    try:
        number = operator.index(value)
    except TypeError:
        return content.text(str(value), 1024)
    return number if -_INT64 <= number < _INT64 else str(number)


def _tracer_of(tracer: trace.Tracer, identity: Mapping[str, Any]) -> trace.Tracer:
    # A copy of the SDK's tracer with a resource of its own: the only way that costs nothing per span and leaks nothing.
    resource = getattr(tracer, "resource", None)
    if resource is None:
        return tracer
    own = copy.copy(tracer)
    own.resource = resource.merge(type(resource)(dict(identity)))  # type: ignore[attr-defined]
    return own


class _Idle:
    """Counts the open trajectories of the process and says when the last one ended."""

    __slots__ = ("callback", "count", "lock")

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()
        self.callback: Callable[[], None] | None = None

    def add(self, number: int) -> None:
        with self.lock:
            self.count += number
            idle = self.count == 0
        if idle and self.callback is not None:
            self.callback()


idle: Final = _Idle()


class rollout_trace_attr:  # noqa: N801  verl's name for it
    """Open a trajectory: everything traced inside belongs to it. Use with ``with`` or ``async with``, or as a decorator.

    Args:
        sample_index: the sample's id in the dataset, usually an int.
        step: the trainer's global step; ``None`` and negative numbers are left out.
        rollout_n: serial number of this trajectory among the n of its sample.
        name: what the agent is called; the root span is ``invoke_agent {name}``.
        validate: test set rather than training.
        trace: False switches off everything below.
        group_id: the GRPO group; by default ``{experiment_name}/{step}/{sample_index}``.
        trajectory_id: unique; made up by default.
        project_name, experiment_name: instead of what `configure` was told.
        **extra: further attributes of the resource, written as ``rollout.attr.<name>``.

    Yields:
        Trajectory: takes rewards, attributes and a rejection; never ``None``.
    """

    def __init__(
        self,
        sample_index: Any = None,
        step: Any = None,
        rollout_n: Any = None,
        name: str = "rollout_trace",
        validate: Any = False,  # noqa: FBT002  verl's signature
        trace: bool = True,  # noqa: FBT001, FBT002  verl's signature
        *,
        group_id: str | None = None,
        trajectory_id: str | None = None,
        project_name: str | None = None,
        experiment_name: str | None = None,
        **extra: Any,
    ) -> None:
        self._sample = (sample_index, step, rollout_n, validate)
        self._name, self._trace = name, trace
        self._names = (group_id, trajectory_id, project_name, experiment_name)
        self._extra = extra
        self._trajectory: Trajectory | None = None
        self._tokens: tuple[Token[Trajectory | None], Any] | None = None

    def __enter__(self) -> Trajectory:
        outer = _current.get()
        trajectory = self._trajectory = Trajectory(self._names[1])
        if not self._trace or (outer is not None and not outer.active):
            self._tokens = (_current.set(trajectory), None)
            return trajectory
        with guard("open a trajectory"):
            binding = current_binding()
            if binding is not None:
                trajectory._start(binding, self._identity(binding, trajectory.id), str(self._name))  # noqa: SLF001
                self._tokens = (_current.set(trajectory), otel_context.attach(trajectory.context))
                idle.add(1)
        return trajectory

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        trajectory, tokens = self._trajectory, self._tokens
        self._trajectory = self._tokens = None
        if trajectory is None or tokens is None:
            return
        with guard("leave a trajectory"):
            if tokens[1] is not None:
                otel_context.detach(tokens[1])
            _current.reset(tokens[0])
        if trajectory.active:
            with guard("end a trajectory"):
                trajectory._end(error)  # noqa: SLF001
            with guard("flush after the last trajectory"):
                idle.add(-1)

    async def __aenter__(self) -> Trajectory:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function: each call of it is a trajectory of its own."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def in_trajectory(*args: Any, **kwargs: Any) -> Any:
                with copy.copy(self):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def in_trajectory(*args: Any, **kwargs: Any) -> Any:
                with copy.copy(self):
                    return function(*args, **kwargs)

        return in_trajectory

    def _identity(self, binding: Binding, trajectory_id: str) -> dict[str, Any]:
        sample_index, step, rollout_n, validate = self._sample
        group_id, _, project, experiment = self._names
        experiment = experiment or binding.experiment_name
        number = None if step is None else whole_number(step)
        if isinstance(number, str):
            warn_once("step", "rollout_trace_attr(step=%r): a step is an int; it is recorded as text", step)
        elif number is not None and number < 0:
            number = None
        index = None if sample_index is None else whole_number(sample_index)
        found: dict[str, Any] = {
            semconv.PROJECT_NAME: project or binding.project_name,
            semconv.EXPERIMENT_NAME: experiment,
            semconv.STEP: number,
            semconv.SAMPLE_INDEX: index,
            semconv.ROLLOUT_N: None if rollout_n is None else whole_number(rollout_n),
            semconv.VALIDATE: bool(validate),
            semconv.GROUP_ID: str(group_id) if group_id is not None else _default_group(experiment, number, index, trajectory_id),
            semconv.TRAJECTORY_ID: trajectory_id,
            semconv.FRAMEWORK: binding.framework,
            semconv.FRAMEWORK_VERSION: binding.framework_version,
        }
        found.update({semconv.USER_ATTRIBUTE_PREFIX + name: scalar(value) for name, value in self._extra.items()})
        return {key: value for key, value in found.items() if value is not None}


def _default_group(experiment: str | None, step: int | str | None, index: int | str | None, trajectory_id: str) -> str:
    if index is None:
        return trajectory_id
    return "/".join(str(part) for part in (experiment, step, index) if part is not None)

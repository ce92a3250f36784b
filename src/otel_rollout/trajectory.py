"""One rollout: its resource, its tracer, what happened in it, and `rollout_trace_attr` that opens it."""

import copy
import functools
import inspect
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span

from otel_rollout import semconv
from otel_rollout.binding import Binding, current_binding
from otel_rollout.failure import error_type, record_error
from otel_rollout.guard import guard, warn_once
from otel_rollout.identity import Asked, identity_of, scalar, word
from otel_rollout.idle import idle
from otel_rollout.ids import new_id
from otel_rollout.late import late
from otel_rollout.metrics import instruments
from otel_rollout.tally import Tally, measure_reward, reward_key
from otel_rollout.tokens import TokenLedger

F = TypeVar("F", bound=Callable[..., Any])
_current: Final[ContextVar["Trajectory | None"]] = ContextVar("otel_rollout_trajectory", default=None)


def current_trajectory() -> "Trajectory | None":
    """The trajectory that the calling code runs in, or ``None``."""
    return _current.get()


class Trajectory:
    """One complete attempt at a sample, as `rollout_trace_attr` yields it.

    Attributes:
        id: unique; the attribute ``rollout.trajectory_id``.
        active: False under ``trace=False`` or where nothing is configured: then every method does nothing.
        recording: False as well when the trajectory is sampled out: metrics only.

    For adapters of frameworks:
        ledger, tally: tokens and counts so far.
        status: set where "no exception" does not tell; one of the values of ``rollout.status``.
        texts: attributes of the root that are long: name to a function that makes the text, called at the end.
    """

    __slots__ = (
        "_closed", "_context", "_ended", "_late", "_reason", "_span", "_started", "active", "binding", "id", "identity",
        "labels", "last_error", "ledger", "recording", "status", "tally", "texts", "tracer",
    )  # fmt: skip

    def __init__(self, trajectory_id: Any = None) -> None:
        self.id = (None if trajectory_id is None else word(trajectory_id)) or new_id()
        self.active = self.recording = False
        self.binding: Binding | None = None
        self.identity: dict[str, Any] = {}
        self.labels: dict[str, Any] = {}
        self.tracer: trace.Tracer | None = None
        self.tally = Tally()
        self.ledger = TokenLedger()
        self.status: str | None = None
        self.last_error: BaseException | None = None
        self.texts: dict[str, Callable[[], str]] = {}
        self._reason: str | None = None
        self._span: Span = trace.INVALID_SPAN
        self._context = otel_context.Context()
        self._closed = self._ended = self._late = False
        self._started = 0.0

    def reward(self, value: float, name: str = "reward") -> None:
        """Record a reward: ``name="reward"`` is the trajectory's own, any other name one of its components.

        Args:
            value: a number, or what ``float()`` takes (bool, numpy or 0-d tensor); else it is said once and left out.
            name: low in cardinality; dots become ``_``.
        """
        if not self.active:
            return
        with guard("record a reward"):
            name = word(name)
            score = self.note_reward(value, name)
            if score is not None and self._ended:
                measure_reward(reward_key(name), score, self.labels, self._context)
            if score is not None and self.recording and self.tracer is not None:
                kind = {semconv.SPAN_KIND: semconv.KIND_EVALUATOR}
                span = self.tracer.start_span(f"{semconv.EVALUATE} {name}", context=self._context, attributes=kind)
                describe_reward(span, name, score)
                span.end()

    def note_reward(self, value: Any, name: str) -> float | None:
        """Keep a reward for the root and the metrics, without a span of its own; ``None`` if it is no number."""
        try:
            score = float(value)
        except Exception:  # whatever float() raises on the user's object
            kind = type(value).__name__
            warn_once(f"reward:{name}", "reward %r is no number but a %s; it is not recorded", name, kind)
            return None
        self.tally.rewards[reward_key(name)] = score
        return score

    def reject(self, reason: str) -> None:
        """Mark the trajectory as not used for training, with a reason that is low in cardinality."""
        if self._closed:
            return
        with guard("reject a trajectory"):
            self._reason = word(reason)

    def set(self, key: str | None = None, value: Any = None, /, **attributes: Any) -> None:
        """Add attributes ``rollout.attr.<name>`` to the root span: ``set("level", 3)`` or ``set(level=3)``."""
        if self._closed:
            return
        with guard("set attributes of a trajectory"):
            if key is not None:
                attributes[key] = value
            prefix = semconv.USER_ATTRIBUTE_PREFIX
            self._span.set_attributes({f"{prefix}{word(name)}": scalar(item) for name, item in attributes.items()})

    def event(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Add an event to the root span."""
        with guard("add an event to a trajectory"):
            self._span.add_event(name, dict(attributes))

    @property
    def context(self) -> otel_context.Context:
        """OpenTelemetry context whose span is the root: exemplars point to it, late children hang below it."""
        return self._context

    def later(self, job: Callable[[], None]) -> bool:
        """Complete spans off the event loop, before the root of this trajectory ends. False if too much waits."""
        taken = late.submit(job, must=self._late)
        self._late = self._late or taken
        return taken

    def start(self, binding: Binding, identity: dict[str, Any], agent_name: str) -> None:
        """Start the root span; called by `rollout_trace_attr`."""
        self.binding, self.identity = binding, identity
        self.tracer = _tracer_of(binding.tracer, identity)
        self.labels = {semconv.AGENT_NAME: agent_name, semconv.VALIDATE: identity[semconv.VALIDATE]}
        if binding.framework:
            self.labels[semconv.FRAMEWORK] = binding.framework
        step_span = trace.get_current_span().get_span_context()
        self._span = self.tracer.start_span(
            f"{semconv.OPERATION_INVOKE_AGENT} {agent_name}",
            context=otel_context.set_value(semconv.CONTEXT_IDENTITY, identity, otel_context.Context()),
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
        self.active = True

    def end(self, error: BaseException | None) -> None:
        """End the root span; called by `rollout_trace_attr`."""
        ended, duration = time.time_ns(), time.perf_counter() - self._started
        self._closed = True
        if error is not None and self.recording and not isinstance(error, GeneratorExit):
            shown = self.binding is None or self.binding.settings.content
            record_error(self._span, error, self, message=shown)
        self.last_error = None  # its traceback holds the frames of the rollout
        failed = None if error is None else error_type(error)
        forced = None if error is None else semconv.STATUS_ERROR
        if isinstance(error, CancelledError | GeneratorExit):
            forced = semconv.STATUS_CANCELLED

        def finish() -> None:
            with guard("summarise a trajectory"):
                self._finish(forced or self._final_status(), duration, failed)
            self._span.end(ended)

        in_background = self.binding is not None and self.binding.start_span is not None
        if not ((self._late or in_background) and late.submit(finish, must=self._late)):
            finish()

    def _finish(self, status: str, duration: float, failed: str | None) -> None:
        self._ended = True  # a reward from here on is a late one, which measures itself
        with guard("measure a trajectory"):
            self._measure(status, duration, failed)
        if not self.recording:
            return
        found: dict[str, Any] = {semconv.STATUS: status, **self.tally.attributes()}
        if self._reason is not None:
            found[semconv.REJECTION_REASON] = self._reason
        self._span.set_attributes(found)
        texts, self.texts = self.texts, {}  # they hold the messages of the rollout
        for name, text in texts.items():
            with guard(f"write {name}"):
                self._span.set_attribute(name, text())

    def _final_status(self) -> str:
        if self._reason is not None:
            return semconv.STATUS_REJECTED
        return self.status or semconv.STATUS_COMPLETED

    def _measure(self, status: str, duration: float, failed: str | None) -> None:
        record, add, here = instruments().record, instruments().add, self._context
        labels = self.labels if failed is None else {**self.labels, semconv.ERROR_TYPE: failed}
        add(semconv.METRIC_TRAJECTORIES_ACTIVE, -1, self.labels)
        add(semconv.METRIC_TRAJECTORIES, 1, {**self.labels, semconv.STATUS: status})
        record(semconv.METRIC_AGENT_DURATION, duration, labels, here)
        self.tally.measure(self.labels, here, duration, self.identity.get(semconv.STEP))


def describe_reward(span: Span, name: str, score: float) -> None:
    """Write one reward on the span that computed it: the standard attributes and the standard event."""
    found: dict[str, Any] = {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: score}
    span.set_attributes(found)
    span.add_event(semconv.EVALUATION_EVENT, found)


def _tracer_of(tracer: trace.Tracer, identity: Mapping[str, Any]) -> trace.Tracer:
    # A copy of the SDK's tracer with a resource of its own: the only way that costs nothing per span and leaks nothing.
    resource = getattr(tracer, "resource", None)
    if resource is None:
        return tracer
    own = copy.copy(tracer)
    own.resource = resource.merge(type(resource)(dict(identity)))  # type: ignore[attr-defined]
    return own


class rollout_trace_attr:  # noqa: N801  verl's name for it
    """Open a trajectory: everything traced inside belongs to it. For ``with``, ``async with`` or as a decorator.

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
        validate: Any = False,
        trace: bool = True,
        *,
        group_id: Any = None,
        trajectory_id: str | None = None,
        project_name: str | None = None,
        experiment_name: str | None = None,
        **extra: Any,
    ) -> None:
        self._asked = Asked(
            sample_index=sample_index,
            step=step,
            rollout_n=rollout_n,
            validate=validate,
            group_id=group_id,
            project_name=project_name,
            experiment_name=experiment_name,
            extra=extra,
        )
        self._name, self._trace, self._id = name, trace, trajectory_id
        self._opened: list[tuple[Trajectory, tuple[Token[Trajectory | None], Any]]] = []

    def __enter__(self) -> Trajectory:
        outer = _current.get()
        trajectory = Trajectory(self._id)
        if not self._trace or (outer is not None and not outer.active):
            self._opened.append((trajectory, (_current.set(trajectory), None)))
            return trajectory
        with guard("open a trajectory"):
            binding = current_binding()
            if binding is not None:
                trajectory.start(binding, identity_of(self._asked, binding, trajectory.id), word(self._name))
                tokens = (_current.set(trajectory), otel_context.attach(trajectory.context))
                self._opened.append((trajectory, tokens))
                idle.add(1)
        return trajectory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        # Concurrent tasks may share one object: each leaves the trajectory that is its own.
        here = _current.get()
        opened = next((one for one in self._opened if one[0] is here), None)
        if opened is None:
            return
        self._opened.remove(opened)
        trajectory, tokens = opened
        with guard("leave a trajectory"):
            if tokens[1] is not None:
                otel_context.detach(tokens[1])
            _current.reset(tokens[0])
        if trajectory.active:
            with guard("end a trajectory"):
                trajectory.end(error)
            with guard("flush after the last trajectory"):
                idle.add(-1)

    async def __aenter__(self) -> Trajectory:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, stack)

    def _again(self) -> "rollout_trace_attr":
        again = copy.copy(self)
        again._opened = []  # noqa: SLF001  its own class
        return again

    def __call__(self, function: F) -> F:
        """Decorate a function: each call of it is a trajectory of its own.

        Raises:
            TypeError: it is a generator, whose body runs where its items are taken.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"rollout_trace_attr does not decorate generators ({function!r}): use `with` inside it")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def in_trajectory(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def in_trajectory(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return function(*args, **kwargs)

        return in_trajectory  # type: ignore[return-value]

"""A decorated function and one call of it: what a recorder reads from and writes to."""

import inspect
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from otel_rollout import semconv
from otel_rollout.binding import Binding, current_binding
from otel_rollout.failure import record_error
from otel_rollout.guard import guard
from otel_rollout.identity import word
from otel_rollout.trajectory import Trajectory, current_trajectory

if TYPE_CHECKING:
    from otel_rollout.recorders import Recorder

_call: Final[ContextVar["Call | None"]] = ContextVar("otel_rollout_call", default=None)


class Call:
    """One call of an op: what a recorder reads from and writes to.

    Attributes:
        op: the function's description.
        trajectory: the trajectory it belongs to; ``None`` outside any.
        arguments: the bound inputs by parameter name, without ``self``.
        parent: the op that this one runs in.
        name, span_kind, attributes: of the span about to start; set by the recorder's ``begin``.
        span: the span; not recording where the trajectory is sampled out.
        started, ended: epoch nanoseconds; `seconds` is the duration.
        held: True while somebody else will end the span with `end_span`.
        notes: whatever a recorder keeps from ``begin`` to ``end``.
        silent: True where the call is measured but gets no span.
        partial: what a stream had yielded when it failed or was closed.
        last_error: the failure whose stack trace stands on a span below; of use where there is no trajectory.
    """

    __slots__ = (
        "_clock", "_context", "_tokens", "arguments", "attributes", "binding", "ended", "held", "last_error",
        "name", "notes", "op", "parent", "partial", "seconds", "silent", "span", "span_kind", "started",
        "trajectory",
    )  # fmt: skip

    def __init__(self, op: "Op", trajectory: Trajectory | None, binding: Binding, arguments: dict[str, Any]) -> None:
        self.op, self.trajectory, self.binding, self.arguments = op, trajectory, binding, arguments
        self.parent = _call.get()
        self.name, self.span_kind = op.name, SpanKind.INTERNAL
        self.attributes: dict[str, Any] = {}
        self.span: Span = trace.INVALID_SPAN
        self.held, self.silent, self.seconds = False, False, 0.0
        self.ended: int | None = None
        self.notes: Any = None
        self.partial: list[Any] | None = None
        self.last_error: BaseException | None = None
        self._context: otel_context.Context | None = None
        self._tokens: tuple[Any, Any] | None = None

    @property
    def recording(self) -> bool:
        """Whether the span keeps what is written to it."""
        return self.span.is_recording()

    @property
    def context(self) -> otel_context.Context:
        """OpenTelemetry context of the span, for exemplars and children."""
        if self._context is None:
            self._context = trace.set_span_in_context(self.span)
        return self._context

    def start(self) -> None:
        """Start the span as a child of the current one."""
        self.started, self._clock = time.time_ns(), time.perf_counter()
        if self.silent or (self.trajectory is not None and not self.trajectory.recording):
            return
        tracer = self.binding.tracer if self.trajectory is None else self.trajectory.tracer
        if tracer is not None:
            self.attributes[semconv.CODE_FUNCTION_NAME] = self.op.code_name
            start = self.binding.start_span
            if start is not None and self.trajectory is not None:
                self.span = start(self.name, tracer, self.span_kind, self.attributes, self.started)
            else:
                self.span = tracer.start_span(
                    self.name, kind=self.span_kind, attributes=self.attributes, start_time=self.started
                )

    def enter(self) -> None:
        """Make this the current op and its span the current span."""
        span_token = otel_context.attach(self.context) if self.recording else None
        self._tokens = (_call.set(self), span_token)

    def leave(self) -> None:
        """Undo `enter`."""
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            with guard("leave an op"):
                if tokens[1] is not None:
                    otel_context.detach(tokens[1])
                _call.reset(tokens[0])

    def succeed(self, result: Any) -> None:
        """The function returned `result`."""
        self._stop()
        self.last_error = None
        recorder, trajectory = self.op.recorder, self.trajectory
        kept = result
        with guard("keep the result of an op"):
            kept = recorder.keep(self, result)
        taken = False
        with guard("complete an op later"):
            if trajectory is not None and recorder.background and self.in_background:
                taken = trajectory.later(lambda: self._finish(kept))
        if not taken:
            self._finish(kept)

    @property
    def describes(self) -> bool:
        """Whether inputs are worth writing: content is captured and the span, once started, will keep it."""
        return self.binding.settings.content and (self.trajectory is None or self.trajectory.recording)

    @property
    def in_background(self) -> bool:
        """Whether what is slow may be written later, on another thread."""
        return self.binding.start_span is not None

    def _finish(self, kept: Any) -> None:
        with guard("record the result of an op"):
            self.op.recorder.count(self, kept, None)
        if self.recording:
            with guard("describe the result of an op"):
                self.op.recorder.end(self, kept)
            if not self.held:
                self.end_span()

    def fail(self, error: BaseException) -> None:
        """The function raised `error`; a generator that was closed early has not failed."""
        self._stop()
        with guard("record the failure of an op"):
            self.op.recorder.count(self, None, error)
        if self.recording:
            with guard("describe the failure of an op"):
                if not isinstance(error, GeneratorExit):
                    shown = self.binding.settings.content
                    record_error(self.span, error, self.trajectory or self._outermost(), message=shown)
                self.op.recorder.fail(self, error)
            self.end_span()
        self.last_error = None

    def end_span(self) -> None:
        """End the span at the time the function ended, however late this is called."""
        self.held = False
        with guard("end the span of an op"):
            self.span.end(self.ended)
        # A task that was started inside the op keeps this call in its context: not its data, too.
        self.arguments, self.notes, self.partial = {}, None, None

    def _stop(self) -> None:
        self.seconds = time.perf_counter() - self._clock
        self.ended = self.started + int(self.seconds * 1e9)
        self.leave()

    def _outermost(self) -> "Call":
        call = self
        while call.parent is not None:
            call = call.parent
        return call


class Op:
    """A decorated function: its name, how its inputs are bound, and how its calls are recorded.

    Args:
        function: what is decorated.
        recorder: how its calls look as spans.
        name: span name, or the tool's, agent's or reward's name for those kinds; by default from the function.
        off: called instead of `function` where nothing is recorded.
        gate: asked first; False records nothing.
    """

    __slots__ = (
        "_defaults",
        "_names",
        "_skip_first",
        "_varargs",
        "_varkw",
        "code_name",
        "function",
        "gate",
        "name",
        "off",
        "recorder",
        "short_name",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        recorder: "Recorder",
        name: str | None = None,
        off: Callable[..., Any] | None = None,
        gate: Callable[[], bool] | None = None,
    ) -> None:
        self.function, self.recorder, self.off, self.gate = function, recorder, off or function, gate
        qualname = getattr(function, "__qualname__", type(function).__qualname__)
        self.code_name = f"{getattr(function, '__module__', None) or ''}.{qualname}".lstrip(".")
        name = None if name is None else word(name)
        self.name = name or qualname
        self.short_name = str(name or getattr(function, "__name__", qualname))
        self._read_signature(function)

    def __reduce__(self) -> Any:
        return Op, (
            self.function,
            self.recorder,
            self.short_name if self.name == self.short_name else None,
            self.off,
            self.gate,
        )

    def _read_signature(self, function: Callable[..., Any]) -> None:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature
            parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
        by_kind = {kind: [p.name for p in parameters if p.kind is kind] for kind in {p.kind for p in parameters}}
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [p.name for p in parameters if p.kind in positional]
        self._skip_first = bool(self._names) and self._names[0] in ("self", "cls")
        self._defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        self._varargs = next(iter(by_kind.get(inspect.Parameter.VAR_POSITIONAL, ())), None)
        self._varkw = next(iter(by_kind.get(inspect.Parameter.VAR_KEYWORD, ())), None)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Inputs by parameter name, defaults included, without ``self``; ``**kwargs`` stand beside the others."""
        bound = dict(zip(self._names, args, strict=False))
        if self._varargs is not None and len(args) > len(self._names):
            bound[self._varargs] = args[len(self._names) :]
        twice = bound.keys() & kwargs.keys()  # a positional-only input and a keyword of the same name
        bound.update(
            {f"**{name}" if name in twice else name: value for name, value in kwargs.items()} if twice else kwargs
        )
        for name, default in self._defaults.items():
            bound.setdefault(name, default)
        if self._skip_first:
            bound.pop(self._names[0], None)
        return bound

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Start recording a call; ``None`` where nothing is recorded."""
        with guard("start the span of an op"):
            if self.gate is not None and not self.gate():
                return None
            trajectory = current_trajectory()
            binding = current_binding() if trajectory is None else trajectory.binding
            if binding is None:
                return None
            call = Call(self, trajectory, binding, self.bind(args, kwargs))
            if self.recorder.begin(call, args):
                call.start()
                return call
        return None

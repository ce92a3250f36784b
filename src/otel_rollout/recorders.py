"""How each kind of op looks as a span: its name, its attributes, and what it adds to the trajectory's counts."""

from typing import TYPE_CHECKING, Any, Final

from otel_rollout import semconv
from otel_rollout.content import LONG_NUMBERS, to_json
from otel_rollout.failure import error_type
from otel_rollout.metrics import instruments
from otel_rollout.trajectory import describe_reward

if TYPE_CHECKING:
    from otel_rollout.call import Call


class Recorder:
    """Describes the calls of one kind of op. Stateless: one object serves every function of its kind.

    Attributes:
        kind: the value of ``openinference.span.kind``.
        phase: where the op's time counts in ``rollout.time``; ``None`` for "other".
        background: `count` and `end` may run later, on another thread: for results that nobody changes any more.
    """

    kind = semconv.KIND_CHAIN
    phase: str | None = None
    background = False

    def begin(self, call: "Call", args: tuple[Any, ...]) -> bool:  # noqa: ARG002  for subclasses
        """Set name and attributes of the span about to start; False records no span for this call.

        Args:
            call: the call, with its inputs by name.
            args: the positional arguments as they came, ``self`` first for a method.
        """
        call.attributes[semconv.SPAN_KIND] = self.kind
        return True

    def keep(self, call: "Call", result: Any) -> Any:  # noqa: ARG002  for subclasses
        """Read from the result, on the caller's thread, what `count` and `end` are given."""
        return result

    def count(self, call: "Call", result: Any, error: BaseException | None) -> None:  # noqa: ARG002  for subclasses
        """Add the ended call to counts and metrics; also called where the trajectory is sampled out."""
        if self.phase is not None and call.trajectory is not None:
            call.trajectory.tally.spent(self.phase, call.seconds)

    def end(self, call: "Call", result: Any) -> None:
        """Write the result on the span."""

    def fail(self, call: "Call", error: BaseException) -> None:  # noqa: ARG002  for subclasses
        """Write what is known of a failed call; the exception itself is recorded already."""
        if call.partial is not None:
            self.end(call, self.keep(call, call.partial))


class Chain(Recorder):
    """Any step that is neither a generation, a tool call, an agent nor a reward."""

    def begin(self, call: "Call", args: tuple[Any, ...]) -> bool:
        """Record the inputs as JSON."""
        super().begin(call, args)
        if call.describes:
            call.attributes[semconv.INPUT_VALUE] = to_json(
                self.inputs(call), images=call.binding.settings.images, numbers=LONG_NUMBERS
            )
            call.attributes[semconv.INPUT_MIME_TYPE] = semconv.MIME_JSON
        return True

    def inputs(self, call: "Call") -> Any:
        """What is recorded of the inputs."""
        return call.arguments

    def outputs(self, call: "Call", result: Any) -> Any:  # noqa: ARG002  for subclasses
        """What is recorded of the result."""
        return result

    def end(self, call: "Call", result: Any) -> None:
        """Record the result as JSON."""
        if call.binding.settings.content:
            value = to_json(self.outputs(call, result), images=call.binding.settings.images, numbers=LONG_NUMBERS)
            call.span.set_attributes({semconv.OUTPUT_VALUE: value, semconv.OUTPUT_MIME_TYPE: semconv.MIME_JSON})


class Agent(Chain):
    """An agent inside a trajectory: ``invoke_agent {name}``."""

    kind = semconv.KIND_AGENT

    def begin(self, call: "Call", args: tuple[Any, ...]) -> bool:
        """Name the span after the agent."""
        super().begin(call, args)
        name = call.op.short_name
        call.name = f"{semconv.OPERATION_INVOKE_AGENT} {name}"
        call.attributes[semconv.OPERATION_NAME] = semconv.OPERATION_INVOKE_AGENT
        call.attributes[semconv.AGENT_NAME] = name
        return True


class Tool(Recorder):
    """A tool call: ``execute_tool {tool}``."""

    kind = semconv.KIND_TOOL
    phase = "tool"

    def begin(self, call: "Call", args: tuple[Any, ...]) -> bool:
        """Name the span after the tool and record the arguments."""
        super().begin(call, args)
        name = self.tool_name(call)
        call.name = f"{semconv.OPERATION_EXECUTE_TOOL} {name}"
        call.attributes |= {
            semconv.OPERATION_NAME: semconv.OPERATION_EXECUTE_TOOL,
            semconv.TOOL_NAME: name,
            semconv.TOOL_TYPE: "function",
        }
        if call.describes:
            call.attributes[semconv.TOOL_CALL_ARGUMENTS] = self.tool_arguments(call)
        return True

    def tool_name(self, call: "Call") -> str:
        """The tool's name."""
        return call.op.short_name

    def tool_arguments(self, call: "Call") -> str:
        """The arguments as JSON text."""
        return to_json(call.arguments, images=call.binding.settings.images)

    def failure(self, call: "Call", result: Any) -> str | None:  # noqa: ARG002  for subclasses
        """The ``error.type`` of a failure that the framework swallowed; ``None`` if there was none."""
        return None

    def count(self, call: "Call", result: Any, error: BaseException | None) -> None:
        """Count the call, its failure and its duration."""
        super().count(call, result, error)
        failed = self.failure(call, result) if error is None else error_type(error)
        if isinstance(error, GeneratorExit):
            failed = None
        labels = {**_labels(call), semconv.TOOL_NAME: self.tool_label(call)}
        if failed is not None:
            labels[semconv.ERROR_TYPE] = failed
        instruments().record(semconv.METRIC_TOOL_DURATION, call.seconds, labels, call.context)
        if call.trajectory is not None:
            call.trajectory.tally.tool_calls += 1
            call.trajectory.tally.tool_errors += failed is not None

    def tool_label(self, call: "Call") -> str:
        """The tool's name as a metric label: never a name that the model made up."""
        return self.tool_name(call)

    def end(self, call: "Call", result: Any) -> None:
        """Record the result."""
        if call.binding.settings.content:
            call.span.set_attribute(semconv.TOOL_CALL_RESULT, to_json(result, images=call.binding.settings.images))


class Evaluator(Chain):
    """A reward function: ``evaluate {reward name}``. A number that it returns becomes the reward of that name."""

    kind = semconv.KIND_EVALUATOR
    phase = "reward"

    def begin(self, call: "Call", args: tuple[Any, ...]) -> bool:
        """Name the span after the reward."""
        super().begin(call, args)
        call.name = f"{semconv.EVALUATE} {call.op.short_name}"
        return True

    def count(self, call: "Call", result: Any, error: BaseException | None) -> None:
        """Keep the score for the trajectory."""
        super().count(call, result, error)
        if error is None and call.trajectory is not None and is_number(result):
            call.trajectory.note_reward(result, call.op.short_name)

    def end(self, call: "Call", result: Any) -> None:
        """Record the result, and the score where it is a number."""
        super().end(call, result)
        if is_number(result):
            describe_reward(call.span, call.op.short_name, float(result))


_NO_LABELS: Final[dict[str, Any]] = {}


def _labels(call: "Call") -> dict[str, Any]:
    return _NO_LABELS if call.trajectory is None else call.trajectory.labels


def is_number(value: Any) -> bool:
    """Whether a value is one number: Python's, or a scalar of numpy or torch."""
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0)

"""A finished trajectory read back as typed fields: what exporter authors and `otel-rollout show` build on."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_rollout import semconv, tokens
from otel_rollout.otlp_json import decode_attributes, decode_line

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

UNFINISHED: Final = "unfinished"
"""Status of a trajectory whose root span is not there: still running, killed, or its spans were lost."""
UNKNOWN: Final = "unknown"
"""Status of a trajectory whose root span has no ``rollout.status``."""

logger: Final = logging.getLogger("otel_rollout")


class TokenRebuildError(ValueError):
    """The token ids of a turn cannot be rebuilt from the spans that are there."""


class TraceFileError(ValueError):
    """A path that holds no OTLP JSON lines; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """An event of a span; `time_ns` in nanoseconds since the epoch."""

    name: str
    time_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """A link to a span of another trace; ids in hex."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanView:
    """One finished span as plain values, the same whether it comes from the SDK or from a file.

    Attributes:
        trace_id, span_id, parent_id: lower-case hex (32, 16 and 16 digits); parent_id is None for a root.
        kind: ``openinference.span.kind`` (AGENT, LLM, TOOL, EVALUATOR, CHAIN), or None.
        start_ns, end_ns: nanoseconds since the epoch.
        attributes, resource: plain Python values; arrays are lists. Read-only by agreement: spans share their resource.
        status: ``OK``, ``ERROR`` or ``UNSET``.
        scope: name of the instrumentation scope.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    kind: str | None
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[EventView, ...]
    links: tuple[LinkView, ...]
    status: str
    status_message: str
    resource: dict[str, Any]
    scope: str

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def error_type(self) -> str | None:
        """``error.type`` (also of a failure that the framework swallowed), ``error`` for status ERROR, or None."""
        stated = self.attributes.get(semconv.ERROR_TYPE)
        return str(stated) if stated else ("error" if self.status == "ERROR" else None)

    @classmethod
    def from_readable(cls, span: "ReadableSpan") -> "SpanView":
        """View a finished span of the SDK.

        Raises:
            ValueError: the span has no context.
        """
        context = span.get_span_context()
        if context is None:
            raise ValueError(f"span {span.name!r} has no context")
        attributes = _plain_dict(span.attributes or {})
        return cls(
            name=span.name,
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            parent_id=f"{span.parent.span_id:016x}" if span.parent else None,
            kind=_text(attributes.get(semconv.SPAN_KIND)),
            start_ns=span.start_time or 0,
            end_ns=span.end_time or 0,
            attributes=attributes,
            events=tuple(
                EventView(name=event.name, time_ns=event.timestamp, attributes=_plain_dict(event.attributes or {}))
                for event in span.events
            ),
            links=tuple(
                LinkView(
                    trace_id=f"{link.context.trace_id:032x}",
                    span_id=f"{link.context.span_id:016x}",
                    attributes=_plain_dict(link.attributes or {}),
                )
                for link in span.links
            ),
            status=span.status.status_code.name,
            status_message=span.status.description or "",
            resource=_plain_dict(span.resource.attributes),
            scope=span.instrumentation_scope.name if span.instrumentation_scope else "",
        )

    @classmethod
    def from_otlp(cls, resource: dict[str, Any], scope: str, span: Mapping[str, Any]) -> "SpanView":
        """View an OTLP/JSON span object.

        Args:
            resource: the attributes of its resource, decoded (`otel_rollout.otlp_json.decode_line` yields all three).
            scope: name of its instrumentation scope.
            span: the OTLP/JSON ``Span`` object; unknown fields are ignored.

        Raises:
            ValueError, TypeError: a field has a value that OTLP does not allow.
        """
        attributes = decode_attributes(span.get("attributes"))
        status = span.get("status") or {}
        return cls(
            name=str(span.get("name") or ""),
            trace_id=str(span.get("traceId") or "").lower(),
            span_id=str(span.get("spanId") or "").lower(),
            parent_id=str(span.get("parentSpanId") or "").lower() or None,
            kind=_text(attributes.get(semconv.SPAN_KIND)),
            start_ns=int(span.get("startTimeUnixNano") or 0),
            end_ns=int(span.get("endTimeUnixNano") or 0),
            attributes=attributes,
            events=tuple(
                EventView(
                    name=str(event.get("name") or ""),
                    time_ns=int(event.get("timeUnixNano") or 0),
                    attributes=decode_attributes(event.get("attributes")),
                )
                for event in span.get("events") or ()
            ),
            links=tuple(
                LinkView(
                    trace_id=str(link.get("traceId") or "").lower(),
                    span_id=str(link.get("spanId") or "").lower(),
                    attributes=decode_attributes(link.get("attributes")),
                )
                for link in span.get("links") or ()
            ),
            status=_STATUS_CODES.get(status.get("code"), "UNSET"),
            status_message=str(status.get("message") or ""),
            resource=resource,
            scope=scope,
        )


_STATUS_CODES: Final[dict[Any, str]] = {1: "OK", 2: "ERROR", "STATUS_CODE_OK": "OK", "STATUS_CODE_ERROR": "ERROR"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One generation of a trajectory and what was said in it.

    Attributes:
        number: ``rollout.turn``, or the position among the turns where the span has none.
        span: the generation span.
        prompt_ids: ids of the whole prompt, shape (prompt_length,); None where not recorded or not rebuildable.
        completion_ids: generated ids, shape (completion_length,); None likewise.
        prompt_delta_length: how many ids at the end of the prompt are new since the last turn (all if `rebased`).
        mask: 1 for tokens that are trained on, shape (prompt_delta_length + completion_length,); empty without ids.
        logprobs: of the completion, shape (completion_length,), or None where they were not recorded.
        rebased: the prompt does not extend what was seen; the root then has a ``rollout.token_mismatch`` event.
        token_error: why the ids cannot be rebuilt, or None. Ids are never guessed: with an error they are None.
        input_messages, output_messages: what is new in this turn, in the GenAI schema (``[{"role", "parts"}]``).
        finish_reason, policy_version: as the server said, or None.
        segments: the parts of a partial rollout, each with its own policy version; empty for a turn generated at once.
    """

    number: int
    span: SpanView
    prompt_ids: list[int] | None
    completion_ids: list[int] | None
    prompt_delta_length: int
    mask: list[int]
    logprobs: list[float] | None
    rebased: bool
    token_error: TokenRebuildError | None
    input_messages: list[dict[str, Any]]
    output_messages: list[dict[str, Any]]
    finish_reason: str | None
    policy_version: int | None
    segments: list[SpanView]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One line about a trajectory; what `TrajectoryView` says under the same names, without its spans."""

    trace_id: str
    trajectory_id: str | None
    group_id: str | None
    project_name: str | None
    experiment_name: str | None
    step: int | None
    sample_index: int | str | None
    rollout_n: int | None
    validate: bool
    status: str
    reward: float | None
    turns: int
    tool_calls: int
    tool_errors: int
    response_tokens: int | None
    duration_s: float
    start_ns: int


@dataclass(frozen=True, kw_only=True)
class TrajectoryView:
    """All spans of one trajectory that are there.

    Attributes:
        trace_id: 32 hex digits.
        root: the span without a parent; None while the trajectory is unfinished or if it was lost.
        spans: all spans, the root too, by start time.
    """

    trace_id: str
    root: SpanView | None
    spans: list[SpanView]

    @cached_property
    def resource(self) -> dict[str, Any]:
        """Resource of the trajectory: its root's, else that of the first span that names a trajectory."""
        if self.root is not None:
            return self.root.resource
        return next(
            (span.resource for span in self.spans if semconv.TRAJECTORY_ID in span.resource), self.spans[0].resource
        )

    @property
    def step(self) -> int | None:
        """Global step that asked for the rollout."""
        return _integer(self.resource.get(semconv.STEP))

    @property
    def sample_index(self) -> int | str | None:
        """The sample's id in the dataset."""
        value = self.resource.get(semconv.SAMPLE_INDEX)
        return value if isinstance(value, int) else _text(value)

    @property
    def rollout_n(self) -> int | None:
        """Serial number among the trajectories of its sample."""
        return _integer(self.resource.get(semconv.ROLLOUT_N))

    @property
    def validate(self) -> bool:
        """Whether the sample is of the test set."""
        return self.resource.get(semconv.VALIDATE) is True

    @property
    def group_id(self) -> str | None:
        """The GRPO group: what the n trajectories of a sample at a step have in common."""
        return _text(self.resource.get(semconv.GROUP_ID))

    @property
    def trajectory_id(self) -> str | None:
        """Unique id of the trajectory."""
        return _text(self.resource.get(semconv.TRAJECTORY_ID))

    @property
    def project_name(self) -> str | None:
        """Name of the project."""
        return _text(self.resource.get(semconv.PROJECT_NAME))

    @property
    def experiment_name(self) -> str | None:
        """Name of the training run."""
        return _text(self.resource.get(semconv.EXPERIMENT_NAME))

    @property
    def framework(self) -> str | None:
        """What ran the rollout, for example ``verl``."""
        return _text(self.resource.get(semconv.FRAMEWORK))

    @property
    def status(self) -> str:
        """``rollout.status``; `UNFINISHED` without a root, ``error`` or `UNKNOWN` where a root does not say."""
        if self.root is None:
            return UNFINISHED
        stated = _text(self.root.attributes.get(semconv.STATUS))
        return stated or (semconv.STATUS_ERROR if self.root.status == "ERROR" else UNKNOWN)

    @property
    def reward(self) -> float | None:
        """The trajectory's reward; None if none was given."""
        stated = _number(self._root_attributes.get(semconv.REWARD))
        return stated if stated is not None else self._evaluations.get("reward")

    @cached_property
    def rewards(self) -> dict[str, float]:
        """Rewards by name: the root's ``rollout.rewards.<name>``, and those that came later in spans of their own."""
        named = {
            key.removeprefix(semconv.REWARDS_PREFIX): number
            for key, value in self._root_attributes.items()
            if key.startswith(semconv.REWARDS_PREFIX) and (number := _number(value)) is not None
        }
        return {**self._evaluations, **named}

    @property
    def duration_s(self) -> float:
        """Seconds of the root span; without one, from the first start to the last end."""
        if self.root is not None:
            return self.root.duration_s
        return (max(span.end_ns for span in self.spans) - self.spans[0].start_ns) / 1e9

    @property
    def tools(self) -> list[SpanView]:
        """Tool calls by start time."""
        return [span for span in self.spans if span.kind == semconv.KIND_TOOL]

    @property
    def generations(self) -> list[SpanView]:
        """Generation spans, one a turn, in order; the segments of a partial rollout are not among them."""
        found = [
            span for span in self.spans if span.kind == semconv.KIND_LLM and semconv.SEGMENT not in span.attributes
        ]
        return sorted(found, key=lambda span: (_integer(span.attributes.get(semconv.TURN)) or 0, span.start_ns))

    @cached_property
    def turns(self) -> list[TurnView]:
        """The turns with their exact token ids, rebuilt on first use."""
        ledger = _Rebuild()
        return [
            _turn(position, span, self.children(span.span_id), ledger)
            for position, span in enumerate(self.generations, 1)
        ]

    @property
    def response_tokens(self) -> int | None:
        """Tokens that the policy generated."""
        stated = _integer(self._root_attributes.get(semconv.RESPONSE_TOKENS))
        if stated is not None:
            return stated
        counts = [_integer(span.attributes.get(semconv.OUTPUT_TOKENS)) for span in self.generations]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The final conversation in the GenAI schema; without a root what the turns that are there said."""
        whole = [
            *_messages(self._root_attributes.get(semconv.INPUT_MESSAGES)),
            *_messages(self._root_attributes.get(semconv.OUTPUT_MESSAGES)),
        ]
        if whole:
            return whole
        keys = (semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES)
        return [message for span in self.generations for key in keys for message in _messages(span.attributes.get(key))]

    def children(self, span_id: str) -> list[SpanView]:
        """Spans whose parent is `span_id` (16 hex digits), by start time."""
        return self._children.get(span_id, [])

    @property
    def summary(self) -> Summary:
        """What a table needs, without the spans."""
        attributes = self._root_attributes
        turns, calls, errors = (
            _integer(attributes.get(key)) for key in (semconv.TURNS, semconv.TOOL_CALLS, semconv.TOOL_ERRORS)
        )
        tools = self.tools
        return Summary(
            trace_id=self.trace_id,
            trajectory_id=self.trajectory_id,
            group_id=self.group_id,
            project_name=self.project_name,
            experiment_name=self.experiment_name,
            step=self.step,
            sample_index=self.sample_index,
            rollout_n=self.rollout_n,
            validate=self.validate,
            status=self.status,
            reward=self.reward,
            turns=len(self.generations) if turns is None else turns,
            tool_calls=len(tools) if calls is None else calls,
            tool_errors=sum(tool.error_type is not None for tool in tools) if errors is None else errors,
            response_tokens=self.response_tokens,
            duration_s=self.duration_s,
            start_ns=self.spans[0].start_ns,
        )

    @property
    def _root_attributes(self) -> dict[str, Any]:
        return self.root.attributes if self.root is not None else {}

    @cached_property
    def _evaluations(self) -> dict[str, float]:
        return {
            name: score
            for span in self.spans
            if (name := _text(span.attributes.get(semconv.EVALUATION_NAME))) is not None
            and (score := _number(span.attributes.get(semconv.EVALUATION_SCORE))) is not None
        }

    @cached_property
    def _children(self) -> dict[str, list[SpanView]]:
        children: dict[str, list[SpanView]] = {}
        for span in self.spans:
            if span.parent_id is not None:
                children.setdefault(span.parent_id, []).append(span)
        return children


def from_spans(spans: Iterable[SpanView]) -> list[TrajectoryView]:
    """Sort spans, in any order and of any number of trajectories, into trajectories.

    A span that is there twice (sent again after a time-out) counts once. Traces that are no trajectory, such as the
    trainer's step or an op outside any trajectory, are left out.
    """
    traces: dict[str, dict[str, SpanView]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, {})[span.span_id] = span
    views = (_trajectory(trace_id, list(members.values())) for trace_id, members in traces.items())
    return [view for view in views if view is not None]


def _trajectory(trace_id: str, spans: list[SpanView]) -> TrajectoryView | None:
    spans.sort(key=lambda span: (span.start_ns, span.parent_id is not None))
    roots = [span for span in spans if span.parent_id is None]
    root = next((span for span in roots if span.kind == semconv.KIND_AGENT), None)
    if root is None and not any(semconv.TRAJECTORY_ID in span.resource for span in spans):
        return None
    return TrajectoryView(trace_id=trace_id, root=root, spans=spans)


class _Rebuild:
    """The ids that a trajectory had seen after each turn, to which the next turn's delta is added."""

    def __init__(self) -> None:
        self._states: list[list[int]] = [[]]
        self._broken = False

    def prompt(self, span: SpanView) -> tuple[list[int], int]:
        """The prompt's ids and how many of them are new; raises `TokenRebuildError` rather than give wrong ones."""
        delta = _ids(span, semconv.DELTA_PROMPT)
        length = _integer(span.attributes.get(semconv.DELTA_PREFIX_LENGTH)) or 0
        if length == 0:
            return delta, len(delta)
        expected = span.attributes.get(semconv.DELTA_PREFIX_HASH)
        # Not always the latest: turns that ran side by side extend the same prefix.
        for state in reversed(self._states):
            if len(state) >= length and (expected is None or tokens.prefix_hash(state[:length]) == expected):
                return [*state[:length], *delta], len(delta)
        cause = (
            "an earlier turn could not be rebuilt"
            if self._broken
            else f"what the earlier turns left ({len(self._states[-1])} ids) does not fit; is a turn's span missing?"
        )
        raise TokenRebuildError(f"the prompt goes on from {length} ids with hash {expected}, but {cause}")

    def saw(self, ids: list[int]) -> None:
        """Remember the prompt and completion of a turn."""
        self._states.append(ids)

    def lost(self) -> None:
        """Remember that a turn is not known."""
        self._broken = True


def _ids(span: SpanView, key: str) -> list[int]:
    value = span.attributes.get(key)
    try:
        return tokens.decode(value) if isinstance(value, str) else []
    except ValueError as error:
        raise TokenRebuildError(f"{key}: {error}") from error


def _turn(position: int, span: SpanView, children: Sequence[SpanView], ledger: _Rebuild) -> TurnView:
    attributes = span.attributes
    prompt: list[int] | None = None
    completion: list[int] | None = None
    error: TokenRebuildError | None = None
    delta_length = 0
    mask: list[int] = []
    logprobs: list[float] | None = None
    if semconv.DELTA_PROMPT in attributes or semconv.DELTA_COMPLETION in attributes:
        try:
            completion = _ids(span, semconv.DELTA_COMPLETION)
            prompt, delta_length = ledger.prompt(span)
            mask = _mask(attributes.get(semconv.DELTA_MASK), delta_length, len(completion))
            logprobs = [float(value) for value in _ids(span, semconv.DELTA_LOGPROBS)] or None
            ledger.saw([*prompt, *completion])
        except TokenRebuildError as found:
            prompt, completion, delta_length, mask, logprobs, error = None, None, 0, [], None, found
            ledger.lost()
    number = _integer(attributes.get(semconv.TURN))
    reasons = attributes.get(semconv.FINISH_REASONS)
    return TurnView(
        number=position if number is None else number,
        span=span,
        prompt_ids=prompt,
        completion_ids=completion,
        prompt_delta_length=delta_length,
        mask=mask,
        logprobs=logprobs,
        rebased=attributes.get(semconv.DELTA_REBASED) is True,
        token_error=error,
        input_messages=_messages(attributes.get(semconv.INPUT_MESSAGES)),
        output_messages=_messages(attributes.get(semconv.OUTPUT_MESSAGES)),
        finish_reason=_text(reasons[0]) if isinstance(reasons, list) and reasons else _text(reasons or None),
        policy_version=_integer(attributes.get(semconv.POLICY_VERSION)),
        segments=[child for child in children if semconv.SEGMENT in child.attributes],
    )


def _mask(runs: Any, delta_length: int, completion_length: int) -> list[int]:
    if runs is None:
        return [0] * delta_length + [1] * completion_length
    try:
        mask = tokens.from_run_lengths([int(run) for run in json.loads(runs)])
    except (ValueError, TypeError) as error:
        raise TokenRebuildError(f"{semconv.DELTA_MASK} is no list of run lengths: {str(runs)[:40]!r}") from error
    if len(mask) != delta_length + completion_length:
        raise TokenRebuildError(f"{semconv.DELTA_MASK} covers {len(mask)} ids of {delta_length + completion_length}")
    return mask


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            # Cut by a length limit of the SDK or a backend: what is left is still worth reading.
            return [{"role": "unknown", "parts": [{"type": "text", "content": value}]}]
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []


def _plain_dict(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _plain(value) for key, value in attributes.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, Mapping):
        return _plain_dict(value)
    return [_plain(item) for item in value] if isinstance(value, Sequence) else value


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def read_trajectories(
    path: str | Path, *, on_problem: Callable[[str], None] = logger.warning
) -> Iterator[TrajectoryView]:
    """Read the trajectories of a file of OTLP JSON lines, or of all ``*.jsonl`` and ``*.json`` files of a directory.

    The files are read twice: first to learn where each trace ends, then trace by trace, so memory holds the
    trajectories under way, not the file. The spans of a trace may be spread over lines and files in any order.

    Args:
        path: the file or directory.
        on_problem: told in a sentence of lines that cannot be read (a torn last line, another format) and are left out.

    Raises:
        TraceFileError: on the first use, if there is no such path or nothing in it is OTLP JSON.
    """
    files = _files(Path(path))
    last_line = _last_lines(files)
    open_traces: dict[str, list[SpanView]] = {}
    ready: dict[int, list[str]] = {}
    for trace_id, line_number in last_line.items():
        ready.setdefault(line_number, []).append(trace_id)
    good = 0
    problems: list[str] = []
    for ordinal, place, line in _lines(files):
        try:
            for resource, scope, span in decode_line(line):
                view = SpanView.from_otlp(resource, scope, span)
                open_traces.setdefault(view.trace_id, []).append(view)
            good += 1
        except (ValueError, TypeError, AttributeError) as error:
            problems.append(f"{place} is not an OTLP JSON line and is left out ({_reason(line, error)})")
            if len(problems) <= _PROBLEMS_TOLD and good:
                on_problem(problems[-1])
        for trace_id in ready.pop(ordinal, ()):
            yield from from_spans(open_traces.pop(trace_id, ()))
    # Lines that were appended while we read.
    for spans in open_traces.values():
        yield from from_spans(spans)
    _tell(files, good, problems, on_problem)


_PROBLEMS_TOLD: Final = 3
_TRACE_ID: Final = re.compile(rb'"traceId"\s*:\s*"([0-9a-fA-F]{32})"')


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for pattern in ("*.jsonl", "*.json") for file in path.glob(pattern) if file.is_file())
        if not files:
            raise TraceFileError(
                f"{path} has no .jsonl file in it. Is this the directory that OTEL_ROLLOUT_FILE names?"
            )
        return files
    if not path.exists():
        raise TraceFileError(
            f"{path} does not exist. Without OTEL_ROLLOUT_FILE, traces go to otel-rollout/ in the working directory."
        )
    return [path]


def _lines(files: Sequence[Path]) -> Iterator[tuple[int, str, bytes]]:
    ordinal = 0
    for file in files:
        for number, line in enumerate(_open(file), 1):
            if line.strip():
                yield ordinal, f"{file}:{number}", line
                ordinal += 1


def _open(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            yield from stream
    except OSError as error:
        raise TraceFileError(f"{file} cannot be read: {error.strerror or error}") from error


def _last_lines(files: Sequence[Path]) -> dict[str, int]:
    found: dict[str, int] = {}
    for ordinal, _, line in _lines(files):
        for match in set(_TRACE_ID.findall(line)):
            found[match.decode().lower()] = ordinal
    return found


def _reason(line: bytes, error: Exception) -> str:
    if not line.endswith(b"\n"):
        return "the line is not complete: its writer is still at work or was killed"
    if line.lstrip()[:1] != b"{":
        return "it does not start with {"
    return str(error)[:120]


def _tell(files: Sequence[Path], good: int, problems: Sequence[str], on_problem: Callable[[str], None]) -> None:
    where = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    if not good and not problems:
        raise TraceFileError(
            f"{where} is empty: no span has been written yet. A rollout's spans arrive when its ops end."
        )
    if not good:
        raise TraceFileError(
            f"{where} has no OTLP JSON lines: {problems[0]}. "
            "Expected is what the exporter otlp_file or the Collector's file exporter (format: json) writes."
        )
    if len(problems) > _PROBLEMS_TOLD:
        on_problem(f"{len(problems) - _PROBLEMS_TOLD} more lines of {where} are left out")

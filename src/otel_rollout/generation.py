"""One turn of a trajectory: a generation, its sampling parameters, messages, tokens and policy version."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from otel_rollout import content, messages, semconv, tokens
from otel_rollout.failure import error_type
from otel_rollout.guard import warn_once
from otel_rollout.identity import scalar, word
from otel_rollout.metrics import instruments
from otel_rollout.recorders import Recorder

if TYPE_CHECKING:
    from array import array

    from otel_rollout.call import Call

_STANDARD: Final = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "max_tokens": ("max_tokens", int),
    "max_new_tokens": ("max_tokens", int),
    "max_completion_tokens": ("max_tokens", int),
    "seed": ("seed", int),
    "frequency_penalty": ("frequency_penalty", float),
    "presence_penalty": ("presence_penalty", float),
}


@dataclass(slots=True, kw_only=True)
class Request:
    """What is asked of the model.

    Attributes:
        prompt_ids: the whole prompt, shape (prompt_length,); ``None`` where tokens are not known.
        messages: messages that this turn adds; ``None`` where they are not known.
        message_prefix_count: messages of the turns before.
        sampling_params: as the engine takes them.
        model, provider: e.g. ``Qwen2.5-3B``, ``vllm``.
    """

    prompt_ids: Any = None
    messages: Any = None
    message_prefix_count: int = 0
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    provider: str | None = None


@dataclass(slots=True, kw_only=True)
class Response:
    """What the model gave back. Lengths and counts in tokens; ``None`` where not known.

    Attributes:
        token_ids: the completion, shape (completion_length,).
        logprobs: of the completion's tokens, shape (completion_length,).
        mask: loss mask over the prompt delta and the completion, where it is not 0 for the first and 1 for the second.
        messages: the assistant's message(s).
        finish_reason: ``stop``, ``length``, ``abort``, ...
        policy_version: the weights (a global step) that generated the last token.
    """

    token_ids: Any = None
    logprobs: Any = None
    mask: Any = None
    messages: Any = None
    finish_reason: str | None = None
    response_id: str | None = None
    server_address: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    preemptions: int | None = None
    policy_version: int | None = None


@dataclass(slots=True)
class Segment:
    """One part of a generation that a weight update cut and that was resumed. Times in epoch nanoseconds."""

    started: int
    ended: int
    response: Response


@dataclass(slots=True)
class Turn:
    """What a generation keeps from its start to its end."""

    number: int
    request: Request
    opened: tokens.OpenTurn | None
    response: Response | None = None
    completion: "array[Any] | None" = None
    segments: list[Segment] = field(default_factory=list)


class Generation(Recorder):
    """A generation: ``chat {model}`` where its messages are known, else ``text_completion {model}``.

    Reads the arguments ``messages``, ``prompt_ids``, ``model``, ``sampling_params`` (or the single parameters) and
    results that are a string, have ``token_ids``, or look like an OpenAI chat completion. Adapters override `request`
    and `keep`.
    """

    kind = semconv.KIND_LLM
    phase = "generate"
    turn = Turn

    def begin(self, call: "Call", args: tuple[Any, ...]) -> bool:
        """Open a turn: number it, compare its prompt with the ledger, record what is asked."""
        super().begin(call, args)
        request, trajectory, settings = self.request(call, args), call.trajectory, call.binding.settings
        turn = call.notes = self.turn(1 if trajectory is None else trajectory.tally.turns + 1, request, None)
        if trajectory is not None:
            trajectory.tally.turns += 1
            if request.prompt_ids is not None and settings.tokens != "none":
                turn.opened = _open_turn(trajectory.ledger, request)
        operation = semconv.OPERATION_TEXT_COMPLETION if request.messages is None else semconv.OPERATION_CHAT
        model = request.model or "unknown"
        call.name, call.span_kind = f"{operation} {model}", SpanKind.CLIENT
        call.attributes |= {semconv.OPERATION_NAME: operation, semconv.REQUEST_MODEL: model, semconv.TURN: turn.number}
        if request.provider:
            call.attributes[semconv.PROVIDER_NAME] = request.provider
        if not (self.background and call.in_background) and (trajectory is None or trajectory.recording):
            call.attributes |= self.asked(call)
        return True

    def asked(self, call: "Call") -> dict[str, Any]:
        """Sampling parameters and messages of the request: written at the start, or at the end in the background."""
        request, settings = call.notes.request, call.binding.settings
        found = sampling_attributes(request.sampling_params)
        if request.messages is not None and settings.content:
            found[semconv.INPUT_MESSAGES] = messages.messages_json(request.messages, images=settings.images)
            found[semconv.MESSAGE_PREFIX_COUNT] = request.message_prefix_count
        return found

    def request(self, call: "Call", args: tuple[Any, ...]) -> Request:  # noqa: ARG002  for subclasses
        """Read what is asked from the arguments."""
        given = call.arguments
        params = given.get("sampling_params")
        params = dict(params) if isinstance(params, Mapping) else {}
        params |= {key: given[key] for key in (*_STANDARD, "stop") if given.get(key) is not None}
        model = given.get("model")
        return Request(
            prompt_ids=given.get("prompt_ids"),
            messages=given.get("messages", given.get("prompt") if isinstance(given.get("prompt"), str) else None),
            sampling_params=params,
            model=model if isinstance(model, str) else None,
        )

    def keep(self, call: "Call", result: Any) -> Response:
        """Read what came back from the result."""
        return close_turn(call, read_response(result))

    def count(self, call: "Call", result: Any, error: BaseException | None) -> None:
        """Close the turn: tokens into the ledger, counts and metrics."""
        super().count(call, result, error)
        labels = {} if call.trajectory is None else call.trajectory.labels
        turn: Turn = call.notes
        labels = {**labels, semconv.REQUEST_MODEL: turn.request.model or "unknown"}
        record, add, here = instruments().record, instruments().add, call.context
        if error is not None:
            failed = labels if isinstance(error, GeneratorExit) else {**labels, semconv.ERROR_TYPE: error_type(error)}
            record(semconv.METRIC_INFERENCE_DURATION, call.seconds, failed, here)
            return
        response = turn.response = result
        if response.input_tokens is None and turn.request.prompt_ids is not None:
            response.input_tokens = len(turn.request.prompt_ids)
        if response.output_tokens is None and response.token_ids is not None:
            response.output_tokens = len(response.token_ids)
        record(semconv.METRIC_INFERENCE_DURATION, call.seconds, labels, here)
        if response.input_tokens:
            add(semconv.METRIC_INPUT_TOKENS, response.input_tokens, labels)
        if response.output_tokens:
            add(semconv.METRIC_OUTPUT_TOKENS, response.output_tokens, labels)
        if response.preemptions:
            add(semconv.METRIC_PREEMPTIONS, response.preemptions, labels)
        if turn.opened is not None and turn.opened.mismatch is not None:
            add(semconv.METRIC_TOKEN_MISMATCHES, 1, labels)
        if call.trajectory is not None:
            _tally(call, turn, response)

    def end(self, call: "Call", result: Any) -> None:  # noqa: ARG002  read in `count`
        """Write tokens, usage, finish reason, policy version and messages."""
        turn: Turn = call.notes
        response = turn.response
        if response is None:
            return
        found = response_attributes(response)
        if self.background and call.in_background:
            found |= self.asked(call)
        if response.messages is not None and call.binding.settings.content:
            found[semconv.OUTPUT_MESSAGES] = messages.messages_json(
                response.messages, images=call.binding.settings.images
            )
        if turn.opened is not None:
            found |= delta_attributes(turn, turn.opened, response, call.binding.settings.tokens)
        call.span.set_attributes(found)
        self._segments(call, turn)

    def fail(self, call: "Call", error: BaseException) -> None:
        """Write what was asked of a generation that failed."""
        if self.background and call.in_background:
            call.span.set_attributes(self.asked(call))
        super().fail(call, error)

    def _segments(self, call: "Call", turn: Turn) -> None:
        if len(turn.segments) < 2 or call.trajectory is None or call.trajectory.tracer is None:  # noqa: PLR2004
            return
        parent = trace.set_span_in_context(call.span)
        for number, segment in enumerate(turn.segments, 1):
            attributes = {
                semconv.SPAN_KIND: self.kind,
                semconv.OPERATION_NAME: call.attributes[semconv.OPERATION_NAME],
                semconv.REQUEST_MODEL: call.attributes[semconv.REQUEST_MODEL],
                semconv.CODE_FUNCTION_NAME: call.op.code_name,
                semconv.SEGMENT: number,
                **response_attributes(segment.response),
            }
            span = call.trajectory.tracer.start_span(
                call.name, context=parent, kind=SpanKind.CLIENT, attributes=attributes, start_time=segment.started
            )
            span.end(segment.ended)


def _open_turn(ledger: tokens.TokenLedger, request: Request) -> tokens.OpenTurn | None:
    try:
        return ledger.begin(request.prompt_ids)
    except (TypeError, ValueError, OverflowError) as error:
        kind = type(request.prompt_ids).__name__
        warn_once("prompt_ids", "prompt_ids are no token ids but a %s (%s); tokens are not recorded", kind, error)
        request.prompt_ids = None
        return None


def close_turn(call: "Call", response: Response) -> Response:
    """Add the completion to the ledger: at once, because the next prompt is compared with it."""
    turn: Turn = call.notes
    if turn.opened is not None and call.trajectory is not None:
        ids = response.token_ids if response.token_ids is not None else ()
        turn.completion = call.trajectory.ledger.finish(turn.opened, ids)
    return response


def _tally(call: "Call", turn: Turn, response: Response) -> None:
    trajectory = call.trajectory
    if trajectory is None:
        return
    tally = trajectory.tally
    tally.input_tokens += response.input_tokens or 0
    tally.output_tokens += response.output_tokens or 0
    if response.cache_read_tokens is not None:
        tally.cache_read_tokens = (tally.cache_read_tokens or 0) + response.cache_read_tokens
    if turn.number > 1:
        tally.observation_tokens += max(0, (response.input_tokens or 0) - tally.last_length)
    tally.last_length = (response.input_tokens or 0) + (response.output_tokens or 0)
    for part in [segment.response for segment in turn.segments] or [response]:
        if part.policy_version is not None and part.output_tokens != 0:
            tally.saw_policy(part.policy_version)
    if turn.opened is None:
        return
    mismatch = turn.opened.mismatch
    if mismatch is not None:
        trajectory.event(
            semconv.MISMATCH_EVENT,
            {
                semconv.TURN: turn.number,
                semconv.MISMATCH_POSITION: mismatch.position,
                semconv.MISMATCH_EXPECTED_HASH: mismatch.expected_hash,
                semconv.MISMATCH_ACTUAL_HASH: mismatch.actual_hash,
            },
        )


def sampling_attributes(params: Mapping[str, Any]) -> dict[str, Any]:
    """``gen_ai.request.*`` where a parameter has a standard name, the rest as JSON in ``rollout.sampling_params``."""
    found: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in params.items():
        if value is None:
            continue
        if key in ("stop", "stop_sequences"):
            stops = value if isinstance(value, list | tuple | set) else [value]
            found[semconv.REQUEST_PREFIX + "stop_sequences"] = [word(stop) for stop in stops]
        elif key in _STANDARD:
            name, convert = _STANDARD[key]
            try:
                found[semconv.REQUEST_PREFIX + name] = convert(value)
            except (TypeError, ValueError, OverflowError):
                rest[key] = value
        else:
            rest[key] = value
    if rest:
        found[semconv.SAMPLING_PARAMS] = content.to_json(rest, limit=4096)
    return found


def response_attributes(response: Response) -> dict[str, Any]:
    """Usage, finish reason, ids and policy version of a generation or of one segment of it."""
    found: dict[str, Any] = {
        semconv.INPUT_TOKENS: response.input_tokens,
        semconv.OUTPUT_TOKENS: response.output_tokens,
        semconv.CACHE_READ_TOKENS: response.cache_read_tokens,
        semconv.FINISH_REASONS: None if response.finish_reason is None else [response.finish_reason],
        semconv.RESPONSE_ID: response.response_id,
        semconv.SERVER_ADDRESS: response.server_address,
        semconv.PREEMPTIONS: response.preemptions,
        semconv.POLICY_VERSION: response.policy_version,
    }
    return {key: value for key, value in found.items() if value is not None}


def delta_attributes(turn: Turn, opened: tokens.OpenTurn, response: Response, mode: str) -> dict[str, Any]:
    """``rollout.token_delta.*``: the tokens that this turn adds, as far as `mode` (``OTEL_ROLLOUT_TOKENS``) goes."""
    found: dict[str, Any] = {
        semconv.DELTA_PREFIX_LENGTH: opened.prefix_length,
        semconv.DELTA_PREFIX_HASH: opened.prefix_hash,
    }
    if opened.rebased:
        found[semconv.DELTA_REBASED] = True
    if mode not in ("ids", "full"):
        return found
    found[semconv.DELTA_PROMPT] = tokens.encode_ids(opened.delta)
    if response.token_ids is not None:
        found[semconv.DELTA_COMPLETION] = tokens.encode_ids(turn.completion or response.token_ids)
    if response.mask is not None:
        usual = [0] * len(opened.delta) + [1] * len(response.token_ids or ())
        given = [1 if value else 0 for value in response.mask]
        if given != usual:
            found[semconv.DELTA_MASK] = json.dumps(tokens.run_lengths(given), separators=(",", ":"))
    if mode == "full" and response.logprobs is not None:
        found[semconv.DELTA_LOGPROBS] = tokens.encode(list(response.logprobs), "f32")
    return found


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def read_response(result: Any) -> Response:
    """Read a result of any of the shapes that `Generation` knows."""
    if isinstance(result, str):
        return Response(messages=[{"role": "assistant", "content": result}])
    if isinstance(result, Sequence) and result and all(isinstance(part, str) for part in result):
        return Response(messages=[{"role": "assistant", "content": "".join(result)}])
    choices = _field(result, "choices")
    if isinstance(choices, Sequence) and choices:
        return _read_chat_completion(result, choices)
    response = Response(
        token_ids=_field(result, "token_ids"),
        logprobs=_field(result, "log_probs"),
        mask=_field(result, "mask"),
        finish_reason=_text(_field(result, "finish_reason") or _field(result, "stop_reason")),
    )
    text = _field(result, "text")
    if isinstance(text, str):
        response.messages = [{"role": "assistant", "content": text}]
    elif _field(result, "role") is not None:
        response.messages = [result]
    return response


def _read_chat_completion(result: Any, choices: Sequence[Any]) -> Response:
    usage = _field(result, "usage")
    cached = _field(_field(usage, "prompt_tokens_details"), "cached_tokens")
    return Response(
        messages=[_field(choice, "message") for choice in choices if _field(choice, "message") is not None] or None,
        finish_reason=_text(_field(choices[0], "finish_reason")),
        response_id=_text(_field(result, "id")),
        input_tokens=_count(_field(usage, "prompt_tokens")),
        output_tokens=_count(_field(usage, "completion_tokens")),
        cache_read_tokens=_count(cached),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(scalar(value))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None

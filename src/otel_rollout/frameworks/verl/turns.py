"""verl's generations as turns: parameters, tokens, finish reason, resumed segments and messages."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from otel_rollout import messages, semconv
from otel_rollout.call import Call
from otel_rollout.content import to_json
from otel_rollout.frameworks.verl.run import AgentRun, Piece, current_run, model_name
from otel_rollout.frameworks.verl.switch import switch
from otel_rollout.generation import Generation, Request, Response, Segment, Turn, close_turn
from otel_rollout.guard import guard
from otel_rollout.trajectory import current_trajectory

TEXT_LIMIT: Final = 1 << 20
ABORTED: Final = ("aborted", "abort")


@dataclass(slots=True)
class LoopTurn:
    """One pass of ToolAgentLoop through its generating state.

    Attributes:
        new: messages that the model has not seen yet.
        before: messages that it has.
        calls: its generations, held open until the message is known; more than one where a client tries again.
    """

    new: list[Any]
    before: int
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class VerlTurn(Turn):
    """A turn of an agent loop that a worker runs: what `Turn` keeps, and where its messages are."""

    run: AgentRun | None = None
    in_loop: bool = False
    token_limit: int | None = None


_turn: ContextVar[LoopTurn | None] = ContextVar("otel_rollout_verl_turn", default=None)


class VerlGeneration(Generation):
    """``LLMServerClient.generate``; in ``FullyAsyncLLMServerClient`` one turn, what it resumes are its segments."""

    background = True
    turn = VerlTurn

    def begin(self, call: Call, args: tuple[Any, ...]) -> bool:
        """Open a turn, or measure one segment of the turn that is being resumed."""
        parent = call.parent
        if parent is not None and parent.op.recorder is self:
            call.silent, call.notes = True, parent
            return True
        super().begin(call, args)
        turn, run = call.notes, current_run()
        turn.run, turn.in_loop = run, _turn.get() is not None
        if run is not None and turn.request.prompt_ids is not None:
            turn.token_limit = run.token_limit(len(turn.request.prompt_ids), turn.request.sampling_params)
        return True

    def keep(self, call: Call, result: Any) -> Response:
        """Read the result, and leave the span open where its messages come later."""
        response = self.response(call, result)
        if call.silent:
            response.input_tokens = len(call.arguments["prompt_ids"])
            return response
        close_turn(call, response)
        turn: VerlTurn = call.notes
        if turn.run is not None and call.trajectory is not None:
            turn.run.last_finish = response.finish_reason
            if call.recording and call.binding.settings.content:
                loop = _turn.get()
                if loop is not None:
                    loop.calls.append(call)
                call.held = True
        return response

    def request(self, call: Call, args: tuple[Any, ...]) -> Request:
        """What ToolAgentLoop asks: the prompt, and the messages since the turn before."""
        run, turn, given = current_run(), _turn.get(), call.arguments
        request = Request(prompt_ids=given.get("prompt_ids"), sampling_params=given.get("sampling_params") or {})
        if run is not None:
            request.model, request.provider = run.model, run.provider
        else:
            config = getattr(args[0], "config", None) if args else None
            rollout = getattr(config, "actor_rollout_ref", None)
            request.model = model_name(getattr(getattr(rollout, "model", None), "path", None))
            request.provider = getattr(getattr(rollout, "rollout", None), "name", None)
        if turn is not None:
            request.messages, request.message_prefix_count = turn.new, turn.before
        elif run is not None and (call.trajectory is None or call.trajectory.tally.turns == 0):
            request.messages = run.raw_prompt
        return request

    def response(self, call: Call, result: Any) -> Response:
        """What verl's server gave back; ``length`` is recovered from the number of tokens."""
        extra = result.extra_fields or {}
        return Response(
            token_ids=result.token_ids,
            logprobs=result.log_probs,
            output_tokens=len(result.token_ids),
            finish_reason=_finish_reason(call, result),
            cache_read_tokens=_integer(extra.get("num_cached_tokens")),
            preemptions=_integer(result.num_preempted),
            policy_version=_integer(extra.get("global_steps")),
        )

    def count(self, call: Call, result: Any, error: BaseException | None) -> None:
        """Close the turn; a segment is handed to its turn instead."""
        if not call.silent:
            super().count(call, result, error)
        elif error is None and call.ended is not None and call.notes.notes is not None:
            call.notes.notes.segments.append(Segment(call.started, call.ended, result))

    def end(self, call: Call, result: Any) -> None:
        """Write what is known now; of a loop that keeps no messages, decode what the model said."""
        turn: VerlTurn = call.notes
        try:
            super().end(call, result)
        finally:
            if call.held and not turn.in_loop:
                call.held = turn.run is not None and _decode_later(turn.run, call, None)


def _finish_reason(call: Call, result: Any) -> str | None:
    reason = result.stop_reason
    if reason in ABORTED:
        return "abort"
    if reason not in ("completed", None):
        return str(reason)
    ids, turn = result.token_ids, call.notes
    run, limit = (turn.run, turn.token_limit) if isinstance(turn, VerlTurn) else (None, None)
    if run is not None and limit is not None and len(ids) >= limit and not run.stops(ids[-1]):
        return "length"
    return "stop" if reason == "completed" else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def output_attributes(text: str) -> dict[str, str]:
    """``output.value`` and its type."""
    return {semconv.OUTPUT_VALUE: text, semconv.OUTPUT_MIME_TYPE: semconv.MIME_JSON}


def _decode_later(run: AgentRun, call: Call, spoken: list[Any] | None) -> bool:
    """Decode the tokens that this turn adds off the event loop, then end its span; False if too much waits already."""
    turn: Turn = call.notes
    if turn.response is None or call.trajectory is None:
        return False
    opened = turn.opened
    prompt = Piece([] if opened is None else opened.delta.tolist())
    completion = Piece(list(turn.response.token_ids))
    if opened is not None and opened.rebased:
        run.pieces.clear()
    run.pieces += (prompt, completion)

    def write() -> None:
        try:
            completion.text = text = run.decode(completion.ids)
            found: dict[str, Any] = {}
            if switch.token2text:
                prompt.text = run.decode(prompt.ids)
                found = output_attributes(
                    to_json({semconv.PROMPT_TEXT: prompt.text, semconv.RESPONSE_TEXT: text}, limit=TEXT_LIMIT)
                )
            if spoken is None:
                run.closing = text
                found[semconv.OUTPUT_MESSAGES] = messages.messages_json([{"role": "assistant", "content": text}])
            call.span.set_attributes(found)
        finally:
            call.end_span()

    return call.trajectory.later(write)


def wrap_generating_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the generation inside which messages are new, and write the assistant's message when it is known."""

    async def _handle_generating_state(self: Any, agent_data: Any, *args: Any, **kwargs: Any) -> Any:
        run, trajectory = current_run(), current_trajectory()
        if run is None or trajectory is None or not trajectory.recording:
            return await original(self, agent_data, *args, **kwargs)
        token = None
        with guard("read the messages of a turn"):
            run.agent_data = agent_data
            turn = LoopTurn(new=list(agent_data.messages[run.said :]), before=run.said)
            said = len(agent_data.messages)
            token = _turn.set(turn)
        if token is None:
            return await original(self, agent_data, *args, **kwargs)
        try:
            return await original(self, agent_data, *args, **kwargs)
        finally:
            _turn.reset(token)
            with guard("write the messages of a turn"):
                run.said = len(agent_data.messages)
                spoken = list(agent_data.messages[said:])
                for call in turn.calls[:-1]:
                    _complete(run, call, [])
                if turn.calls:
                    _complete(run, turn.calls[-1], spoken)

    return _handle_generating_state


def _complete(run: AgentRun, call: Call, spoken: list[Any]) -> None:
    """Write the assistant's message on a turn whose span was left open; in the background where that is allowed."""

    def write() -> None:
        if spoken:
            said = messages.messages_json(spoken, images=call.binding.settings.images)
            call.span.set_attribute(semconv.OUTPUT_MESSAGES, said)
        if (spoken and not switch.token2text) or not _decode_later(run, call, spoken or None):
            call.end_span()

    if not (call.in_background and call.trajectory is not None and call.trajectory.later(write)):
        write()

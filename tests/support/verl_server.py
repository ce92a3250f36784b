"""A scripted policy that stands where vLLM's server stands behind verl's LLMServerClient."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_model import load_tokenizer


def tool_call(name: str, arguments: Any) -> str:
    """A tool call in the Hermes format; `arguments` that are a string go in as they are: they may be bad JSON."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy says in one turn.

    Attributes:
        text: encoded at the end of the generated tokens.
        tokens: length of the generation; random tokens fill it up before the text.
        stop_reason: verl's: ``completed``, ``aborted``, or None.
        closed: end a completed generation with the end token; False for one that ran into its limit.
        cuts: lengths after which a weight update aborts the generation; a resumed request gets the next part.
        versions: policy version of each part; the last one holds for the rest.
        cached: tokens that the prefix cache had; preempted: how often the engine preempted the request.
        error: raised instead of an answer.
    """

    text: str = ""
    tokens: int = 0
    stop_reason: str | None = "completed"
    closed: bool = True
    cuts: tuple[int, ...] = ()
    versions: tuple[int, ...] = (0,)
    cached: int | None = None
    preempted: int | None = 0
    error: BaseException | None = None


@dataclass(slots=True, kw_only=True)
class ServerCall:
    """One request as the server saw it, and what it answered."""

    turn: int
    prompt_ids: list[int]
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stop_reason: str | None
    version: int
    logprobs: list[float] | None


@dataclass(slots=True)
class _Plan:
    prompt: list[int]
    ids: list[int]
    reply: Reply
    part: int = 0


@dataclass
class ScriptedServer:
    """Answers ``generate`` as verl's server actors do; holds no trajectory state: the turn is read off the prompt.

    Args:
        model_dir: whose tokenizer it uses.
        turns: of the default script: a tool call in each but the last turn, then an answer.
        gen_tokens: generated tokens of each turn of the default script.
        latency: seconds that each request takes.
        call: the tool call of the default script.
        script: instead of the default: the replies by turn (the last one repeats), or ``script(turn, prompt_text)``;
            turns count from 1.
        logprobs: give log-probabilities back.
        record: keep every request in `calls`.
    """

    model_dir: str
    turns: int = 3
    gen_tokens: int = 60
    latency: float = 0.0
    call: str = field(default_factory=lambda: tool_call("calculator", {"expression": "1+2*3"}))
    script: Sequence[Reply] | Callable[[int, str], Reply] | None = None
    logprobs: bool = False
    record: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = load_tokenizer(self.model_dir)
        self.calls: list[ServerCall] = []
        self._rng = random.Random(self.seed)
        self._plans: list[_Plan] = []
        self._mark = self.tokenizer.encode("<|im_start|>assistant")
        self._asking = Reply(text=f"let us see\n{self.call}", tokens=self.gen_tokens)
        self._answer = Reply(text="the answer is seven", tokens=self.gen_tokens)
        self._encoded: dict[str, list[int]] = {}

    async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, **_):
        """Answer one request: a new turn, or the rest of one that was cut."""
        from verl.workers.rollout.replica import TokenOutput

        if self.latency:
            await asyncio.sleep(self.latency)
        plan = self._plan(prompt_ids)
        reply, part = plan.reply, plan.part
        if reply.error is not None:
            raise reply.error
        version = reply.versions[min(part, len(reply.versions) - 1)]
        done, cut = len(prompt_ids) - len(plan.prompt), part < len(reply.cuts)
        ids = plan.ids[done : done + reply.cuts[part]] if cut else plan.ids[done:]
        plan.part += 1
        stop = "aborted" if cut else reply.stop_reason
        if not cut and reply.cuts:
            self._plans.remove(plan)
        extra = {"global_steps": version} | ({} if reply.cached is None else {"num_cached_tokens": reply.cached})
        logprobs = [-self._rng.random() for _ in ids] if self.logprobs else None
        if self.record:
            self.calls.append(
                ServerCall(
                    turn=self.turn_of(plan.prompt),
                    prompt_ids=list(prompt_ids),
                    token_ids=list(ids),
                    stop_reason=stop,
                    sampling_params=dict(sampling_params),
                    version=version,
                    logprobs=logprobs,
                )
            )
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason=stop, num_preempted=reply.preempted, extra_fields=extra
        )

    def turn_of(self, prompt_ids: list[int]) -> int:
        """Which turn a prompt asks for: how many assistant messages it has opened."""
        start, width = self._mark[0], len(self._mark)
        found, at = 0, -1
        for _ in range(prompt_ids.count(start)):
            at = prompt_ids.index(start, at + 1)
            found += prompt_ids[at : at + width] == self._mark
        return found

    def _plan(self, prompt_ids: list[int]) -> _Plan:
        for plan in self._plans:
            known = len(plan.prompt)
            if (
                plan.part
                and prompt_ids[:known] == plan.prompt
                and plan.ids[: len(prompt_ids) - known] == prompt_ids[known:]
            ):
                return plan
        reply = self._reply(prompt_ids)
        plan = _Plan(list(prompt_ids), self._ids(reply), reply)
        if reply.cuts:
            self._plans.append(plan)
        return plan

    def _reply(self, prompt_ids: list[int]) -> Reply:
        turn = self.turn_of(prompt_ids)
        if self.script is None:
            return self._asking if turn < self.turns else self._answer
        if callable(self.script):
            return self.script(turn, self.tokenizer.decode(prompt_ids))
        return self.script[min(turn, len(self.script)) - 1]

    def _ids(self, reply: Reply) -> list[int]:
        tail = self._encoded.get(reply.text)
        if tail is None:
            tail = self._encoded[reply.text] = self.tokenizer.encode(reply.text) if reply.text else []
        end = [self.tokenizer.eos_token_id] if reply.closed and reply.stop_reason == "completed" else []
        size = self.tokenizer.vocab_size
        filler = max(0, reply.tokens - len(tail) - len(end))
        return [self._rng.randrange(size // 2, size - 8) for _ in range(filler)] + tail + end

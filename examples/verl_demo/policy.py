"""The scripted policy: an inference server for verl's LLMServerClient which answers from a script, not from a model."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from verl_demo.questions import Question, load_questions
from verl_demo.script import Plan, plan

CACHE_BLOCK = 16
FIRST_TOKEN_SECONDS = 0.03
TOKEN_SECONDS = 0.001

Said = tuple[int, float]
"""A token id and its log-probability."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A trajectory in the making: which plan it follows, what was said so far, and the number of turns said."""

    plan: Plan
    sample: int
    tokens: list[int] = field(default_factory=list)
    turns: int = 0


class ScriptedServer:
    """Has verl's server interface (`generate`); a Ray actor runs it where vLLM's server would run.

    A server sees prompts, not sample numbers: the k-th first prompt of a question gets script k of its group, and a
    later prompt belongs to the conversation that it continues.
    """

    def __init__(self, model_dir: str, *, group_size: int, prompt_length: int, response_length: int) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.group_size = group_size
        self.response_length = response_length
        self.length = prompt_length + response_length
        self.version = 0
        self.questions = load_questions()
        self.arrivals: dict[int, int] = defaultdict(int)
        self.open: list[Conversation] = []

    def update_weights(self, version: int) -> None:
        """What a weight update is to a real server: from now on the tokens are of this policy version."""
        self.version = version
        self.open.clear()

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_images_and_more: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        version = self.version
        conversation = self._conversation(prompt_ids)
        cached = self._cached_tokens(conversation, prompt_ids)
        # vLLM's server limits a turn the same way, and reports a cut one as "completed" too.
        limit = max(1, min(self.response_length, self.length - len(prompt_ids)))
        said = (await self._say(conversation, prompt_ids))[:limit]
        token_ids = [token for token, _ in said]
        conversation.tokens = prompt_ids + token_ids
        conversation.turns += 1
        self.open.append(conversation)
        await asyncio.sleep(FIRST_TOKEN_SECONDS + TOKEN_SECONDS * len(token_ids))
        return TokenOutput(
            token_ids=token_ids,
            log_probs=[logprob for _, logprob in said] if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=int(conversation.sample == 2 and conversation.turns == 2),
            extra_fields={"global_steps": version, "num_cached_tokens": cached},
        )

    def _conversation(self, prompt_ids: list[int]) -> Conversation:
        for position, candidate in enumerate(self.open):
            if prompt_ids[: len(candidate.tokens)] == candidate.tokens:
                return self.open.pop(position)
        question = self._question(prompt_ids)
        earlier_passes, sample = divmod(self.arrivals[question.index], self._group_size(question))
        self.arrivals[question.index] += 1
        return Conversation(plan=plan(question, sample, self.version, earlier_passes), sample=sample)

    def _question(self, prompt_ids: list[int]) -> Question:
        text = self.tokenizer.decode(prompt_ids)
        return next(question for question in self.questions if question.question in text)

    def _group_size(self, question: Question) -> int:
        return self.group_size if question.split == "train" else 1

    def _cached_tokens(self, conversation: Conversation, prompt_ids: list[int]) -> int:
        """Whole blocks of what the server has seen: the turns before, or the prompt of an earlier sample."""
        seen = len(conversation.tokens) if conversation.turns else len(prompt_ids) - 1 if conversation.sample else 0
        return seen // CACHE_BLOCK * CACHE_BLOCK

    async def _say(self, conversation: Conversation, _prompt_ids: list[int]) -> list[Said]:
        text = conversation.plan.turns[min(conversation.turns, len(conversation.plan.turns) - 1)]
        ends = [] if conversation.plan.rambling else [self.tokenizer.eos_token_id]
        # A script never says anything else, so each of its tokens has probability 1.
        return [(token, 0.0) for token in self.tokenizer.encode(text, add_special_tokens=False) + ends]


class RandomModelServer(ScriptedServer):
    """As above, with tokens of a random-weight Qwen2 model before each scripted text (a random model calls no tool)."""

    def __init__(self, model_dir: str, *, sampled_tokens: int = 16, **sizes: int) -> None:
        super().__init__(model_dir, **sizes)
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.sampled_tokens = sampled_tokens
        reserved = len(self.tokenizer.get_added_vocab())
        self.suppressed = list(range(len(self.tokenizer) - reserved, self.model.config.vocab_size))

    async def _say(self, conversation: Conversation, _prompt_ids: list[int]) -> list[Said]:
        sampled = await asyncio.to_thread(self._sample, _prompt_ids)
        newline = self.tokenizer.encode("\n", add_special_tokens=False)
        return sampled + [(token, 0.0) for token in newline] + await super()._say(conversation, _prompt_ids)

    def _sample(self, prompt_ids: list[int]) -> list[Said]:
        import torch

        prompt = torch.tensor([prompt_ids])
        with torch.no_grad():
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                max_new_tokens=self.sampled_tokens,
                min_new_tokens=self.sampled_tokens,
                suppress_tokens=self.suppressed,
                output_scores=True,
                return_dict_in_generate=True,
            )
        tokens = output.sequences[0, len(prompt_ids) :]
        logprobs = torch.cat(output.scores).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))


SERVERS: dict[str, type[ScriptedServer]] = {"scripted": ScriptedServer, "hf": RandomModelServer}

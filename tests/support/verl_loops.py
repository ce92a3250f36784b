"""Agent loops as a user writes them, decorated with verl's own decorator."""

import contextlib
import json

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.rollout_trace import rollout_trace_op


@rollout_trace_op
def shorten(text, limit=3):
    """A plain function: verl's own decorator would take its first argument for ``self``."""
    return text[:limit]


class Searcher:
    """An object of the user's own."""

    def __init__(self, name):
        self.name = name

    @rollout_trace_op
    async def search(self, query, top_k=2):
        """Some hits."""
        if not query:
            raise ValueError("empty query")
        return [f"{self.name}:{query}:{rank}" for rank in range(top_k)]

    @rollout_trace_op
    def count(self, hits):
        """A method that is not async."""
        return len(hits)

    @staticmethod
    @rollout_trace_op
    def join(hits):
        """A static method."""
        return " ".join(hits)


@register("search_agent")
class SearchAgentLoop(AgentLoopBase):
    """Two generations with a search between them, in no way like ToolAgentLoop."""

    @rollout_trace_op
    async def run(self, sampling_params, **kwargs):
        searcher = Searcher("wiki")
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        first = await self.server_manager.generate(
            request_id="mine",
            prompt_ids=prompt_ids,
            sampling_params=sampling_params | {"max_tokens": 64, "stop": ["\n"]},
        )
        hits = await searcher.search(shorten("sun and moon"))
        added = self.tokenizer.encode(Searcher.join(hits))
        with contextlib.suppress(ValueError):
            await searcher.search("")
        whole = prompt_ids + first.token_ids + added
        second = await self.server_manager.generate(
            request_id="mine", prompt_ids=whole, sampling_params=sampling_params
        )
        mask = [1] * len(first.token_ids) + [0] * len(added) + [1] * len(second.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=first.token_ids + added + second.token_ids,
            response_mask=mask,
            num_turns=2 + searcher.count(hits),
            metrics=AgentLoopMetrics(),
            reward_score=0.5,
            extra_fields={"hits": json.dumps(hits)},
        )


@register("two_answers_agent")
class TwoAnswersAgentLoop(AgentLoopBase):
    """Gives two outputs for one prompt, as trainer v1 allows."""

    @rollout_trace_op
    async def run(self, sampling_params, **kwargs):
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        outputs = []
        for _ in range(2):
            answer = await self.server_manager.generate(
                request_id="mine", prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt_ids,
                    response_ids=answer.token_ids,
                    response_mask=[1] * len(answer.token_ids),
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={},
                )
            )
        return outputs

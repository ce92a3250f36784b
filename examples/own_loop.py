"""An agent loop of your own, traced with two functions. Run it: `python examples/own_loop.py`."""

import asyncio

from otel_rollout import configure, rollout_trace_attr, rollout_trace_op

CAPITALS = {"France": "Paris", "Japan": "Tokyo"}


@rollout_trace_op(kind="tool")
async def search(country: str) -> str:
    return f"The capital of {country} is {CAPITALS[country]}."


@rollout_trace_op(kind="llm")
async def generate(messages: list[dict], temperature: float) -> dict:
    """Stands where your inference engine stands; `token_ids`, `text` and OpenAI's shapes are understood."""
    await asyncio.sleep(0.01 * temperature)
    return {"text": messages[-1]["content"].rstrip(".").split()[-1], "finish_reason": "stop"}


async def agent(country: str) -> str:
    question = {"role": "user", "content": f"What is the capital of {country}?"}
    found = {"role": "tool", "content": await search(country)}
    return (await generate([question, found], temperature=1.0))["text"]


async def rollout(sample_index: int, country: str, rollout_n: int) -> None:
    with rollout_trace_attr(sample_index=sample_index, step=1, rollout_n=rollout_n, name="geography") as trajectory:
        answer = await agent(country)
        trajectory.reward(float(answer == CAPITALS[country]))


async def main() -> None:
    samples = list(enumerate(CAPITALS))
    await asyncio.gather(*(rollout(index, country, n) for index, country in samples for n in range(2)))


if __name__ == "__main__":
    configure(project_name="capitals", experiment_name="readme")
    asyncio.run(main())

"""What users write: must type-check with mypy --strict. Never run."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any
from uuid import uuid4

from typing_extensions import assert_type

from otel_rollout import (
    Trajectory,
    __version__,
    configure,
    current_trajectory,
    flush,
    rollout_trace_attr,
    rollout_trace_op,
)

configure()
configure("project", "experiment")
configure(project_name="p", experiment_name="e", exporters="otlp,otlp_file")
configure(exporters=["otlp"], framework="own", framework_version="1.0")
assert_type(flush(), bool)
assert_type(flush(timeout=1.5), bool)
assert_type(current_trajectory(), Trajectory | None)
version: str = __version__


@rollout_trace_op
def bare(x: int, *, flag: bool = False) -> str:
    return str(x)


@rollout_trace_op()
def called(x: int) -> str:
    return str(x)


@rollout_trace_op(kind="tool", name="look_up")
async def search(query: str, limit: int = 3) -> list[str]:
    return [query] * limit


@rollout_trace_op
def items(n: int) -> Generator[int, str, bool]:
    yield n
    return True


@rollout_trace_op
async def aitems(n: int) -> AsyncGenerator[int, None]:
    yield n


assert_type(bare(1, flag=True), str)
assert_type(called(1), str)
assert_type(items(2), Generator[int, str, bool])
assert_type(aitems(2), AsyncGenerator[int, None])
bare("no")  # type: ignore[arg-type]  # the decorated function keeps its parameters
rollout_trace_op(kind=7)  # type: ignore[call-overload]


class Agent:
    @rollout_trace_op(kind="llm")
    async def generate(self, prompt_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": prompt_ids}

    @classmethod
    @rollout_trace_op
    def build(cls) -> "Agent":
        return cls()

    @staticmethod
    @rollout_trace_op
    def add(a: int, b: int) -> int:
        return a + b


async def rollout(agent: Agent) -> float:
    with rollout_trace_attr(
        sample_index=1, step=2, rollout_n=0, name="agent", validate=False, trace=True, color="red"
    ) as trajectory:
        assert_type(trajectory, Trajectory)
        assert_type(trajectory.id, str)
        trajectory.reward(1.0)
        trajectory.reward(0.2, name="format")
        trajectory.reject("too_long")
        trajectory.set("key", [1, 2])
        trajectory.set(level=3)
        assert_type(await search("q"), list[str])
        assert_type(await agent.generate([1]), dict[str, Any])
        assert_type(Agent.build(), Agent)
        assert_type(Agent.add(1, 2), int)
    async with rollout_trace_attr(uuid4(), 1, 0) as inner:
        assert_type(inner, Trajectory)
    return 1.0


@rollout_trace_attr(sample_index=1)
def decorated(x: int) -> str:
    return str(x)


@rollout_trace_attr(sample_index=1)
async def adecorated(x: int) -> str:
    return str(x)


assert_type(decorated(1), str)
made: Callable[[int], Coroutine[Any, Any, str]] = adecorated

"""What is measured on the real loop: each job runs in a fork of its own of a process that has imported verl."""

import asyncio
import gc
from collections import Counter
from pathlib import Path
from typing import Any, Final

from paired import pairs, stalls, summary
from rows import ROWS, prepare
from workload import PLAIN_TOOL, PROJECT, Workload

TOGETHER: Final = 8
CROWD: Final = 32
LATENCY: Final = 0.05


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job: ``{"kind": "row" | "bytes" | "sizes" | "memory", "folder", "endpoint", ...}``."""
    return asyncio.run(_KINDS[job["kind"]](**{key: value for key, value in job.items() if key != "kind"}))


async def _row(
    *, folder: str, endpoint: str, row: str, turns: int, pair_count: int, stall_count: int
) -> dict[str, Any]:
    chosen = ROWS[row]
    tracing = prepare(chosen, Path(folder) / f"{row}-{turns}", endpoint)
    load = Workload(Path(folder), turns=turns, tool=chosen.tool, backend=chosen.backend)

    async def batch(number: int) -> None:
        await load.batch(number, TOGETHER)

    async def crowd(number: int) -> None:
        await load.batch(number, CROWD, LATENCY)

    await load.batch(0, 1)
    before = tracing.stored()
    warm_up = 2
    found = await pairs(pair_count, batch, tracing.turn, tracing.flush, warm_up=warm_up)
    stored = (tracing.stored() - before) / ((pair_count + warm_up) * TOGETHER)
    result = {"row": row, "turns": turns, **summary(found, TOGETHER, load.ops), "stored_bytes": stored}
    result["tokens"] = load.tokens
    if stall_count and chosen.stalls:
        watched = await pairs(stall_count, crowd, tracing.turn, tracing.flush, warm_up=1, beat=True)
        result["stall_ms"] = stalls(watched)
    return result


async def _bytes(*, folder: str, endpoint: str, row: str, turns: int) -> dict[str, Any]:
    chosen = ROWS[row]
    tracing = prepare(chosen, Path(folder) / f"{row}-{turns}-bytes", endpoint)
    load = Workload(Path(folder), turns=turns, tool=chosen.tool, backend=chosen.backend)
    tracing.turn(True)
    await load.batch(0, 2)
    tracing.flush()
    before = tracing.stored()
    await load.batch(1, 4)
    tracing.flush()
    return {"row": row, "turns": turns, "stored_bytes": (tracing.stored() - before) / 4, "tokens": load.tokens}


async def _sizes(*, folder: str, endpoint: str, turns: int, trajectories: int = 16) -> dict[str, Any]:
    from breakdown import Breakdown

    import otel_rollout

    counted = Breakdown()
    otel_rollout.configure(PROJECT, PROJECT, exporters=[counted])
    load = Workload(Path(folder), turns=turns, tool=PLAIN_TOOL, backend="otel")
    for number in range(trajectories // TOGETHER):
        await load.batch(number, TOGETHER)
    otel_rollout.flush()
    return {"turns": turns, "tokens": load.tokens, **counted.per_trajectory()}


async def _memory(*, folder: str, endpoint: str, trajectories: int) -> dict[str, Any]:
    import psutil

    tracing = prepare(ROWS["otlp"], Path(folder) / "memory", endpoint)
    load = Workload(Path(folder), turns=2, tool=PLAIN_TOOL, backend="otlp")
    process = psutil.Process()

    async def stretch(count: int, on: bool) -> tuple[float, Counter[str]]:
        tracing.turn(on)
        for number in range(count):
            await load.batch(number, 1)
        tracing.flush()
        await asyncio.sleep(0)
        return process.memory_info().rss / 1e6, live_objects()

    await stretch(trajectories // 5, on=False)
    plain_before, _ = await stretch(trajectories // 5, on=True)
    plain_after, objects_before = await stretch(trajectories, on=False)
    traced_after, objects_after = await stretch(trajectories, on=True)
    left = objects_after - objects_before
    return {
        "trajectories": trajectories,
        "untraced_growth_mb": plain_after - plain_before,
        "traced_growth_mb": traced_after - plain_after,
        "live_objects_left": sum(left.values()),
        "live_objects": dict(left.most_common(5)),
    }


def live_objects() -> Counter[str]:
    """How many objects of our classes, and spans of the SDK, the garbage collector knows."""
    gc.collect()
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        module = str(getattr(type(thing), "__module__", ""))
        if module.startswith(("otel_rollout", "opentelemetry.sdk.trace", "opentelemetry.trace")):
            counts[f"{module}.{type(thing).__name__}"] += 1
    return counts


_KINDS: Final = {"row": _row, "bytes": _bytes, "sizes": _sizes, "memory": _memory}

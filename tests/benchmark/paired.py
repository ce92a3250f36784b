"""Paired batches and what is read from them: medians of the ratio and of the difference within each pair."""

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of trajectories. Times in seconds.

    Attributes:
        wall: until all its trajectories are there.
        cpu: of the whole process, the flush included.
        loop_cpu: of the event loop's thread.
        flush: until everything that was traced is delivered.
        stall: longest time that the loop came back too late.
        busy: most CPU time that the loop's thread used between two heartbeats: a stall without what others did.
    """

    wall: float
    cpu: float
    loop_cpu: float
    flush: float
    stall: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """Median and quartiles; of a single value that value three times."""
    if len(values) < 2:
        return Spread(median=values[0], low=values[0], high=values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=median, low=low, high=high)


async def heartbeat(gaps: list[tuple[float, float]], period: float = 0.001) -> None:
    """Sleep again and again and note how much later than asked the loop came back, and its CPU time meanwhile."""
    while True:
        before, cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(period)
        gaps.append((time.perf_counter() - before - period, time.thread_time() - cpu))


async def timed_batch(work: Callable[[], Awaitable[Any]], flush: Callable[[], None] | None, *, beat: bool) -> Batch:
    """Run one batch; `flush` waits outside of its wall time, its CPU time counts."""
    gaps: list[tuple[float, float]] = [(0.0, 0.0)]
    gc.collect()
    pulse = asyncio.create_task(heartbeat(gaps)) if beat else None
    await asyncio.sleep(0.02)
    del gaps[1:]
    cpu, loop_cpu, began = time.process_time(), time.thread_time(), time.perf_counter()
    await work()
    wall, loop_cpu = time.perf_counter() - began, time.thread_time() - loop_cpu
    if pulse is not None:
        await asyncio.sleep(0.005)
        pulse.cancel()
    began = time.perf_counter()
    if flush is not None:
        flush()
    flushed = time.perf_counter() - began
    cpu = time.process_time() - cpu
    late, busy = (max(column) for column in zip(*gaps, strict=True))
    return Batch(wall=wall, cpu=cpu, loop_cpu=loop_cpu, flush=flushed, stall=late, busy=busy)


async def pairs(
    count: int,
    work: Callable[[int], Awaitable[Any]],
    turn: Callable[[bool], None],
    flush: Callable[[], None],
    *,
    warm_up: int = 2,
    beat: bool = False,
) -> list[tuple[Batch, Batch]]:
    """Alternate untraced and traced batches, the order swapped from pair to pair.

    Args:
        work: runs the batch of this number.
        turn: switches the tracing on or off.
        flush: waits until what was traced is delivered.

    Returns:
        (untraced, traced) for each pair.
    """
    found = []
    for number in range(-warm_up, count):
        both = {}
        for traced in (False, True) if number % 2 else (True, False):
            turn(traced)
            both[traced] = await timed_batch(lambda n=number: work(n), flush if traced else None, beat=beat)
        if number >= 0:
            found.append((both[False], both[True]))
    return found


def summary(found: list[tuple[Batch, Batch]], trajectories: int, ops: int) -> dict[str, Any]:
    """What a row of the table shows; times in milliseconds.

    Args:
        trajectories: of one batch.
        ops: of one trajectory.
    """
    each = 1000 / trajectories

    def ratio(name: str) -> dict[str, float]:
        return asdict(spread([getattr(traced, name) / getattr(plain, name) for plain, traced in found]))

    def added(name: str, scale: float) -> dict[str, float]:
        return asdict(spread([(getattr(traced, name) - getattr(plain, name)) * scale for plain, traced in found]))

    return {
        "pairs": len(found),
        "untraced_ms": asdict(spread([plain.wall * each for plain, _ in found])),
        "traced_ms": asdict(spread([traced.wall * each for _, traced in found])),
        "wall_ratio": ratio("wall"),
        "cpu_ratio": ratio("cpu"),
        "loop_cpu_ratio": ratio("loop_cpu"),
        "added_ms_per_op": added("wall", each / ops),
        "added_loop_cpu_ms_per_op": added("loop_cpu", each / ops),
        "added_cpu_ms_per_op": added("cpu", each / ops),
        "flush_ms": asdict(spread([traced.flush * each for _, traced in found])),
    }


def stalls(found: list[tuple[Batch, Batch]]) -> dict[str, Any]:
    """The longest gap of the heartbeat in each batch, and the most CPU time within one, in milliseconds."""
    kinds = {name: [[getattr(batch, name) * 1000 for batch in pair] for pair in found] for name in ("stall", "busy")}
    medians = {name: [statistics.median(column) for column in zip(*kinds[name], strict=True)] for name in kinds}
    return {
        "batches": len(found),
        "untraced": medians["stall"][0],
        "traced": medians["stall"][1],
        "added": medians["stall"][1] - medians["stall"][0],
        "added_paired": asdict(spread([traced - plain for plain, traced in kinds["stall"]])),
        "worst_untraced": max(plain for plain, _ in kinds["stall"]),
        "worst_traced": max(traced for _, traced in kinds["stall"]),
        "busy_untraced": medians["busy"][0],
        "busy_traced": medians["busy"][1],
        "busy_added": medians["busy"][1] - medians["busy"][0],
        "wall_ratio": statistics.median(traced.wall / plain.wall for plain, traced in found),
    }

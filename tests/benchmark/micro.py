"""What one op and one trajectory cost outside verl, in microseconds of the loop's thread; prints JSON.

``python micro.py on|sampled_out|trace_false|disabled|unconfigured``
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

ROUNDS: Final = 15
CALLS: Final = 400
ENVIRONMENT: Final = {
    "sampled_out": {"OTEL_TRACES_SAMPLER": "rollout_group", "OTEL_TRACES_SAMPLER_ARG": "0"},
    "disabled": {"OTEL_SDK_DISABLED": "true"},
}


async def nothing(number: int) -> int:
    return number


async def measure(mode: str) -> dict[str, float]:
    """Microseconds of an op that does nothing (less the function itself), and of opening and closing a trajectory."""
    import otel_rollout
    from otel_rollout import rollout_trace_attr, rollout_trace_op

    os.environ.update(ENVIRONMENT.get(mode, {}))
    if mode != "unconfigured":
        otel_rollout.configure("benchmark", "benchmark", exporters=[_discard()])
    op = rollout_trace_op(nothing)
    trace = mode != "trace_false"

    async def trajectories() -> None:
        for number in range(CALLS // 8):
            with rollout_trace_attr(number, 1, 0, trace=trace):
                pass

    async def ops(function: Callable[[int], Awaitable[int]]) -> None:
        with rollout_trace_attr(1, 1, 0, trace=trace):
            for number in range(CALLS):
                await function(number)

    bare, traced, opened = [], [], []
    for _ in range(ROUNDS):
        bare.append(await _microseconds(lambda: ops(nothing)) / CALLS)
        traced.append(await _microseconds(lambda: ops(op)) / CALLS)
        opened.append(await _microseconds(trajectories) / (CALLS // 8))
        otel_rollout.flush()
    differences = [after - before for before, after in zip(bare, traced, strict=True)]
    return {"op": statistics.median(differences), "trajectory": statistics.median(opened)}


async def _microseconds(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.thread_time()
    await work()
    return (time.thread_time() - began) * 1e6


def _discard() -> Any:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Discard(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    return Discard()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1]))))

"""What the demo shows in the end: a table of all trajectories, one of them in full, and where the data lies."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from otel_rollout.trace_view import TrajectoryView


def load(traces: Path) -> "list[TrajectoryView]":
    """The recorded trajectories in the order of step, sample and rollout; none if there is no file."""
    from otel_rollout.trace_view import read_trajectories

    found = list(read_trajectories(traces)) if traces.exists() else []
    return sorted(found, key=_place)


def _place(trajectory: "TrajectoryView") -> tuple[bool, int, str, int]:
    sample = str(trajectory.sample_index).zfill(4)
    return trajectory.validate, trajectory.step or 0, sample, trajectory.rollout_n or 0


def show(trajectories: "Sequence[TrajectoryView]", traces: Path) -> None:
    from otel_rollout.render import trajectory_table, trajectory_tree

    console = _console()
    console.print(trajectory_table(trajectories))
    console.print(_totals(trajectories), highlight=False)
    console.print("\nOne that went wrong first and came out right:\n")
    console.print(trajectory_tree(interesting(trajectories)))
    where = traces.relative_to(Path.cwd()) if traces.is_relative_to(Path.cwd()) else traces
    console.print(f"\nThe traces are OTLP JSON lines in {where}. To look again:", highlight=False)
    console.print(f"  otel-rollout show {where}", highlight=False)
    console.print(f"  otel-rollout show {where} --status cancelled", highlight=False)


def interesting(trajectories: "Sequence[TrajectoryView]") -> "TrajectoryView":
    """A right answer after a tool error, with as many turns as there are."""
    return max(trajectories, key=lambda each: (each.summary.tool_errors > 0, each.reward or 0.0, each.summary.turns))


def _totals(trajectories: "Sequence[TrajectoryView]") -> str:
    lines = [each.summary for each in trajectories]
    statuses = ", ".join(f"{count} {status}" for status, count in Counter(line.status for line in lines).most_common())
    tools = f"{sum(line.tool_calls for line in lines)} tool calls, {sum(line.tool_errors for line in lines)} failed"
    tokens = f"{sum(line.response_tokens or 0 for line in lines):,} tokens of the policy"
    return f"{len(lines)} trajectories ({statuses}); {tools}; {tokens}"


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    return console

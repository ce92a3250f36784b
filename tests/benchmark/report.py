"""The report as tables in the terminal."""

from typing import Any, Final

from breakdown import KINDS
from rich.console import Console
from rich.table import Table
from rows import ROWS
from targets import growth, verdicts

_COLUMNS: Final = (
    "",
    "untraced\nms/traj",
    "wall\nratio",
    "added wall\nms/op",
    "added loop CPU\nms/op",
    "CPU ratio\nwith flush",
    "longest stall, ms\n32 at once, 50 ms",
    "of it CPU\nadded, ms",
    "kB/traj\nT=8, T=32",
)


def show(report: dict[str, Any], console: Console) -> None:
    """Print every part that the report has."""
    if report["rows"]:
        console.print(_rows(report))
    if report.get("sizes"):
        console.print(_sizes(report["sizes"]))
    if report.get("micro"):
        console.print(_micro(report["micro"]))
    if report.get("memory"):
        memory = report["memory"]
        console.print(
            f"Memory, {memory['trajectories']} sequential trajectories (T=2): "
            f"{memory['traced_growth_mb']:+.1f} MB traced, "
            f"{memory['untraced_growth_mb']:+.1f} MB untraced; {memory['live_objects_left']} objects of ours left."
        )
    if report.get("imports"):
        found = report["imports"]
        console.print(
            f"Import: {found['import_s']:.3f} s, {found['import_cpu_s']:.3f} s of CPU "
            f"(python -c pass: {found['bare_python_s']:.3f} s); "
            f"heavy modules with it: {', '.join(found['heavy_modules_imported']) or 'none'}."
        )
    console.print(_targets(report))
    for name, error in report["errors"].items():
        console.print(f"[red]{name} failed:[/] {error.strip().splitlines()[-1]}")
    load, cores = report["meta"]["load_at_end"], report["meta"]["cores"]
    if load > cores:
        console.print(
            f"[yellow]The machine was busy (load {load:.1f} on {cores} cores): times are too long and ratios uncertain."
        )


def _rows(report: dict[str, Any]) -> Table:
    table = Table(
        title="ToolAgentLoop, 8 turns of 450 + 50 tokens, zero-latency policy; medians \\[quartiles] of pairs"
    )
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, row in ROWS.items():
        found = report["rows"].get(name)
        if found is not None:
            table.add_row(row.shown, *_cells(found, report["rows"].get(f"{name}-32")))
    return table


def _cells(found: dict[str, Any], long: dict[str, Any] | None) -> list[str]:
    stall = found.get("stall_ms")
    stored = [part["stored_bytes"] / 1000 for part in (found, long) if part is not None]
    return [
        f"{found['untraced_ms']['median']:.1f}",
        _spread(found["wall_ratio"], 2),
        _spread(found["added_ms_per_op"], 3),
        f"{found['added_loop_cpu_ms_per_op']['median']:.3f}",
        _spread(found["cpu_ratio"], 2),
        f"{stall['untraced']:.0f} -> {stall['traced']:.0f} ({stall['added']:+.1f})" if stall else "-",
        f"{stall['busy_added']:+.1f}" if stall else "-",
        ", ".join(f"{size:,.1f}" for size in stored),
    ]


def _spread(found: dict[str, float], digits: int) -> str:
    return f"{found['median']:.{digits}f} [{found['low']:.{digits}f}-{found['high']:.{digits}f}]"


def _sizes(sizes: dict[str, Any]) -> Table:
    table = Table(title="Bytes of one trajectory as OTLP protobuf, not compressed, in kB")
    for name in ("", "tokens", "spans", "all", *KINDS):
        table.add_column(name, justify="right" if name else "left")
    for turns, found in sizes.items():
        parts = [f"{found['kinds'][kind] / 1000:.1f}" for kind in KINDS]
        table.add_row(
            f"T={turns}", str(found["tokens"]), f"{found['spans']:.0f}", f"{found['bytes'] / 1000:.1f}", *parts
        )
    if len(sizes) == 2:
        grown, tokens = growth(sizes)
        table.add_row("factor", f"x{tokens:.2f}", "", f"x{grown:.2f}", *[""] * len(KINDS))
    return table


def _micro(micro: dict[str, dict[str, float]]) -> Table:
    table = Table(title="Outside verl: CPU time of the caller's thread, in µs")
    for name in ("", "an op that does nothing", "open and close a trajectory"):
        table.add_column(name, justify="right" if name else "left")
    for mode, found in micro.items():
        table.add_row(mode.replace("_", " "), f"{found['op']:.2f}", f"{found['trajectory']:.1f}")
    return table


def _targets(report: dict[str, Any]) -> Table:
    table = Table(title="Targets")
    for name in ("", "reached", "target", ""):
        table.add_column(name)
    for verdict in verdicts(report):
        word = "[green]met[/]" if verdict.met else "[red]missed[/]"
        table.add_row(verdict.what, verdict.reached, verdict.target, word)
    return table

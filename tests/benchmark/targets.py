"""What tracing may cost, and whether a report keeps to it."""

from dataclasses import dataclass
from typing import Any, Final

WALL_RATIO: Final = 1.12
MS_PER_OP: Final = 0.12
STALL_MS: Final = 5.0
KB_AT_8: Final = 30.0
KB_AT_32: Final = 90.0
RSS_MB: Final = 3.0
IMPORT_S: Final = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target: what was reached, in words, and whether that is enough."""

    what: str
    reached: str
    target: str
    met: bool


def verdicts(report: dict[str, Any]) -> list[Verdict]:
    """A verdict for each target that the report has a figure for."""
    return [*_speed(report), *_size(report), *_memory(report), *_imports(report)]


def _speed(report: dict[str, Any]) -> list[Verdict]:
    found = []
    for name in ("otlp", "otlp_file"):
        row = report["rows"].get(name)
        if row is None:
            continue
        ratio, per_op = row["wall_ratio"]["median"], row["added_ms_per_op"]["median"]
        found.append(_verdict(f"{name}: wall ratio", f"{ratio:.3f}", f"≤ {WALL_RATIO}", ratio <= WALL_RATIO))
        found.append(_verdict(f"{name}: added per op", f"{per_op:.3f} ms", f"≤ {MS_PER_OP} ms", per_op <= MS_PER_OP))
        if "stall_ms" in row:
            added = row["stall_ms"]["added"]
            found.append(_verdict(f"{name}: added stall", f"{added:.1f} ms", f"≤ {STALL_MS:.0f} ms", added <= STALL_MS))
    return found


def _size(report: dict[str, Any]) -> list[Verdict]:
    sizes = report.get("sizes", {})
    found = []
    for turns, limit in (("8", KB_AT_8), ("32", KB_AT_32)):
        if turns in sizes:
            reached = sizes[turns]["bytes"] / 1000
            found.append(_verdict(f"OTLP at T={turns}", f"{reached:.1f} kB", f"≤ {limit:.0f} kB", reached <= limit))
    if "8" in sizes and "32" in sizes:
        grown, tokens = growth(sizes)
        found.append(_verdict("bytes from T=8 to T=32", f"x{grown:.2f}", f"≤ tokens x{tokens:.2f}", grown <= tokens))
    return found


def growth(sizes: dict[str, Any]) -> tuple[float, float]:
    """How many times more bytes, and tokens, T=32 has than T=8."""
    return sizes["32"]["bytes"] / sizes["8"]["bytes"], sizes["32"]["tokens"] / sizes["8"]["tokens"]


def _memory(report: dict[str, Any]) -> list[Verdict]:
    memory = report.get("memory")
    if memory is None:
        return []
    grown, left = memory["traced_growth_mb"], memory["live_objects_left"]
    count = memory["trajectories"]
    return [
        _verdict(
            f"memory after {count} trajectories",
            f"{grown:+.1f} MB, {left} objects of ours",
            f"≤ {RSS_MB:.0f} MB, 0 objects",
            grown <= RSS_MB and left <= 0,
        )
    ]


def _imports(report: dict[str, Any]) -> list[Verdict]:
    imports = report.get("imports")
    if imports is None:
        return []
    seconds, uninvited = imports["import_s"], imports["modules_without_import"]
    return [
        _verdict("import otel_rollout", f"{seconds:.3f} s", f"≤ {IMPORT_S} s", seconds <= IMPORT_S),
        _verdict("a process without verl pays", f"{len(uninvited)} modules of ours", "0 modules", not uninvited),
    ]


def _verdict(what: str, reached: str, target: str, met: bool) -> Verdict:
    return Verdict(what=what, reached=reached, target=target, met=met)

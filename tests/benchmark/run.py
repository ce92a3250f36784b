"""Measures what tracing costs on verl's real ToolAgentLoop, beside what verl offers itself. See README.md."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import imports
import report
from processes import HERE, SinkProcess, Zygote, environment
from rich.console import Console
from rows import ROWS
from targets import verdicts

MICRO: Final = ("on", "sampled_out", "trace_false", "disabled", "unconfigured")
PARTS: Final = (*ROWS, "sizes", "memory", "micro", "imports")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often each thing is done.

    Attributes:
        pairs, their_pairs: of batches, ours and the incumbents'.
        stalls, their_stalls: pairs of batches with the heartbeat.
        memory: trajectories one after the other.
        long: whether the incumbents' bytes at 32 turns are measured.
        imports: processes.
    """

    pairs: int
    their_pairs: int
    stalls: int
    their_stalls: int
    memory: int
    long: bool
    imports: int


FULL: Final = Effort(pairs=25, their_pairs=9, stalls=9, their_stalls=5, memory=1000, long=True, imports=10)
QUICK: Final = Effort(pairs=7, their_pairs=2, stalls=2, their_stalls=0, memory=200, long=False, imports=3)


class Run:
    """One benchmark run: what it has found so far, and the processes it measures in."""

    def __init__(self, folder: Path, effort: Effort, parts: list[str], console: Console) -> None:
        self.folder, self.effort, self.parts, self.console = folder, effort, parts, console
        self.found: dict[str, Any] = {"meta": _meta(), "rows": {}, "errors": {}}
        self._zygotes: dict[str, Zygote] = {}
        self._sink: SinkProcess | None = None

    def everything(self) -> dict[str, Any]:
        """Measure all parts that are asked for; one that fails does not end the others."""
        try:
            for name in self.parts:
                with self.console.status(f"{name} ..."):
                    began = time.monotonic()
                    self._try(name)
                self.console.print(f"[dim]{name}: {time.monotonic() - began:.0f} s")
        finally:
            self.close()
        self.found["meta"]["load_at_end"] = os.getloadavg()[0]
        self.found["targets"] = [asdict(verdict) for verdict in verdicts(self.found)]
        return self.found

    def _try(self, name: str) -> None:
        part = getattr(self, f"_{name}", None)
        try:
            if part is None:
                self._row(name)
            else:
                part()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            self.found["errors"][name] = str(error)

    def _job(self, plugin: bool, **job: Any) -> dict[str, Any]:
        plugins = "otel_rollout" if plugin else "none"
        if plugins not in self._zygotes:
            self._zygotes[plugins] = Zygote(self.folder, plugins)
        self._sink = self._sink or SinkProcess()
        return self._zygotes[plugins].run(folder=str(self.folder), endpoint=self._sink.endpoint, **job)

    def _row(self, name: str) -> None:
        ours, effort = ROWS[name].plugin, self.effort
        counts = (effort.pairs, effort.stalls) if ours else (effort.their_pairs, effort.their_stalls)
        job = {"kind": "row", "row": name, "turns": 8, "pair_count": counts[0], "stall_count": counts[1]}
        self.found["rows"][name] = self._job(ours, **job)
        if effort.long and name not in ("sampled_out", "trace_false"):
            self.found["rows"][f"{name}-32"] = self._job(ours, kind="bytes", row=name, turns=32)

    def _sizes(self) -> None:
        self.found["sizes"] = {
            str(turns): self._job(True, kind="sizes", turns=turns, trajectories=16) for turns in (8, 32)
        }

    def _memory(self) -> None:
        self.found["memory"] = self._job(True, kind="memory", trajectories=self.effort.memory)

    def _micro(self) -> None:
        found = self.found["micro"] = {}
        for mode in MICRO:
            command = [sys.executable, str(HERE / "micro.py"), mode]
            ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
            found[mode] = json.loads(ran.stdout)

    def _imports(self) -> None:
        self.found["imports"] = imports.measure(self.effort.imports)

    def close(self) -> None:
        """End the processes."""
        for process in [*self._zygotes.values(), self._sink]:
            if process is not None:
                process.close()


def _meta() -> dict[str, Any]:
    names = ("otel-rollout", "verl", "opentelemetry-sdk", "mlflow", "trackio")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "load_at_start": os.getloadavg()[0],
        "versions": {name: version(name) for name in names},
    }


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one or two minutes instead of up to ten; less certain")
    parser.add_argument("--only", metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    given = parser.parse_args()
    parts = given.only.split(",") if given.only else list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="otel-rollout-bench-", ignore_cleanup_errors=True) as folder:
        found = Run(Path(folder), QUICK if given.quick else FULL, parts, console).everything()
    report.show(found, console)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if found["errors"] else 0)


if __name__ == "__main__":
    main()

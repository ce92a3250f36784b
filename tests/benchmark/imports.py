"""What it costs to import otel_rollout, and what a process pays that only has it installed."""

import json
import statistics
import subprocess
import sys
import time
from typing import Any, Final

_IMPORT: Final = """\
import json, sys, time
began, cpu = time.perf_counter(), time.process_time()
import otel_rollout
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
heavy = ("verl", "torch", "numpy", "opentelemetry.sdk", "opentelemetry.exporter", "rich", "click", "mlflow", "ray")
print(json.dumps([seconds, cpu, [name for name in heavy if name in sys.modules]]))
"""
_NOTHING: Final = (
    "import sys; print([name for name in sys.modules if name.startswith(('otel_rollout', 'opentelemetry'))])"
)


def measure(times: int) -> dict[str, Any]:
    """Medians over `times` processes, in seconds; the first one, which may compile, is left out."""
    seconds, cpu, bare, loaded, uninvited = [], [], [], [], []
    for number in range(times + 1):
        found = json.loads(_output(_IMPORT))
        began = time.perf_counter()
        _output("pass")
        took = time.perf_counter() - began
        if number:
            seconds.append(found[0])
            cpu.append(found[1])
            bare.append(took)
        loaded, uninvited = found[2], json.loads(_output(_NOTHING).replace("'", '"'))
    return {
        "import_s": statistics.median(seconds),
        "import_cpu_s": statistics.median(cpu),
        "bare_python_s": statistics.median(bare),
        "heavy_modules_imported": loaded,
        "modules_without_import": uninvited,
    }


def _output(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout

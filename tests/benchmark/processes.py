"""The processes of the benchmark: the sink, and one for each set of plugins that imports verl and forks."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
SUPPORT: Final = HERE.parent / "support"
_FOREIGN: Final = ("OTEL_", "MLFLOW_", "WANDB_", "TRACKIO_", "VERL_")
_PATIENCE: Final = 300.0


def environment() -> dict[str, str]:
    """This process's environment without what would configure a tracer."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN)}
    inherited = [path for path in (os.environ.get("PYTHONPATH", ""),) if path]
    kept["PYTHONPATH"] = os.pathsep.join([*inherited, str(HERE), str(SUPPORT)])
    return kept


class SinkProcess:
    """An OTLP endpoint on loopback that counts and discards."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "sink.py")], stdout=subprocess.PIPE, text=True, env=environment()
        )
        port = (self._process.stdout.readline() if self._process.stdout else "").strip()
        if not port:
            raise RuntimeError("the sink did not start")
        self.endpoint = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(10)


class Zygote:
    """A process that has imported verl; each job runs in a fork of it.

    Args:
        folder: for the tokenizer, the log and what is traced.
        plugins: ``VERL_USE_EXTERNAL_PLUGINS``: ``otel_rollout``, or ``none`` to leave verl as it comes.
    """

    def __init__(self, folder: Path, plugins: str) -> None:
        reading, writing = os.pipe()
        self.log = folder / f"verl-{plugins}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "zygote.py"), str(writing), str(folder / "model")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                start_new_session=True,
                cwd=folder,
                env=environment() | {"VERL_USE_EXTERNAL_PLUGINS": plugins},
            )
        os.close(writing)
        self._results = os.fdopen(reading)
        self._ready = False

    def run(self, **job: Any) -> dict[str, Any]:
        """Do a job and return what it found.

        Raises:
            RuntimeError: it failed or took too long; the message ends with the process's last lines.
        """
        if not self._ready:
            self._ready = bool(self._answer())
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("no way to hand a job over")
        stdin.write(json.dumps(job).encode() + b"\n")
        stdin.flush()
        found = self._answer()
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def _answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self._results], [], [], _PATIENCE)
        line = self._results.readline() if ready else ""
        if not line:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"no answer within {_PATIENCE:.0f} s, or the process died; its last lines:\n{tail}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it and everything that it forked."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._results.close()

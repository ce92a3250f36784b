"""The rows of the table: each a way to trace, how it is switched on and off, and where its bytes are."""

import json
import os
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workload import DECORATED_TOOL, PLAIN_TOOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to trace.

    Attributes:
        name, shown: in ``--only`` and in the table.
        backend: what verl's switch is set to.
        plugin: whether ours is loaded into verl.
        tool: the calculator's class: verl's own trace sees a tool only if it is decorated.
        environment: set before anything is configured; ``{endpoint}`` is the sink, ``{store}`` a folder.
        stalls: whether the event loop is watched.
    """

    name: str
    shown: str
    backend: str
    plugin: bool = True
    tool: str = PLAIN_TOOL
    environment: dict[str, str] = field(default_factory=dict)
    stalls: bool = True


_OTLP = {"OTEL_EXPORTER_OTLP_ENDPOINT": "{endpoint}"}
_STORES = {"MLFLOW_TRACKING_URI": "sqlite:///{store}/mlflow.db", "TRACKIO_DIR": "{store}/trackio"}
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "WANDB_MODE": "offline"}
_SAMPLED_OUT = {"OTEL_TRACES_SAMPLER": "rollout_group", "OTEL_TRACES_SAMPLER_ARG": "0"}

ROWS = {
    row.name: row
    for row in (
        Row(name="otlp", shown="ours, otlp", backend="otlp", environment=_OTLP),
        Row(
            name="otlp_file",
            shown="ours, otlp_file",
            backend="otlp_file",
            environment={"OTEL_ROLLOUT_FILE": "{store}/spans"},
        ),
        Row(
            name="sampled_out",
            shown="ours, sampled out",
            backend="otlp",
            environment=_OTLP | _SAMPLED_OUT,
            stalls=False,
        ),
        Row(name="trace_false", shown="ours, trace=False", backend="otlp", environment=_OTLP, stalls=False),
        Row(
            name="mlflow",
            shown="verl's mlflow",
            backend="mlflow",
            plugin=False,
            tool=DECORATED_TOOL,
            environment=_STORES | _QUIET,
        ),
        Row(
            name="trackio",
            shown="verl's trackio",
            backend="trackio",
            plugin=False,
            tool=DECORATED_TOOL,
            environment=_STORES | _QUIET,
        ),
    )
}


class Ours:
    """Our tracing: off means that verl's own path runs as if we were not installed."""

    def __init__(self, row: Row, store: Path, endpoint: str) -> None:
        self.row, self.store, self.endpoint = row, store, endpoint

    def turn(self, on: bool) -> None:
        """Switch our tracing on or off."""
        from otel_rollout.frameworks.verl.switch import switch

        if self.row.name == "trace_false":
            switch.max_samples = 0
        switch.active = on

    def flush(self) -> None:
        """Wait until everything is delivered."""
        import otel_rollout

        if not otel_rollout.flush(30):
            raise TimeoutError("flush")

    def stored(self) -> int:
        """Bytes of spans that the sink took, or that lie in the file."""
        if self.row.backend == "otlp_file":
            return size_of(self.store)
        with urllib.request.urlopen(self.endpoint, timeout=10) as answer:
            return int(json.load(answer).get("/v1/traces", 0))


class Theirs:
    """What verl traces by itself."""

    def __init__(self, row: Row, store: Path, endpoint: str) -> None:
        self.row, self.store = row, store

    def turn(self, on: bool) -> None:
        """Switch verl's trace on or off."""
        from verl.utils.rollout_trace import RolloutTraceConfig

        RolloutTraceConfig.get_instance().backend = self.row.backend if on else None

    def flush(self) -> None:
        """Wait for mlflow's queue; trackio has no way to wait: until its files stop growing."""
        if self.row.backend == "mlflow":
            import mlflow

            mlflow.flush_trace_async_logging()
            return
        last, same, deadline = -1, 0, time.monotonic() + 30
        while same < 6 and time.monotonic() < deadline:
            now = size_of(self.store)
            last, same = now, same + 1 if now == last else 0
            time.sleep(0.05)

    def stored(self) -> int:
        """Bytes on disk."""
        return size_of(self.store)


def prepare(row: Row, store: Path, endpoint: str) -> Ours | Theirs:
    """Set the environment of a row, and return how it is switched."""
    store.mkdir(parents=True, exist_ok=True)
    os.environ.update({name: text.format(store=store, endpoint=endpoint) for name, text in row.environment.items()})
    kind: Any = Ours if row.plugin else Theirs
    return kind(row, store, endpoint)


def size_of(folder: Path) -> int:
    """Bytes of all files of a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).stat().st_size
            except OSError:  # it was there a moment ago
                continue
    return total

"""Which of verl's switches decides whether, and where to, a process traces."""

import os
from dataclasses import dataclass
from typing import Any

from otel_rollout import configure
from otel_rollout.binding import current_binding
from otel_rollout.exporters import EXTRAS
from otel_rollout.guard import warn_once

BACKEND_OTEL = "otel"


@dataclass(slots=True)
class Switch:
    """The state of tracing in this process.

    Attributes:
        active: rollouts are traced by us; verl's own trace is off.
        token2text: texts of prompts and responses too.
        max_samples: groups to trace per step and worker; ``None`` for all.
        requested: switched on without verl's configuration (``opentelemetry-instrument``).
    """

    active: bool = False
    token2text: bool = False
    max_samples: int | None = None
    requested: bool = False


switch = Switch()


def verl_version() -> str:
    """The installed version of verl."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("verl")
    except PackageNotFoundError:
        return "unknown"


def turn_on(
    project_name: str | None,
    experiment_name: str | None,
    backend: str | None,
    *,
    token2text: bool,
    max_samples: int | None,
) -> bool:
    """Decide from verl's trace configuration and the environment; returns whether we trace.

    ``backend`` is ``otel`` (what ``OTEL_TRACES_EXPORTER`` says) or the name of an exporter; with none,
    ``OTEL_TRACES_EXPORTER`` alone, an earlier `configure` or ``opentelemetry-instrument`` switch on as well.
    An exporter that is not there is said in one warning; verl's own trace then does what it would do without us.
    """
    switch.active = False
    if backend is None and not _wanted_otherwise():
        return False
    exporters = None if backend in (None, BACKEND_OTEL) else str(backend)
    try:
        configure(
            project_name, experiment_name, exporters=exporters, framework="verl", framework_version=verl_version()
        )
    except Exception as error:  # also what the SDK makes of a wrong OTEL_* variable
        own = "; until then verl's own rollout trace runs" if backend in EXTRAS else "; rollouts are not traced"
        warn_once(f"verl:{backend}", "actor_rollout_ref.rollout.trace.backend=%s: %s%s", backend, error, own)
        return False
    switch.active = current_binding() is not None
    switch.token2text, switch.max_samples = bool(token2text), max_samples
    return switch.active


def _wanted_otherwise() -> bool:
    if switch.requested or os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() not in ("", "none"):
        return True
    binding = current_binding()
    return binding is not None and (binding.project_name is not None or binding.framework is not None)


def trace_config(config: Any) -> dict[str, Any]:
    """Verl's trace settings out of its whole configuration, the old spelling ``trainer.rollout_trace`` included."""
    from omegaconf import OmegaConf

    def select(path: str) -> Any:
        return OmegaConf.select(config, path, default=None)

    found: dict[str, Any] = {}
    for key in ("project_name", "experiment_name", "backend", "token2text", "max_samples_per_step_per_worker"):
        value = select(f"actor_rollout_ref.rollout.trace.{key}")
        if value is None or value is False:
            old = select(f"trainer.rollout_trace.{key}")
            value = value if old is None else old
        found[key] = value
    found["project_name"] = found["project_name"] or select("trainer.project_name")
    found["experiment_name"] = found["experiment_name"] or select("trainer.experiment_name")
    return found


def turn_on_from(config: Any) -> bool:
    """`turn_on` with what verl's configuration says."""
    found = trace_config(config)
    return turn_on(
        found["project_name"],
        found["experiment_name"],
        found["backend"],
        token2text=bool(found["token2text"]),
        max_samples=found["max_samples_per_step_per_worker"],
    )

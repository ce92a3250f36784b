"""Which tracer records trajectories in this process: the one that `configure` bound, else the host's own provider."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry import trace

from otel_rollout import semconv
from otel_rollout._version import __version__
from otel_rollout.guard import guard
from otel_rollout.ids import keep_random_state
from otel_rollout.settings import Settings

StartSpan = Callable[[str, trace.Tracer, trace.SpanKind, dict[str, Any], int], trace.Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What every trajectory of this process shares.

    Attributes:
        tracer: makes the spans; its resource is the process's.
        project_name, experiment_name: identity of the training run, where known.
        framework, framework_version: who runs the rollouts, e.g. ``verl``, ``0.9.1``.
        settings: what is captured.
        start_span: set where the provider and its processors are our own: starts the spans of ops faster than the SDK,
            and lets a thread complete them after their op has ended. ``None`` with a provider of the host: its
            processors see every span start, and find it complete when its op has ended.
    """

    tracer: trace.Tracer
    project_name: str | None = None
    experiment_name: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    settings: Settings = field(default_factory=Settings.from_environment)
    start_span: StartSpan | None = None


_OFF: Final = object()
_bound: Binding | object | None = None
_ambient: tuple[trace.TracerProvider, Binding | None] | None = None
_autoconfigure: Callable[[], None] | None = None


def bind(binding: Binding | None) -> None:
    """Use this binding from now on; ``None`` switches recording off until the next call."""
    global _bound  # noqa: PLW0603  one binding a process
    _bound = _OFF if binding is None else binding


def unbind() -> None:
    """Forget `bind`: follow the global tracer provider again."""
    global _bound, _ambient  # noqa: PLW0603
    _bound = _ambient = None


def configure_on_first_use(function: Callable[[], None]) -> None:
    """Call `function` before the first record if ``OTEL_TRACES_EXPORTER`` is set and nobody configured anything."""
    global _autoconfigure  # noqa: PLW0603
    _autoconfigure = function


def current_binding() -> Binding | None:
    """The binding to record with, or ``None`` when recording is off."""
    if _bound is not None:
        return _bound if isinstance(_bound, Binding) else None
    return _ambient_binding()


def scoped_tracer(provider: trace.TracerProvider) -> trace.Tracer | None:
    """Our tracer of a provider; ``None`` where it records nothing (``OTEL_SDK_DISABLED``)."""
    tracer = provider.get_tracer(semconv.SCOPE, __version__)
    if isinstance(tracer, trace.NoOpTracer):
        return None
    keep_random_state(tracer)
    return tracer


def _ambient_binding() -> Binding | None:
    global _ambient, _autoconfigure  # noqa: PLW0603
    provider = trace.get_tracer_provider()
    if _ambient is not None and _ambient[0] is provider:
        return _ambient[1]
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        wanted = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
        if _autoconfigure is not None and wanted not in ("", "none"):
            function, _autoconfigure = _autoconfigure, None
            with guard("configure from the environment"):
                function()
            return _bound if isinstance(_bound, Binding) else None
        return None
    tracer = scoped_tracer(provider)
    _ambient = (provider, None if tracer is None else Binding(tracer=tracer))
    return _ambient[1]

"""`configure`: sets up where trajectories go, once per process, from arguments and OpenTelemetry's environment."""

import atexit
import os
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics, trace

from otel_rollout import binding as bindings
from otel_rollout import exporters as found
from otel_rollout import metrics as instruments
from otel_rollout.binding import Binding
from otel_rollout.guard import guard, logger, warn_once
from otel_rollout.idle import idle
from otel_rollout.late import late
from otel_rollout.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace.export import SpanExporter

    from otel_rollout.processor import RolloutSpanProcessor

_LENGTH_LIMITS: Final = ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")
_SHUTDOWN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """An exporter, and how to make it again where it came from a name."""

    name: str
    exporter: "SpanExporter"
    rebuild: "Callable[[], SpanExporter] | None" = None


@dataclass(slots=True)
class _Pipeline:
    """What `configure` built in this process."""

    binding: Binding | None = None
    provider: Any = None
    meter_provider: Any = None
    processors: "list[RolloutSpanProcessor]" = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    owned: bool = False


_pipeline: _Pipeline | None = None
_own_provider: trace.TracerProvider | None = None
"""The global provider, if it is of our making: it outlives `shutdown`, because a process can set only one."""
_lock: Final = threading.RLock()


def configure(
    project_name: str | None = None,
    experiment_name: str | None = None,
    *,
    exporters: "str | Sequence[str | SpanExporter] | None" = None,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    framework: str | None = None,
    framework_version: str | None = None,
) -> None:
    """Set up where trajectories go. What is not given comes from OpenTelemetry's environment; call it once per process.

    A tracer provider that the host has set is used as it is: its own exporters stay, those named here are added to it.
    Without one, this sets the global provider. Calling it again fills in what was not known before; what contradicts
    the first call is said in a warning and ignored.

    Args:
        project_name, experiment_name: the training run; become attributes of every trajectory.
        exporters: names as in ``OTEL_TRACES_EXPORTER`` (``"otlp,mlflow"``), or a list of names and exporter objects. By
            default that variable; without it ``otlp`` if an endpoint is set, else ``otlp_file``: a file, no server.
        tracer_provider, meter_provider: instead of the global ones.
        framework, framework_version: who runs the rollouts; adapters of frameworks fill this in.

    Raises:
        ExporterError: one given in `exporters` is unknown or not installed; a ``ValueError`` that names the fix.
    """
    from otel_rollout import light_span  # the SDK is slow to import

    global _pipeline  # noqa: PLW0603  one pipeline a process
    names = {
        "project_name": project_name,
        "experiment_name": experiment_name,
        "framework": framework,
        "framework_version": framework_version,
    }
    with _lock:
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            bindings.bind(None)
            return
        if _pipeline is not None:
            _extend(_pipeline, names, exporters, tracer_provider)
            return
        pipeline = _Pipeline()
        built = _build_exporters(exporters, has_host=_host_provider(tracer_provider) is not None)
        _attach_provider(pipeline, tracer_provider, built, project_name)
        _attach_metrics(pipeline, meter_provider, [one.name for one in built])
        tracer = bindings.scoped_tracer(pipeline.provider)
        start_span = light_span.start_span if pipeline.owned and pipeline.processors else None
        pipeline.binding = (
            None
            if tracer is None
            else Binding(tracer=tracer, settings=Settings.from_environment(), start_span=start_span, **names)
        )
        _pipeline = pipeline
        bindings.bind(pipeline.binding)
        instruments.bind(pipeline.meter_provider)
        idle.callback = hurry
        atexit.register(shutdown)
        _end_with_children()
        _warn_of_limits()
        if "otlp" in pipeline.names:
            threading.Thread(target=_probe, name="otel-rollout-probe", daemon=True).start()


def _end_with_children() -> None:
    """Children of multiprocessing end without ``atexit``; they run these finalizers instead."""
    from multiprocessing import parent_process, util

    if parent_process() is not None:
        util.Finalize(None, shutdown, exitpriority=0)
    util.register_after_fork(configure, lambda _: util.Finalize(None, shutdown, exitpriority=0))


def _host_provider(given: trace.TracerProvider | None) -> trace.TracerProvider | None:
    provider = given or trace.get_tracer_provider()
    if provider is _own_provider or isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider


def _build_exporters(wanted: Any, *, has_host: bool) -> list[_Built]:
    if wanted is None and has_host:
        return []
    built: list[_Built] = []
    for item in found.resolve(wanted):
        if not isinstance(item, str):
            built.append(_Built(name=type(item).__name__, exporter=item))
            continue
        try:
            built.append(_Built(name=item, exporter=found.build(item), rebuild=partial(found.build, item)))
        except found.ExporterError as error:
            if wanted is not None:
                raise
            warn_once(f"exporter:{item}", "%s (from OTEL_TRACES_EXPORTER); it is left out", error)
    return built


def _attach_provider(
    pipeline: _Pipeline,
    given: trace.TracerProvider | None,
    built: list[_Built],
    project_name: str | None,
) -> None:
    pipeline.provider = _host_provider(given)
    if pipeline.provider is None:
        pipeline.provider, pipeline.owned = _global_provider_of_ours(project_name), True
    _add_processors(pipeline, built)


def _global_provider_of_ours(project_name: str | None) -> trace.TracerProvider:
    global _own_provider  # noqa: PLW0603  as `_pipeline`
    from opentelemetry.sdk.trace import TracerProvider

    if _own_provider is None or trace.get_tracer_provider() is not _own_provider:
        _own_provider = TracerProvider(sampler=_sampler(), resource=_resource(project_name), shutdown_on_exit=False)
        trace.set_tracer_provider(_own_provider)
    return _own_provider


def _add_processors(pipeline: _Pipeline, built: list[_Built]) -> None:
    from otel_rollout.processor import RolloutSpanProcessor

    for one in built:
        processor = RolloutSpanProcessor(
            one.exporter,
            name=one.name,
            busy=_busy,
            rebuild=one.rebuild,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            **_queue_settings(),
        )
        pipeline.provider.add_span_processor(processor)
        pipeline.processors.append(processor)
        pipeline.names.append(one.name)
        path = getattr(one.exporter, "path", None)
        logger.info("otel-rollout: trajectories go to %s%s", one.name, f" ({path})" if path else "")
        if path is not None:
            _warn_of_folder(path)


@guard("look at the folder of the traces")
def _warn_of_folder(path: Any) -> None:
    there = next(folder for folder in path.parents if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        warn_once(
            f"folder:{there}",
            "%s cannot be written: trajectories would be lost; set OTEL_ROLLOUT_FILE to a folder that can",
            there,
        )


def _busy() -> bool:
    return idle.count > 0


def _queue_settings() -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, variable, convert in (
        ("delay", "OTEL_BSP_SCHEDULE_DELAY", lambda text: int(text) / 1000),
        ("max_queue_spans", "OTEL_BSP_MAX_QUEUE_SIZE", int),
        ("max_batch_spans", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", int),
    ):
        text = os.environ.get(variable, "").strip()
        if text:
            try:
                value = convert(text)
            except ValueError:
                value = 0
            if value > 0:
                settings[key] = value
            else:
                warn_once(variable, "%s=%r is not a positive whole number; the default is used", variable, text)
    return settings


def _sampler() -> Any:
    name = os.environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if name == "rollout_group":
        from otel_rollout.sampling import RolloutGroupSampler

        return RolloutGroupSampler(os.environ.get("OTEL_TRACES_SAMPLER_ARG"))
    return None


def _resource(project_name: str | None) -> Any:
    from opentelemetry.sdk.resources import Resource

    own = Resource({"host.name": socket.gethostname(), "process.pid": os.getpid()})
    stated = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return own.merge(Resource.create({} if stated else {"service.name": project_name or "otel-rollout"}))


def _attach_metrics(pipeline: _Pipeline, given: metrics.MeterProvider | None, names: list[str]) -> None:
    if given is not None or not pipeline.owned:
        pipeline.meter_provider = given
        return
    wanted = os.environ.get("OTEL_METRICS_EXPORTER", "otlp" if "otlp" in names else "none")
    readers = [reader for name in found.split_names(wanted) if (reader := _metric_reader(name)) is not None]
    if readers:
        from opentelemetry.sdk.metrics import MeterProvider

        pipeline.meter_provider = MeterProvider(readers, resource=pipeline.provider.resource, shutdown_on_exit=False)


def _metric_reader(name: str) -> Any:
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    try:
        target = found.entry_point_name(name)
        exporter = found.entry_points("opentelemetry_metrics_exporter")[target].load()()
        return exporter if isinstance(exporter, MetricReader) else PeriodicExportingMetricReader(exporter)
    except Exception as error:
        warn_once(
            f"metrics:{name}",
            "metrics exporter %r cannot be used (%s); metrics are not exported there",
            name,
            type(error).__name__,
        )
        return None


def _extend(
    pipeline: _Pipeline, names: dict[str, str | None], wanted: Any, provider: trace.TracerProvider | None
) -> None:
    if provider is not None and provider is not pipeline.provider:
        warn_once(
            "configure:provider", "configure() was called before with another tracer provider; the first one stays"
        )
    if wanted is not None:
        attached = [*pipeline.names, *(processor.exporter for processor in pipeline.processors)]
        new = [item for item in found.resolve(wanted) if item not in attached]
        _add_processors(pipeline, _build_exporters(new, has_host=False))
    if pipeline.binding is None:
        return
    for name, value in names.items():
        known = getattr(pipeline.binding, name)
        if value is not None and known is not None and value != known:
            warn_once(
                f"configure:{name}", "configure(%s=%r) comes after %s=%r: the first one stays", name, value, name, known
            )
        elif value is not None:
            changes: dict[str, Any] = {name: value}
            pipeline.binding = replace(pipeline.binding, **changes)
    bindings.bind(pipeline.binding)


def _warn_of_limits() -> None:
    for variable in _LENGTH_LIMITS:
        if os.environ.get(variable, "").strip():
            warn_once(
                variable,
                "%s is set: it cuts JSON and token strings so that they cannot be read back; unset it",
                variable,
            )


@guard("look for the OTLP endpoint")
def _probe() -> None:
    try:
        address = found.otlp_address()
    except found.ExporterError as error:
        warn_once("otlp:endpoint", "%s", error)
        return
    try:
        socket.create_connection(address, timeout=3).close()
    except OSError as error:
        warn_once(
            "otlp:endpoint",
            "nothing answers at the OTLP endpoint %s:%d (%s); rollouts go on, their spans wait and are then dropped",
            *address, error,
        )  # fmt: skip


def hurry() -> None:
    """Send what has ended soon; never waits."""
    late.hurry()
    for processor in _pipeline.processors if _pipeline is not None else ():
        processor.hurry()


def flush(timeout: float = 30.0) -> bool:
    """Wait until everything that has ended so far is delivered.

    Args:
        timeout: seconds to wait at the most.

    Returns:
        False if the time ran out first.
    """
    deadline = time.monotonic() + timeout
    done = late.flush(timeout)
    provider = _pipeline.provider if _pipeline is not None else trace.get_tracer_provider()
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is not None:
        with guard("flush"):
            done = force_flush(max(0, int((deadline - time.monotonic()) * 1000))) and done
    return done


def shutdown() -> None:
    """Deliver what is queued, for a bounded time, and stop; called at exit. A later `configure` starts anew."""
    global _pipeline
    with _lock:
        pipeline, _pipeline = _pipeline, None
        if pipeline is None:
            return
        bindings.unbind()
        idle.callback = None
        atexit.unregister(shutdown)
        for processor in pipeline.processors:
            with guard("shut down an exporter"):
                processor.shutdown()
        instruments.bind(None)
        if pipeline.owned and pipeline.meter_provider is not None:
            with guard("shut down the metrics"):
                pipeline.meter_provider.shutdown(timeout_millis=2000)

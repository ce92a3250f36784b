"""Exporters by name: found among the installed entry points, with an error that names the fix."""

import os
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoint

    from opentelemetry.sdk.trace.export import SpanExporter

GROUP: Final = "opentelemetry_traces_exporter"
OTLP_FILE: Final = "otlp_file"
EXTRAS: Final = ("mlflow", "weave", "trackio")
PROTOCOLS: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class ExporterError(ValueError):
    """An exporter cannot be had; the message is one line and names the fix."""


def names_from_environment() -> list[str]:
    """What ``OTEL_TRACES_EXPORTER`` names; without it OTLP where an endpoint is set, else a local file."""
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if wanted.strip():
        return split_names(wanted)
    return ["otlp"] if any(os.environ.get(name) for name in ENDPOINT_VARIABLES) else [OTLP_FILE]


def entry_points(group: str) -> "dict[str, EntryPoint]":
    """The installed entry points of a group, by name."""
    from importlib.metadata import entry_points as installed  # slow to import

    return {point.name: point for point in installed(group=group)}


def split_names(names: str) -> list[str]:
    """``"otlp, mlflow"`` as a list without repetitions; ``none`` is no exporter."""
    found = [name.strip().lower() for name in names.split(",")]
    return list(dict.fromkeys(name for name in found if name and name != "none"))


def protocol() -> str:
    """The OTLP protocol in force: ``http/protobuf`` unless the environment says ``grpc``."""
    return (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    ).strip()


def entry_point_name(name: str) -> str:
    """The entry point behind a name: ``otlp`` depends on the protocol.

    Raises:
        ExporterError: the protocol is unknown.
    """
    if name != "otlp":
        return name
    try:
        return PROTOCOLS[protocol()]
    except KeyError:
        raise ExporterError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol()!r} is unknown; use {' or '.join(PROTOCOLS)}"
        ) from None


def known_names() -> list[str]:
    """Every exporter name that works in this environment."""
    return sorted({"otlp", *entry_points(GROUP)})


def build(name: str) -> "SpanExporter":
    """Make the exporter of this name from the environment.

    Raises:
        ExporterError: it is unknown, not installed, or refuses its configuration.
    """
    target = entry_point_name(name)
    found = entry_points(GROUP).get(target)
    if found is None:
        raise ExporterError(_missing(name, target))
    try:
        exporter: SpanExporter = found.load()()
    except ImportError as error:
        raise ExporterError(f"exporter {name!r} is installed but cannot be imported: {error}") from error
    except Exception as error:
        raise ExporterError(f"exporter {name!r} refuses its configuration: {type(error).__name__}: {error}") from error
    return exporter


def _missing(name: str, target: str) -> str:
    if name in EXTRAS:
        return f"exporter {name!r} is not installed; run: pip install 'otel-rollout[{name}]'"
    if target == PROTOCOLS["grpc"]:
        return (
            "OTLP over gRPC is not installed; run: pip install 'otel-rollout[grpc]' "
            "(or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf)"
        )
    return f"exporter {name!r} is unknown; known here: {', '.join(known_names())}"


def otlp_address() -> tuple[str, int]:
    """Host and port that OTLP spans go to.

    Raises:
        ExporterError: the endpoint is not a URL.
    """
    fallback = "http://localhost:4317" if protocol() == "grpc" else "http://localhost:4318"
    variable, endpoint = next(((v, os.environ[v]) for v in ENDPOINT_VARIABLES if os.environ.get(v)), ("", fallback))
    parts = urlsplit(endpoint if "://" in endpoint or protocol() != "grpc" else f"http://{endpoint}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname or not port:
        raise ExporterError(f"{variable}={endpoint!r} is not a URL; write it like {fallback}")
    return parts.hostname, port


def resolve(wanted: "str | Sequence[str | SpanExporter] | None") -> list[Any]:
    """Names (or exporters) as a list; ``None`` asks the environment."""
    if wanted is None:
        return list(names_from_environment())
    if isinstance(wanted, str):
        return list(split_names(wanted))
    if not isinstance(wanted, list | tuple):
        raise ExporterError(
            f"exporters={wanted!r}: give names such as 'otlp,otlp_file', or a list of names and exporters"
        )
    found: list[Any] = []
    for item in wanted:
        if isinstance(item, str):
            found += split_names(item)
        elif callable(getattr(item, "export", None)):
            found.append(item)
        else:
            raise ExporterError(f"exporters: {item!r} is neither a name nor an exporter")
    return found

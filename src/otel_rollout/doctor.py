"""What is installed and switched on, what is wrong and its fix: the findings behind `otel-rollout doctor`."""

import contextlib
import difflib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from otel_rollout import semconv
from otel_rollout.exporters import ENDPOINT_VARIABLES, EXTRAS, GROUP, OTLP_FILE, PROTOCOLS, split_names
from otel_rollout.settings import CAPTURE_CONTENT, CAPTURE_IMAGES, CAPTURE_TOKENS, CONTENT_OFF, CONTENT_ON
from otel_rollout.tokens import MODES

Level = Literal["ok", "info", "warning", "error"]
Environ = Mapping[str, str]

SAMPLER_GROUP: Final = "opentelemetry_traces_sampler"
PLUGIN_GROUP: Final = "verl.plugins"
PLUGIN: Final = "otel_rollout.frameworks.verl"
VERL_TIMEOUT_S: Final = 120.0
MIN_TIMEOUT_S: Final = 2.0
"""The stock OTLP exporters say why they fail only when they have the time for a second attempt."""
START_ALLOWANCE_S: Final = 20.0
"""Seconds beside the test span's own that a probe may take to start Python and import its exporter."""

_PACKAGES: Final = (
    "otel-rollout",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-exporter-otlp-proto-grpc",
    "verl",
    "ray",
    "mlflow",
    "weave",
    "trackio",
)
_OTLP_BACKENDS: Final = ("jaeger", "tempo", "grafana", "phoenix", "langfuse", "signoz", "collector")
_OTLP_PACKAGES: Final = {
    "otlp_proto_http": "pip install opentelemetry-exporter-otlp-proto-http",
    "otlp_proto_grpc": 'pip install "otel-rollout[grpc]"',
}
_DEFAULT_ENDPOINTS: Final = {
    "otlp_proto_http": "http://localhost:4318/v1/traces",
    "otlp_proto_grpc": "http://localhost:4317",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the doctor has to say.

    Attributes:
        topic: the heading it belongs under.
        level: ``error`` is what makes the exit code 1; ``warning`` works, but hardly as meant.
        message: what is the case; no secret is in it.
        fix: what to do about it, where there is something to do.
    """

    topic: str
    level: Level
    message: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What decides whether and where traces go.

    Attributes:
        decided_by: the environment variable, or None where nothing in the environment switches tracing on.
        exporters: names in their order; where nothing decides, what `otel_rollout.configure` uses.
        disabled: ``OTEL_SDK_DISABLED`` or ``OTEL_TRACES_EXPORTER=none`` turns everything off.
    """

    decided_by: str | None
    exporters: tuple[str, ...]
    disabled: bool = False


def diagnose(environ: Environ, *, send: bool = True, verl: bool | None = None, timeout_s: float = 5.0) -> list[Finding]:
    """Look at everything and tell it in order.

    Args:
        environ: the environment that the rollout would have.
        send: send a real test span through each exporter.
        verl: import verl in a process of its own and look at the hooks; default: if verl is installed.
        timeout_s: seconds that each test span may take.
    """
    switch = decide(environ)
    findings = [
        *check_versions(),
        *check_switch(switch, environ),
        *check_exporters(switch, environ),
        *check_environment(switch, environ),
    ]
    if send:
        findings += send_test_spans(switch, environ, timeout_s)
    if verl if verl is not None else installed_version("verl") is not None:
        findings += [*check_plugin(environ), *ask_verl(environ)]
    return [
        Finding(
            topic=found.topic,
            level=found.level,
            message=mask(found.message, environ),
            fix=None if found.fix is None else mask(found.fix, environ),
        )
        for found in findings
    ]


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_versions() -> Iterator[Finding]:
    """Python and the packages that matter here."""
    found = {package: installed_version(package) for package in _PACKAGES}
    known = [f"{package} {number}" for package, number in found.items() if number is not None]
    yield Finding(topic="Versions", level="ok", message=" · ".join([f"Python {platform.python_version()}", *known]))
    if found["otel-rollout"] is None:
        yield Finding(
            topic="Versions",
            level="error",
            message="otel-rollout runs from its source and is not installed: its entry points are not found.",
            fix="pip install otel-rollout (or, in a checkout, pip install -e .)",
        )


def decide(environ: Environ) -> Switch:
    """Which switch of the environment decides, and what it says."""
    if _get(environ, "OTEL_SDK_DISABLED").lower() == "true":
        return Switch(decided_by="OTEL_SDK_DISABLED", exporters=(), disabled=True)
    if _get(environ, "OTEL_TRACES_EXPORTER"):
        names = tuple(split_names(_get(environ, "OTEL_TRACES_EXPORTER")))
        return Switch(decided_by="OTEL_TRACES_EXPORTER", exporters=names, disabled=not names)
    for variable in ENDPOINT_VARIABLES:
        if _get(environ, variable):
            return Switch(decided_by=variable, exporters=("otlp",))
    return Switch(decided_by=None, exporters=(OTLP_FILE,))


def check_switch(switch: Switch, environ: Environ) -> Iterator[Finding]:
    """Say what decided."""
    topic = "Switch"
    if switch.disabled:
        said = f"{switch.decided_by}={_get(environ, str(switch.decided_by))} turns tracing off, whatever else is set."
        yield Finding(topic=topic, level="info", message=said, fix=f"to trace, unset {switch.decided_by}")
    elif switch.decided_by is None:
        yield Finding(
            topic=topic,
            level="info",
            message="Nothing in the environment decides: verl traces if its config says so "
            "(actor_rollout_ref.rollout.trace.backend=...), an own loop that calls configure() writes files.",
            fix="to decide: OTEL_TRACES_EXPORTER=otlp_file, or OTEL_EXPORTER_OTLP_ENDPOINT=http://host:4318",
        )
    elif switch.decided_by in ENDPOINT_VARIABLES:
        said = (
            f"{switch.decided_by} sends what configure() traces to otlp. It does not switch verl's rollouts on: "
            "that takes trace.backend=otel in verl's config, or OTEL_TRACES_EXPORTER=otlp."
        )
        yield Finding(topic=topic, level="ok", message=said)
    else:
        said = f"{switch.decided_by} switches tracing on: {', '.join(switch.exporters)}"
        yield Finding(topic=topic, level="ok", message=said)
    value = _get(environ, "OTEL_SDK_DISABLED").lower()
    if value not in ("", "true", "false"):
        said = f"OTEL_SDK_DISABLED={value} does not turn tracing off: only the word true does."
        yield Finding(topic=topic, level="warning", message=said, fix="OTEL_SDK_DISABLED=true, or unset it")


def entry_point_name(exporter: str, environ: Environ) -> str:
    """Name under which an exporter is registered; ``otlp`` stands for one of two, by its protocol."""
    return PROTOCOLS.get(_protocol(environ), "otlp_proto_http") if exporter == "otlp" else exporter


def check_exporters(switch: Switch, environ: Environ) -> Iterator[Finding]:
    """Whether each exporter that is named can be found."""
    known = _exporters()
    for name in switch.exporters:
        registered = entry_point_name(name, environ)
        if registered in known:
            continue
        if name in EXTRAS:
            fix = f'pip install "otel-rollout[{name}]"'
        elif registered in _OTLP_PACKAGES:
            fix = _OTLP_PACKAGES[registered]
        elif name == OTLP_FILE:
            fix = "pip install otel-rollout (its entry points are not installed)"
        elif name in _OTLP_BACKENDS:
            fix = f"OTEL_TRACES_EXPORTER=otlp: {name} takes OTLP at its OTEL_EXPORTER_OTLP_ENDPOINT"
        else:
            near = difflib.get_close_matches(name, [*known, "otlp", *EXTRAS], n=1)
            known_names = ", ".join(sorted({*known, "otlp", *EXTRAS}))
            fix = f"did you mean {near[0]}? Known: {known_names}" if near else f"known exporters: {known_names}"
        yield Finding(topic="Exporters", level="error", message=f"There is no exporter named {name}.", fix=fix)


def _exporters() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def check_environment(switch: Switch, environ: Environ) -> Iterator[Finding]:
    """Every setting that cannot work, or hardly as it is meant."""
    for name in switch.exporters:
        registered = entry_point_name(name, environ)
        if registered in _DEFAULT_ENDPOINTS:
            yield from _check_endpoint(registered, environ)
        if registered == OTLP_FILE:
            yield from _check_file(environ)
    yield from _check_otlp_values(environ)
    yield from _check_sampler(environ)
    yield from _check_limits(environ)
    yield from _check_queue(environ)
    yield from _check_capture(environ)
    yield from _check_spelling(environ)


def _wrong(message: str, fix: str, level: Level = "error") -> Finding:
    return Finding(topic="Environment", level=level, message=message, fix=fix)


def endpoint(registered: str, environ: Environ) -> tuple[str, str]:
    """(variable, URL) that an OTLP exporter sends to; the variable is empty where the default holds."""
    specific, general = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
    if _get(environ, specific):
        return specific, _get(environ, specific)
    if _get(environ, general):
        base = _get(environ, general)
        return general, base if registered == "otlp_proto_grpc" else f"{base.rstrip('/')}/v1/traces"
    return "", _DEFAULT_ENDPOINTS[registered]


def _check_endpoint(registered: str, environ: Environ) -> Iterator[Finding]:
    variable, url = endpoint(registered, environ)
    if not variable:
        return
    written = _get(environ, variable)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        yield _wrong(f"{variable}={_public_url(written)} is not a URL: {error}", f"{variable}=http://host:4318")
        return
    http = registered == "otlp_proto_http"
    if parts.scheme not in ("http", "https"):
        yield _wrong(f"{variable}={_public_url(written)} has no http:// or https://.", f"{variable}=http://{written}")
        return
    if http and port == 4317:  # noqa: PLR2004  the registered port of OTLP over gRPC
        yield _wrong(
            f"{variable}={_public_url(written)}: port 4317 is for gRPC, but the protocol is http/protobuf.",
            "use port 4318, or OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
            "warning",
        )
    if not http and port == 4318:  # noqa: PLR2004  the registered port of OTLP over HTTP
        yield _wrong(
            f"{variable}={_public_url(written)}: port 4318 is for HTTP, but the protocol is grpc.",
            "use port 4317, or OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
            "warning",
        )
    if http and parts.path.endswith("/v1/traces/v1/traces"):
        yield _wrong(
            f"{variable}={_public_url(written)} already ends in /v1/traces, which is added to it once more.",
            f"{variable}={_public_url(written).rstrip('/').removesuffix('/v1/traces')}",
        )
    if http and variable.endswith("TRACES_ENDPOINT") and parts.path in ("", "/"):
        yield _wrong(
            f"{variable}={_public_url(written)} has no path, and none is added to this variable.",
            f"{variable}={_public_url(written).rstrip('/')}/v1/traces, or use OTEL_EXPORTER_OTLP_ENDPOINT",
            "warning",
        )


def _check_otlp_values(environ: Environ) -> Iterator[Finding]:
    for variable, value in _set(environ, "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        if value not in PROTOCOLS:
            yield _wrong(
                f"{variable}={value} is no protocol that Python can send.", f"{variable}=http/protobuf, or =grpc"
            )
    for variable, value in _set(environ, "OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION"):
        if value.lower() not in ("none", "gzip", "deflate"):
            yield _wrong(f"{variable}={value} is not known.", f"{variable}=gzip")
    for variable, value in _set(environ, "OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"):
        number = _float(value)
        if number is None or number <= 0:
            yield _wrong(f"{variable}={value} is not a number of seconds.", f"{variable}=10")
        elif number >= 1_000:  # noqa: PLR2004  nobody waits that long: it is meant as milliseconds
            fix = f"{variable}={number / 1000:g}"
            yield _wrong(f"{variable}={value} means seconds in Python: {number / 60:.0f} minutes.", fix, "warning")
    pairs = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_RESOURCE_ATTRIBUTES")
    for variable, value in _set(environ, *pairs):
        if not all(item.partition("=")[0].strip() and "=" in item for item in value.split(",") if item.strip()):
            fix = f"{variable}=name=value,other=value (percent-encode spaces and commas: Bearer%20...)"
            yield _wrong(f"{variable} is not a list of name=value.", fix)


def _check_sampler(environ: Environ) -> Iterator[Finding]:
    name, argument = _get(environ, "OTEL_TRACES_SAMPLER"), _get(environ, "OTEL_TRACES_SAMPLER_ARG")
    if not name:
        if argument:
            fix = "OTEL_TRACES_SAMPLER=rollout_group, or unset the argument"
            yield _wrong("OTEL_TRACES_SAMPLER_ARG is set but OTEL_TRACES_SAMPLER is not.", fix, "warning")
        return
    known = {"rollout_group", *(point.name for point in entry_points(group=SAMPLER_GROUP))}
    if name not in known:
        yield _wrong(f"There is no sampler named {name}.", f"known samplers: {', '.join(sorted(known))}")
    elif name.endswith("always_off"):
        yield _wrong(f"OTEL_TRACES_SAMPLER={name}: no trajectory is recorded.", "unset it", "warning")
    elif name == "rollout_group" and argument and not _is_group_argument(argument):
        fix = "OTEL_TRACES_SAMPLER_ARG=0.1 (a share of the groups) or =16/step (a number of them)"
        yield _wrong(f"OTEL_TRACES_SAMPLER_ARG={argument} does not fit {name}.", fix)
    elif name.endswith("traceidratio"):
        share = _float(argument) if argument else 1.0
        if share is None or not 0 <= share <= 1:
            fix = "OTEL_TRACES_SAMPLER_ARG: a share, 0 to 1"
            yield _wrong(f"OTEL_TRACES_SAMPLER_ARG={argument} does not fit {name}.", fix)
        fix = "OTEL_TRACES_SAMPLER=rollout_group keeps or drops whole groups"
        yield _wrong(f"OTEL_TRACES_SAMPLER={name} tears GRPO groups apart.", fix, "warning")


def _is_group_argument(argument: str) -> bool:
    share = _float(argument)
    return re.fullmatch(r"\d+/step", argument) is not None or (share is not None and 0 <= share <= 1)


def _check_limits(environ: Environ) -> Iterator[Finding]:
    lengths = ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT")
    for variable, value in _set(environ, *lengths):
        said = f"{variable}={value} cuts token ids and messages in the middle; what is cut cannot be read back."
        yield _wrong(said, f"unset {variable}: otel-rollout bounds what it records by itself")
    for variable, value in _set(environ, "OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"):
        number = _float(value)
        if number is None or number < 64:  # noqa: PLR2004  a generation has about 30, a root with rewards and user attributes more
            said = f"{variable}={value} drops the oldest attributes of a span without a word."
            yield _wrong(said, f"unset {variable} (the default is 128)")


def _check_queue(environ: Environ) -> Iterator[Finding]:
    names = ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE")
    for variable, value in _set(environ, *names):
        if not value.isdecimal() or int(value) == 0:
            said = f"{variable}={value} is not a positive whole number; the default is used."
            yield _wrong(said, f"unset {variable}", "warning")


def _check_capture(environ: Environ) -> Iterator[Finding]:
    content = _get(environ, CAPTURE_CONTENT)
    if content and content.upper() not in CONTENT_ON + CONTENT_OFF:
        yield _wrong(
            f"{CAPTURE_CONTENT}={content} is not understood; content is captured.",
            f"{CAPTURE_CONTENT}=NO_CONTENT, or =SPAN_ONLY",
        )
    captured = _get(environ, CAPTURE_TOKENS)
    if captured and captured.lower() not in MODES:
        yield _wrong(
            f"{CAPTURE_TOKENS}={captured} is not understood; ids are captured.",
            f"{CAPTURE_TOKENS}: one of {', '.join(MODES)}",
        )


def _check_file(environ: Environ) -> Iterator[Finding]:
    from otel_rollout.otlp_file import DEFAULT_DIRECTORY, FILE_VARIABLE

    written = _get(environ, FILE_VARIABLE) or DEFAULT_DIRECTORY
    path = Path(written).expanduser().absolute()
    directory = path.parent if path.suffix == ".jsonl" else path
    existing = next((place for place in (directory, *directory.parents) if place.exists()), Path("/"))
    if not existing.is_dir():
        yield _wrong(
            f"{existing} is a file, so {written} cannot be a directory.",
            f"{FILE_VARIABLE}: a directory, or a file ending in .jsonl",
        )
    elif not os.access(existing, os.W_OK | os.X_OK) or (path.is_file() and not os.access(path, os.W_OK)):
        yield _wrong(f"{existing} cannot be written by this user.", f"{FILE_VARIABLE}: a directory that can")


def _check_spelling(environ: Environ) -> Iterator[Finding]:
    import opentelemetry.environment_variables as api_names
    import opentelemetry.sdk.environment_variables as sdk_names

    known = {name for module in (api_names, sdk_names) for name in vars(module) if name.startswith("OTEL_")}
    known |= {CAPTURE_CONTENT, CAPTURE_TOKENS, CAPTURE_IMAGES, "OTEL_ROLLOUT_FILE"}
    for variable in environ:
        if variable.startswith("OTEL_") and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.94)
            if near:
                yield _wrong(
                    f"{variable} is not a variable that anything reads.", f"did you mean {near[0]}?", "warning"
                )


def send_test_spans(switch: Switch, environ: Environ, timeout_s: float) -> list[Finding]:
    """Send a real span through each exporter that can be found, each in a process of its own with a time limit."""
    known = _exporters()
    names = [name for name in switch.exporters if entry_point_name(name, environ) in known]
    if not names:
        return []
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: _send(name, environ, timeout_s), names))


def _send(name: str, environ: Environ, timeout_s: float) -> Finding:
    registered = entry_point_name(name, environ)
    place = _public_url(endpoint(registered, environ)[1]) if registered in _DEFAULT_ENDPOINTS else ""
    label = f"{name} → {place}" if place else name
    child_environ = {**environ, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": f"{max(timeout_s, MIN_TIMEOUT_S):g}"}
    code = "from otel_rollout.doctor import probe; probe()"
    answer = _run([code, registered], child_environ, timeout_s + START_ALLOWANCE_S)
    topic = "Exporters"
    if answer is None:
        said = f"{label}: no answer, ended after {timeout_s + START_ALLOWANCE_S:g} s"
        return Finding(topic=topic, level="error", message=said, fix=_TIMEOUT_FIX)
    if isinstance(answer, str):
        return Finding(
            topic=topic, level="error", message=f"{label}: cannot be started: {answer}", fix="see the message"
        )
    if answer["delivered"]:
        written = f" ({answer['file']})" if answer.get("file") else ""
        said = f"{label}: test span delivered in {answer['seconds']:.2f} s{written}"
        return Finding(topic=topic, level="ok", message=said)
    reason, fix = explain(answer["said"])
    return Finding(topic=topic, level="error", message=f"{label}: {reason}", fix=fix)


def _run(arguments: list[str], environ: Environ, timeout_s: float) -> dict[str, Any] | str | None:
    """What a child process answered; a text if it failed before it could, None if it took too long."""
    command = [sys.executable, "-c", *arguments]
    try:
        done = subprocess.run(  # noqa: S603  our own interpreter and code
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_ANSWER):
            found = json.loads(line.removeprefix(_ANSWER))
            return found if isinstance(found, dict) else str(found)
    last = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return last[-1].strip() if last else f"the process ended with code {done.returncode}"


_ANSWER: Final = "otel-rollout-doctor: "
_TIMEOUT_FIX: Final = "is the backend overloaded, or does a firewall swallow packets? Try a longer --timeout"


def probe() -> None:
    """Send one test span through the exporter in ``sys.argv[1]`` and print the answer; runs in a child process."""
    said: list[str] = []
    _record_logs(said)
    started = time.monotonic()
    answer: dict[str, Any] = {"delivered": False, "said": said}
    try:
        exporter = _exporters()[sys.argv[1]].load()()
        own_file = _own_file(exporter)
        started = time.monotonic()
        result = exporter.export([_test_span()])
        exporter.force_flush(5_000)
        exporter.shutdown()
        answer["delivered"] = result.name == "SUCCESS"
        answer["file"] = _clean_up(*own_file) if own_file else None
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    answer["seconds"] = time.monotonic() - started
    print(_ANSWER + json.dumps(answer), flush=True)  # noqa: T201  the answer to the parent process
    # Threads of a vendor's client may never end.
    os._exit(0)


def _record_logs(said: list[str]) -> None:
    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(Exception):
                said.append(record.getMessage())

    logging.getLogger().addHandler(Recorder(logging.WARNING))


def _test_span() -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    memory = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    attributes = {semconv.SPAN_KIND: semconv.KIND_CHAIN, semconv.OUTPUT_VALUE: '"otel-rollout doctor was here"'}
    provider.get_tracer(semconv.SCOPE).start_span("otel-rollout doctor", attributes=attributes).end()
    return memory.get_finished_spans()[0]


def _own_file(exporter: Any) -> tuple[Path, bool, list[Path]] | None:
    from otel_rollout.otlp_file import OTLPFileSpanExporter

    if not isinstance(exporter, OTLPFileSpanExporter):
        return None
    return exporter.path, exporter.path.exists(), [place for place in exporter.path.parents if not place.exists()]


def _clean_up(path: Path, existed: bool, made: list[Path]) -> str:
    """Remove what only the test span made; a file that was there keeps its extra line."""
    if not existed:
        with contextlib.suppress(OSError):
            path.unlink()
            for directory in made:
                directory.rmdir()
    return str(path if existed else path.parent)


_EXPLANATIONS: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), reason, fix)
    for pattern, reason, fix in (
        (
            r"\b401\b|UNAUTHENTICATED",
            "the backend does not know who sends (401)",
            "OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20<token>, or what your backend documents",
        ),
        (
            r"\b403\b|PERMISSION_DENIED",
            "the backend forbids it (403)",
            "check the token's rights and the project it is for",
        ),
        (
            r"\b404\b|UNIMPLEMENTED",
            "the server answers, but takes no traces at this path (404)",
            "OTEL_EXPORTER_OTLP_ENDPOINT is the base URL (/v1/traces is added); is this the OTLP port?",
        ),
        (r"\b(405|415)\b", "the server does not take OTLP at this path", "is this the OTLP port of the backend?"),
        (r"\b(413|RESOURCE_EXHAUSTED)\b", "the backend finds the request too large", "raise its request size limit"),
        (
            r"Expected SETTINGS frame|Failed parsing HTTP/2",
            "the server speaks HTTP/1, not gRPC",
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, or the gRPC port (4317)",
        ),
        (
            r"BadStatusLine|InvalidHeader|Connection aborted|RemoteDisconnected|Connection reset",
            "the server closes the connection: it does not speak HTTP (gRPC port?)",
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc, or the HTTP port (4318)",
        ),
        (
            r"WRONG_VERSION_NUMBER|packet length too long",
            "the server does not speak TLS",
            "write http:// instead of https://",
        ),
        (
            r"CERTIFICATE_VERIFY_FAILED|certificate verify failed",
            "the server's certificate is not trusted",
            "OTEL_EXPORTER_OTLP_CERTIFICATE=/path/to/ca.pem",
        ),
        (
            r"Name or service not known|NameResolution|getaddrinfo|DNS resolution failed|Name resolution",
            "the host name is not known",
            "check the host in OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
        (
            r"Connection refused",
            "connection refused: nothing listens there",
            "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
        (
            r"No connection adapters|Invalid URL|MissingSchema",
            "the endpoint is not a URL",
            "begin it with http:// or https://",
        ),
        (r"Network is unreachable|No route to host", "the host cannot be reached", "check the address and the network"),
        (
            r"\b(429|502|503|504)\b|Service Unavailable|Too Many Requests|Bad Gateway",
            "the server answers, but is not ready to take traces",
            "look at the backend's own log",
        ),
        (r"timed out|DEADLINE_EXCEEDED|due to timeout", "no answer in time", _TIMEOUT_FIX),
        (r"cannot be written", "the file cannot be written", "OTEL_ROLLOUT_FILE: a directory that this user can write"),
    )
)


def explain(said: Iterable[str]) -> tuple[str, str]:
    """(reason, fix) for what an exporter logged while it failed; its own words where they are not known."""
    text = " | ".join(said)
    for pattern, reason, fix in _EXPLANATIONS:
        if pattern.search(text):
            return reason, fix
    return (text[:300] or "it failed without a word"), "see the exporter's documentation"


def check_plugin(environ: Environ) -> Iterator[Finding]:
    """Whether verl would load our plugin."""
    topic = "verl"
    ours = [point for point in entry_points(group=PLUGIN_GROUP) if point.value.partition(":")[0] == PLUGIN]
    modules = [name for name in _get(environ, "VERL_USE_EXTERNAL_MODULES").split(",") if name]
    policy = _get(environ, "VERL_USE_EXTERNAL_PLUGINS") or "auto"
    if any(name != name.strip() for name in modules):
        said = "VERL_USE_EXTERNAL_MODULES has a blank in it, and verl looks for a module of that very name."
        yield Finding(
            topic=topic,
            level="error",
            message=said,
            fix=f"VERL_USE_EXTERNAL_MODULES={','.join(map(str.strip, modules))}",
        )
    if PLUGIN in modules:
        yield Finding(topic=topic, level="ok", message=f"VERL_USE_EXTERNAL_MODULES loads {PLUGIN}.")
        return
    if not ours:
        said = f"The entry point of otel-rollout in {PLUGIN_GROUP} is not installed: verl does not load it."
        fix = f"pip install otel-rollout, or VERL_USE_EXTERNAL_MODULES={PLUGIN}"
        yield Finding(topic=topic, level="error", message=said, fix=fix)
        return
    allowed = {name.strip() for name in policy.lower().split(",")}
    if policy.lower() != "auto" and not allowed & {point.name for point in ours}:
        said = f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading otel-rollout."
        fix = f"unset it, or VERL_USE_EXTERNAL_PLUGINS={ours[0].name}"
        yield Finding(topic=topic, level="error", message=said, fix=fix)
        return
    yield Finding(
        topic=topic, level="ok", message=f"The entry point {ours[0].name} in {PLUGIN_GROUP} is installed and allowed."
    )


_ASK_VERL: Final = f"""
import json, sys
import verl
loaded = "{PLUGIN}" in sys.modules
from {PLUGIN} import status
print({_ANSWER!r} + json.dumps({{**status(load=True), "loaded": loaded}}, default=str), flush=True)
"""


def ask_verl(environ: Environ) -> Iterator[Finding]:
    """Import verl in a process of its own and say what our adapter reports about its hooks."""
    topic = "verl"
    answer = _run([_ASK_VERL], environ, VERL_TIMEOUT_S)
    if answer is None:
        said = f"import verl did not end within {VERL_TIMEOUT_S:g} s."
        yield Finding(
            topic=topic, level="error", message=said, fix="run `python -c 'import verl'` and look where it hangs"
        )
        return
    if isinstance(answer, str):
        fix = f"run `python -c 'import verl, {PLUGIN}'` for the whole trace"
        yield Finding(topic=topic, level="error", message=f"verl cannot be imported with the plugin: {answer}", fix=fix)
        return
    name = f"verl {answer.get('verl_version') or installed_version('verl')}"
    missing = [str(hook) for hook in answer.get("missing") or ()]
    applied = answer.get("applied") or ()
    if not answer.get("loaded"):
        said = f"{name}: import verl does not load the plugin; rollouts are not traced."
        fix = f"see above, or run `python -c 'import {PLUGIN}'`: verl does not show why a plugin fails"
        yield Finding(topic=topic, level="error", message=said, fix=fix)
    elif applied or not missing:
        yield Finding(topic=topic, level="ok", message=f"{name} loads the plugin: {len(applied)} hooks are in place.")
    if missing:
        said = f"{name}: not found, so what it does is not recorded: {', '.join(missing)}"
        fix = "pip install 'otel-rollout[verl]' installs a version that works, with what it needs"
        yield Finding(topic=topic, level="warning" if applied else "error", message=said, fix=fix)


_SECRET_NAME: Final = re.compile(r"KEY|TOKEN(?!S\b)|SECRET|PASSWORD|HEADERS|CREDENTIAL", re.IGNORECASE)
_MASK: Final = "***"


def mask(text: str, environ: Environ) -> str:
    """The text without URL credentials and the values of variables that look secret (key, token, password, headers)."""
    for variable, value in environ.items():
        if _SECRET_NAME.search(variable):
            parts = [item.partition("=")[2] for item in value.split(",")] if "HEADERS" in variable.upper() else [value]
            for secret in (part.strip() for part in parts):
                # The longest first: the others are parts of it.
                for form in (secret, unquote(secret), unquote(secret).rpartition(" ")[2]):
                    if len(form) > _SHORT:
                        text = text.replace(form, _MASK)
    return _URL_CREDENTIALS.sub(rf"\1{_MASK}@", text)


_SHORT: Final = 3
_URL_CREDENTIALS: Final = re.compile(r"(https?://)[^/@\s]+@")


def _public_url(url: str) -> str:
    """The URL without user, password, query and fragment, where API keys travel."""
    plain = _URL_CREDENTIALS.sub(rf"\1{_MASK}@", url)
    return re.sub(r"[?#].*", f"?{_MASK}", plain)


def _protocol(environ: Environ) -> str:
    return (
        _get(environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or _get(environ, "OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )


def _get(environ: Environ, variable: str) -> str:
    return environ.get(variable, "").strip()


def _set(environ: Environ, *variables: str) -> Iterator[tuple[str, str]]:
    return ((variable, _get(environ, variable)) for variable in variables if _get(environ, variable))


def _float(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None

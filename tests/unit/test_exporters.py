"""exporters.py: which exporters the environment asks for, and what is said where one cannot be had."""

from importlib.metadata import EntryPoint

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_rollout import exporters
from otel_rollout.exporters import ExporterError, build, known_names, names_from_environment, otlp_address, resolve


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["otlp_file"]),
        ({"OTEL_TRACES_EXPORTER": ""}, ["otlp_file"]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": " OTLP , otlp_file,otlp,"}, ["otlp", "otlp_file"]),
        ({"OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_TRACES_EXPORTER": "none,otlp"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_TRACES_EXPORTER": "otlp_file"}, ["otlp_file"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, ["otlp_file"]),
    ],
)
def test_what_the_environment_asks_for(monkeypatch, environ, names):
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert names_from_environment() == resolve(None) == names


def test_names_and_objects_can_be_given():
    thing = InMemorySpanExporter()
    assert resolve("otlp, otlp_file") == ["otlp", "otlp_file"]
    assert resolve(["otlp", thing]) == ["otlp", thing]
    assert resolve(["OTLP_FILE "]) == ["otlp_file"]
    assert resolve([]) == []


@pytest.mark.parametrize("wrong", [5, [5], {"otlp": 1}])
def test_what_is_no_exporter_is_said_at_once(wrong):
    with pytest.raises(ExporterError, match="exporter"):
        resolve(wrong)


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        (None, "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
        ("http/protobuf", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
        ("grpc", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"),
    ],
)
@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_otlp_speaks_http_protobuf_unless_told_otherwise(monkeypatch, variable, protocol, kind):
    if protocol is not None:
        monkeypatch.setenv(variable, protocol)
    exporter = build("otlp")
    try:
        assert type(exporter).__module__.startswith(kind)
    finally:
        exporter.shutdown()


def test_an_unknown_protocol_names_the_known_ones(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ExporterError, match="http/json") as caught:
        build("otlp")
    assert "http/protobuf or grpc" in str(caught.value)


def test_an_unknown_name_names_the_known_ones():
    with pytest.raises(ValueError, match="'nowhere' is unknown") as caught:
        build("nowhere")
    assert type(caught.value) is ExporterError
    assert {"otlp", "otlp_file", "console"} <= set(str(caught.value).split(": ")[1].replace(",", "").split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mlflow", "weave", "trackio"])
def test_a_missing_extra_names_the_command(monkeypatch, name):
    monkeypatch.setattr(exporters, "entry_points", lambda group: {})
    with pytest.raises(ExporterError) as caught:
        build(name)
    assert f"pip install 'otel-rollout[{name}]'" in str(caught.value)


def test_grpc_without_its_extra_names_the_command(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    real = exporters.entry_points
    monkeypatch.setattr(
        exporters, "entry_points", lambda group: {k: v for k, v in real(group).items() if "grpc" not in k}
    )
    with pytest.raises(ExporterError) as caught:
        build("otlp")
    assert "pip install 'otel-rollout[grpc]'" in str(caught.value)
    assert "http/protobuf" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("otel_rollout_no_such_module:X", "cannot be imported"),
        ("decimal:Decimal.from_float", "refuses its configuration"),
    ],
)
def test_an_exporter_that_cannot_be_built_says_why(monkeypatch, target, said):
    point = EntryPoint("broken", target, exporters.GROUP)
    monkeypatch.setattr(exporters, "entry_points", lambda group: {"broken": point})
    with pytest.raises(ExporterError, match=said) as caught:
        build("broken")
    assert "'broken'" in str(caught.value)


def test_known_names_work_here():
    assert {"otlp", "otlp_file", "otlp_proto_http"} <= set(known_names())
    assert known_names() == sorted(known_names())


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, ("localhost", 4318)),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ("localhost", 4317)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://10.0.0.1:9999"}, ("10.0.0.1", 9999)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://api.example.com/otlp"}, ("api.example.com", 443)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, ("h", 80)),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:2/v1/traces"},
            ("t", 2),
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ("collector", 4317)),
    ],
)
def test_the_address_that_spans_go_to(monkeypatch, environ, address):
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert otlp_address() == address


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://", "http://h:port", "ftp://h", "h"])
def test_an_endpoint_that_is_no_url_is_named_with_the_fix(monkeypatch, endpoint):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with pytest.raises(ExporterError) as caught:
        otlp_address()
    assert f"OTEL_EXPORTER_OTLP_ENDPOINT={endpoint!r}" in str(caught.value)
    assert "http://localhost:4318" in str(caught.value)

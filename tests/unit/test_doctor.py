import contextlib
import http.server
import json
import os
import socket
import sys
import threading
import time
from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from otel_rollout import doctor
from otel_rollout.cli import main
from otel_rollout.doctor import Finding, Switch, check_environment, check_exporters, check_plugin, decide, explain, mask


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("OTEL_", "VERL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def inherited(**settings):
    return {**os.environ, **settings}


@contextlib.contextmanager
def backend(code, delay=0.0):
    received = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"])), self.headers))
            time.sleep(delay)
            with contextlib.suppress(OSError):
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def grpc_backend():
    received = []

    class Service(TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802
            received.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        server.stop(None).wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sent(timeout=5.0, **settings):
    environ = inherited(**settings)
    (finding,) = doctor.send_test_spans(decide(environ), environ, timeout)
    return finding


def test_a_real_span_is_delivered():
    with backend(200) as (url, received):
        finding = sent(OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert finding.level == "ok"
    assert f"otlp → {url}/v1/traces: test span delivered" in finding.message
    ((path, body, _),) = received
    assert path == "/v1/traces"
    (span,) = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert span.name == "otel-rollout doctor"


def test_over_grpc_too():
    with grpc_backend() as (url, received):
        finding = sent(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
        wrong_protocol = sent(OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert finding.level == "ok"
    assert len(received) == 1
    assert wrong_protocol.level == "error"
    assert "does not speak HTTP" in wrong_protocol.message
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=grpc" in wrong_protocol.fix


@pytest.mark.parametrize(
    ("code", "reason", "fix"),
    [
        (401, "does not know who sends (401)", "OTEL_EXPORTER_OTLP_HEADERS"),
        (403, "forbids it (403)", "rights"),
        (404, "takes no traces at this path (404)", "base URL"),
        (503, "not ready", "backend's own log"),
    ],
)
def test_a_refusal_is_told_with_its_fix(code, reason, fix):
    with backend(code) as (url, received):
        finding = sent(2.0, OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert received
    assert finding.level == "error"
    assert reason in finding.message
    assert fix in finding.fix


def test_nobody_there():
    finding = sent(2.0, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert finding.level == "error"
    assert "connection refused" in finding.message


def test_a_backend_that_hangs_is_a_time_out():
    with backend(200, delay=4) as (url, _):
        started = time.monotonic()
        finding = sent(2.0, OTEL_EXPORTER_OTLP_ENDPOINT=url)
        took = time.monotonic() - started
    assert finding.level == "error"
    assert "no answer in time" in finding.message
    assert took < 4 + doctor.START_ALLOWANCE_S


def test_http_where_grpc_was_meant():
    with backend(200) as (url, _):
        finding = sent(2.0, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert "speaks HTTP/1, not gRPC" in finding.message
    assert "http/protobuf" in finding.fix


def test_several_exporters_are_each_told(tmp_path):
    with backend(200) as (url, _):
        environ = inherited(OTEL_TRACES_EXPORTER="otlp,otlp_file", OTEL_EXPORTER_OTLP_ENDPOINT=url)
        findings = doctor.send_test_spans(decide(environ), environ, 5.0)
    assert [finding.level for finding in findings] == ["ok", "ok"]
    assert findings[1].message.startswith("otlp_file: ")
    assert list(tmp_path.iterdir()) == []  # the test leaves no file behind


def test_a_probe_that_never_answers_is_ended(monkeypatch):
    monkeypatch.setattr(doctor, "START_ALLOWANCE_S", 0.0)
    assert doctor._run(["import time; time.sleep(30)"], inherited(), 0.3) is None
    assert doctor._run(["raise SystemExit(3)"], inherited(), 20) == "the process ended with code 3"
    assert doctor._run(["import nowhere_at_all"], inherited(), 20).startswith("ModuleNotFoundError")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Switch(decided_by=None, exporters=("otlp_file",))),
        ({"OTEL_TRACES_EXPORTER": " "}, Switch(decided_by=None, exporters=("otlp_file",))),
        (
            {"OTEL_TRACES_EXPORTER": "otlp, mlflow,otlp"},
            Switch(decided_by="OTEL_TRACES_EXPORTER", exporters=("otlp", "mlflow")),
        ),
        ({"OTEL_TRACES_EXPORTER": "none"}, Switch(decided_by="OTEL_TRACES_EXPORTER", exporters=(), disabled=True)),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"},
            Switch(decided_by="OTEL_EXPORTER_OTLP_ENDPOINT", exporters=("otlp",)),
        ),
        (
            {"OTEL_SDK_DISABLED": "True", "OTEL_TRACES_EXPORTER": "otlp"},
            Switch(decided_by="OTEL_SDK_DISABLED", exporters=(), disabled=True),
        ),
        ({"OTEL_SDK_DISABLED": "1"}, Switch(decided_by=None, exporters=("otlp_file",))),
    ],
)
def test_which_switch_decides(environ, expected):
    assert decide(environ) == expected


def test_the_switch_is_told():
    def say(environ):
        return [(found.level, found.message, found.fix) for found in doctor.check_switch(decide(environ), environ)]

    assert say({"OTEL_TRACES_EXPORTER": "otlp"}) == [("ok", "OTEL_TRACES_EXPORTER switches tracing on: otlp", None)]
    ((level, message, fix),) = say({"OTEL_SDK_DISABLED": "true"})
    assert (level, fix) == ("info", "to trace, unset OTEL_SDK_DISABLED")
    assert "turns tracing off" in message
    assert "trace.backend" in say({})[0][1]
    assert say({"OTEL_SDK_DISABLED": "1"})[1][0] == "warning"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("otlp_fiel", "did you mean otlp_file?"),
        ("qqqqqqqq", "known exporters: console, "),
        ("jaeger", "OTEL_TRACES_EXPORTER=otlp"),
    ],
)
def test_an_unknown_exporter_names_the_fix(name, fix):
    (finding,) = check_exporters(Switch(decided_by="OTEL_TRACES_EXPORTER", exporters=(name,)), {})
    assert finding.level == "error"
    assert name in finding.message
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("name", "environ", "fix"),
    [
        ("mlflow", {}, 'pip install "otel-rollout[mlflow]"'),
        ("weave", {}, 'pip install "otel-rollout[weave]"'),
        ("otlp", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, 'pip install "otel-rollout[grpc]"'),
        ("otlp_file", {}, "pip install otel-rollout"),
    ],
)
def test_a_missing_package_names_the_command(monkeypatch, name, environ, fix):
    monkeypatch.setattr(doctor, "_exporters", dict)
    (finding,) = check_exporters(Switch(decided_by="x", exporters=(name,)), environ)
    assert fix in finding.fix


def environment(**environ):
    return list(check_environment(decide(environ), environ))


@pytest.mark.parametrize(
    ("environ", "level", "said", "fix"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, "error", "has no http://", "=http://localhost:4318"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:x"}, "error", "is not a URL", "http://host:4318"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317"}, "warning", "4317 is for gRPC", "4318"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "warning",
            "4318 is for HTTP",
            "4317",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318/v1/traces"},
            "error",
            "added to it once more",
            "=http://h:4318",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318"}, "warning", "has no path", "=http://h:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http"}, "error", "no protocol", "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "error", "is not known", "gzip"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}, "error", "not a number of seconds", "=10"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10000"}, "warning", "167 minutes", "=10"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "Bearer abc"}, "error", "not a list of name=value", "Bearer%20"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a"}, "error", "not a list of name=value", "name=value"),
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "error", "no sampler named sometimes", "rollout_group"),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, "warning", "no trajectory is recorded", "unset"),
        (
            {"OTEL_TRACES_SAMPLER": "rollout_group", "OTEL_TRACES_SAMPLER_ARG": "half"},
            "error",
            "does not fit",
            "16/step",
        ),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
            "warning",
            "tears GRPO",
            "rollout_group",
        ),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.5"}, "warning", "OTEL_TRACES_SAMPLER is not", "rollout_group"),
        ({"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "4096"}, "error", "cuts token ids", "unset"),
        ({"OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "4096"}, "error", "cuts token ids", "unset"),
        ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "32"}, "error", "drops the oldest", "128"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "warning", "positive whole number", "unset"),
        ({"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "yes"}, "error", "is not understood", "NO_CONTENT"),
        ({"OTEL_ROLLOUT_TOKENS": "all"}, "error", "is not understood", "none, counts, ids, full"),
        (
            {"OTEL_ROLLOUT_FILE": "/proc/version/x", "OTEL_TRACES_EXPORTER": "otlp_file"},
            "error",
            "is a file",
            "ending in .jsonl",
        ),
        ({"OTEL_TRACE_EXPORTER": "otlp"}, "warning", "anything reads", "OTEL_TRACES_EXPORTER?"),
    ],
)
def test_each_misconfiguration_is_told_with_its_fix(environ, level, said, fix):
    (finding,) = environment(**environ)
    assert (finding.topic, finding.level) == ("Environment", level)
    assert said in finding.message
    assert fix in finding.fix


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://api.example.com/otlp", "OTEL_EXPORTER_OTLP_HEADERS": "a=b,c=d%20e"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_TRACES_SAMPLER": "rollout_group", "OTEL_TRACES_SAMPLER_ARG": "16/step"},
        {"OTEL_TRACES_SAMPLER": "rollout_group", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
        {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
        {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "128", "OTEL_BSP_SCHEDULE_DELAY": "1000"},
        {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "no_content", "OTEL_ROLLOUT_TOKENS": "full"},
        {"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h", "OTEL_ROLLOUT_IMAGES": "1"},
    ],
)
def test_what_is_right_is_passed_over(environ):
    assert environment(**environ) == []


def test_no_secret_is_printed():
    environ = {
        "WANDB_API_KEY": "k-1234567",
        "MLFLOW_TRACKING_PASSWORD": "pass-word",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20s3cr3t,x-scope=1",
        "OTEL_ROLLOUT_TOKENS": "counts",
    }
    text = "k-1234567 pass-word Bearer s3cr3t Bearer%20s3cr3t token s3cr3t counts https://me:pw@host/x?api_key=1"
    assert mask(text, environ) == "*** *** *** *** token *** counts https://***@host/x?api_key=1"
    assert doctor._public_url("https://u:p@h/x?api_key=1") == "https://***@h/x?***"


def test_secrets_of_the_environment_stay_out_of_the_whole_report():
    with backend(401) as (url, received):
        environ = inherited(
            OTEL_EXPORTER_OTLP_ENDPOINT=url.replace("http://", "http://user:hunter22@"),
            OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20s3cr3tvalue",
        )
        findings = doctor.diagnose(environ, verl=False, timeout_s=2.0)
    assert received[0][2]["authorization"].startswith(("Bearer", "Basic"))
    said = json.dumps([[found.message, found.fix] for found in findings])
    assert "401" in said
    assert "s3cr3tvalue" not in said
    assert "hunter22" not in said


def test_what_is_not_known_is_told_in_the_exporters_own_words():
    assert explain(["the moon is full"]) == ("the moon is full", "see the exporter's documentation")
    assert explain([])[0] == "it failed without a word"


def plugin(monkeypatch, *values):
    from importlib.metadata import EntryPoint

    points = [EntryPoint(name="otel_rollout", value=value, group="verl.plugins") for value in values]
    monkeypatch.setattr(doctor, "entry_points", lambda group: points)


OURS = "otel_rollout.frameworks.verl"


@pytest.mark.parametrize(
    ("installed", "environ", "level", "said"),
    [
        ([OURS], {}, "ok", "installed and allowed"),
        ([OURS], {"VERL_USE_EXTERNAL_PLUGINS": "other, OTEL_ROLLOUT"}, "ok", "installed and allowed"),
        ([OURS], {"VERL_USE_EXTERNAL_PLUGINS": "none"}, "error", "keeps verl from loading"),
        ([OURS], {"VERL_USE_EXTERNAL_PLUGINS": "other"}, "error", "keeps verl from loading"),
        (["other.plugin"], {}, "error", "is not installed"),
        ([], {"VERL_USE_EXTERNAL_MODULES": OURS}, "ok", "loads otel_rollout.frameworks.verl"),
        ([OURS], {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": f"x,{OURS}"}, "ok", "loads"),
    ],
)
def test_whether_verl_loads_the_plugin(monkeypatch, installed, environ, level, said):
    plugin(monkeypatch, *installed)
    (finding,) = check_plugin(environ)
    assert (finding.topic, finding.level) == ("verl", level)
    assert said in finding.message
    assert level == "ok" or finding.fix


def test_a_blank_in_the_modules_of_verl_is_told(monkeypatch):
    plugin(monkeypatch, OURS)
    first, _ = check_plugin({"VERL_USE_EXTERNAL_MODULES": f"x, {OURS}"})
    assert first.fix == f"VERL_USE_EXTERNAL_MODULES=x,{OURS}"


@pytest.mark.parametrize(
    ("answer", "levels", "said"),
    [
        (
            {"loaded": True, "applied": ["a", "b"], "missing": [], "verl_version": "0.9.1"},
            ["ok"],
            "0.9.1 loads the plugin: 2 hooks",
        ),
        ({"loaded": True, "applied": ["a"], "missing": ["ToolAgentLoop.run"]}, ["ok", "warning"], "ToolAgentLoop.run"),
        (
            {"loaded": True, "applied": [], "missing": ["everything"], "verl_version": "0.4"},
            ["error"],
            "verl 0.4: not found",
        ),
        ({"loaded": False, "applied": ["a"], "missing": []}, ["error"], "does not load the plugin"),
        ("ImportError: no torch", ["error"], "cannot be imported with the plugin: ImportError: no torch"),
        (None, ["error"], "did not end"),
    ],
)
def test_what_the_adapter_reports(monkeypatch, answer, levels, said):
    monkeypatch.setattr(doctor, "_run", lambda *_: answer)
    found = list(doctor.ask_verl({}))
    assert [finding.level for finding in found] == levels
    assert any(said in finding.message for finding in found)


def test_versions_are_told():
    first, *rest = doctor.check_versions()
    assert f"Python {sys.version.split()[0]}" in first.message
    assert "opentelemetry-sdk 1." in first.message
    assert all(isinstance(finding, Finding) for finding in rest)


def test_the_command_ends_with_0_when_all_is_well(monkeypatch):
    with backend(200) as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        result = CliRunner().invoke(main, ["doctor", "--no-verl"])
    assert result.exit_code == 0, result.output
    assert len(received) == 1
    assert "All is well." in result.output
    assert "OTEL_EXPORTER_OTLP_ENDPOINT sends what configure() traces to otlp" in result.output


def test_the_command_ends_with_1_when_something_is_wrong(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = CliRunner().invoke(main, ["doctor", "--no-verl", "--no-send", "--exporter", "otlp_fiel,otlp_file"])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "✗ There is no exporter named otlp_fiel." in said
    assert "fix: did you mean otlp_file?" in said
    assert "1 thing wrong" in result.output


def test_the_command_speaks_json():
    result = CliRunner().invoke(main, ["doctor", "--no-verl", "--no-send", "--json", "--exporter", "qqqqqqqq"])
    report = json.loads(result.output)
    assert result.exit_code == 1
    assert report["ok"] is False
    assert {"topic", "level", "message", "fix"} == set(report["findings"][0])

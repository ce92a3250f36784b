"""pipeline.py: configure() from arguments and environment, and everything that may go wrong at the start or the end."""

import gzip
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_rollout import configure, exporters, flush, pipeline, rollout_trace_attr, rollout_trace_op
from otel_rollout.binding import current_binding
from otel_rollout.late import late


@rollout_trace_op(name="op")
def op(x=None):
    return x


def rollout(**given):
    with rollout_trace_attr(**given) as trajectory:
        op()
    return trajectory


def names(exporter):
    return [span.name for span in exporter.get_finished_spans()]


@pytest.fixture
def memory():
    return InMemorySpanExporter()


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(directory):
    """The traces in the files; one may stand on several lines."""
    return set(re.findall(r'"traceId":"([0-9a-f]{32})"', "".join(text_of(directory))))


def text_of(directory):
    return [file.read_text() for file in directory.glob("**/*.jsonl")]


# What decides


def test_nothing_said_means_a_local_file(tmp_path):
    configure()
    rollout()
    assert flush(10)
    assert pipeline._pipeline.names == ["otlp_file"]
    assert len(written(tmp_path / "otel-rollout")) == 1


def test_the_environment_decides(monkeypatch, tmp_path):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp_file")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_ROLLOUT_FILE", str(tmp_path / "mine"))
    configure()
    rollout()
    assert flush(10)
    assert pipeline._pipeline.names == ["otlp_file"]
    assert written(tmp_path / "mine")


def test_no_configure_at_all_but_an_exporter_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp_file")
    rollout()
    assert flush(10)
    assert written(tmp_path)


def test_none_means_no_exporter(monkeypatch, tmp_path):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    configure()
    rollout()
    assert flush(10)
    assert pipeline._pipeline.names == []
    assert not written(tmp_path)


def test_exporters_as_objects_and_names(memory, tmp_path):
    configure(exporters=[memory, "otlp_file"])
    rollout()
    assert flush(10)
    assert names(memory) == ["op", "invoke_agent rollout_trace"]
    assert written(tmp_path)


def test_names_and_identity_of_the_run(memory):
    configure("gsm8k", "qwen", exporters=[memory], framework="own", framework_version="1.2")
    rollout(sample_index=1)
    rollout(sample_index=1, project_name="other", experiment_name="run2")
    flush(10)
    first, second = (span.resource.attributes for span in memory.get_finished_spans() if span.parent is None)
    assert first["rollout.project_name"] == first["service.name"] == "gsm8k"
    assert (first["rollout.experiment_name"], first["rollout.framework"], first["rollout.framework_version"]) == (
        "qwen",
        "own",
        "1.2",
    )
    assert (second["rollout.project_name"], second["rollout.experiment_name"], second["rollout.group_id"]) == (
        "other",
        "run2",
        "run2/1",
    )


# The process resource


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"service.name": "proj"}),
        ({"OTEL_SERVICE_NAME": "mine"}, {"service.name": "mine"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,team=rl"}, {"service.name": "mine", "team": "rl"}),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "host.name=node7,team=rl"},
            {"service.name": "proj", "host.name": "node7", "team": "rl"},
        ),
    ],
)
def test_the_environments_resource_attributes_win(monkeypatch, memory, environ, expected):
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    configure("proj", exporters=[memory])
    op()
    flush(10)
    found = memory.get_finished_spans()[0].resource.attributes
    assert {key: found[key] for key in expected} == expected
    assert found["process.pid"] == os.getpid()
    assert found["host.name"] == expected.get("host.name", socket.gethostname())
    assert found["telemetry.sdk.language"] == "python"


# What is wrong


def test_an_unknown_name_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"known here: .*otlp_file"):
        configure(exporters="otlp_file,nowhere")
    assert current_binding() is None
    configure(exporters=[])
    assert current_binding() is not None


def test_mlflow_without_its_package_names_the_command(monkeypatch):
    monkeypatch.setattr(exporters, "entry_points", lambda group: {})
    with pytest.raises(exporters.ExporterError, match=r"pip install 'otel-rollout\[mlflow\]'"):
        configure(exporters=["mlflow"])


def test_an_unknown_name_in_the_environment_is_a_warning_and_the_others_work(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nowhere,otlp_file")
    configure()
    rollout()
    assert flush(10)
    assert written(tmp_path)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "nowhere" in record.getMessage()
    assert "OTEL_TRACES_EXPORTER" in record.getMessage()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_BSP_SCHEDULE_DELAY", "soon"), ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"), ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "0")],
)
def test_odd_queue_settings_are_said_and_the_default_is_used(monkeypatch, memory, caplog, variable, value):
    monkeypatch.setenv(variable, value)
    configure(exporters=[memory])
    rollout()
    assert flush(10)
    assert len(names(memory)) == 2
    assert sum(variable in record.getMessage() for record in caplog.records) == 1


def test_queue_settings_of_the_sdk_are_followed(monkeypatch, memory):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "250")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "77")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "7")
    configure(exporters=[memory])
    (processor,) = pipeline._pipeline.processors
    assert (processor._delay, processor._limits[0], processor._batch_limits[0]) == (0.25, 77, 7)


@pytest.mark.parametrize("variable", ["OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"])
def test_a_limit_that_cuts_our_texts_is_said(monkeypatch, memory, caplog, variable):
    monkeypatch.setenv(variable, "1000")
    configure(exporters=[memory])
    assert sum(variable in record.getMessage() for record in caplog.records) == 1


def test_an_endpoint_where_nobody_answers_is_one_warning_and_the_rollout_goes_on(monkeypatch, caplog):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    started = time.monotonic()
    configure()
    assert time.monotonic() - started < 2
    started = time.monotonic()
    for index in range(50):
        rollout(sample_index=index)
    assert time.monotonic() - started < 1
    flush(5)
    ours = [
        record.getMessage()
        for record in caplog.records
        if record.name == "otel_rollout" and record.levelname == "WARNING"
    ]
    assert sum(f"127.0.0.1:{port}" in line for line in ours) == 1
    assert sum("dropped" in line and "could not deliver" in line for line in ours) <= 1
    assert len(ours) <= 2


def test_an_endpoint_that_is_no_url_is_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "127.0.0.1:4318")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    configure()
    deadline = time.monotonic() + 5
    while not (said := [r for r in caplog.records if "is not a URL" in r.getMessage()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(said) == 1


def test_a_disabled_sdk_records_nothing(monkeypatch, memory):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "TRUE")
    configure(exporters=[memory])
    assert rollout().active is False
    flush(5)
    assert names(memory) == []
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    configure(exporters=[memory])
    assert rollout().active is True


def test_a_read_only_directory_is_one_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OTEL_ROLLOUT_FILE", str(tmp_path / "file" / "below"))
    configure()
    (at_the_start,) = [record.getMessage() for record in caplog.records]
    assert "OTEL_ROLLOUT_FILE" in at_the_start
    for _ in range(3):
        rollout()
        assert flush(10)
    said = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert len(said) <= 3


# Twice, and hosts


def test_configure_again_fills_in_and_changes_nothing(memory, caplog):
    configure("p", exporters=[memory])
    configure()
    configure("p", "e", exporters=[memory], framework="verl")
    configure(exporters=[memory])
    rollout()
    assert flush(10)
    assert names(memory) == ["op", "invoke_agent rollout_trace"]
    found = memory.get_finished_spans()[1].resource.attributes
    assert (found["rollout.project_name"], found["rollout.experiment_name"], found["rollout.framework"]) == (
        "p",
        "e",
        "verl",
    )
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_second_exporter_is_added(memory):
    other = InMemorySpanExporter()
    configure(exporters=[memory])
    configure(exporters=[other, "otlp_file"])
    configure(exporters="otlp_file")
    rollout()
    assert flush(10)
    assert names(memory) == names(other) == ["op", "invoke_agent rollout_trace"]
    assert pipeline._pipeline.names.count("otlp_file") == 1


def test_what_contradicts_the_first_call_is_said_once_and_ignored(memory, caplog):
    configure("p", "e", exporters=[memory])
    for _ in range(2):
        configure("q", "f", tracer_provider=TracerProvider(shutdown_on_exit=False))
    rollout()
    flush(10)
    found = memory.get_finished_spans()[1].resource.attributes
    assert (found["rollout.project_name"], found["rollout.experiment_name"]) == ("p", "e")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 3
    assert any("'q'" in line and "'p'" in line for line in said)


def test_the_hosts_provider_is_used_as_it_is(memory):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    configure("p")
    assert trace.get_tracer_provider() is provider
    rollout()
    assert pipeline._pipeline.names == []
    assert names(memory) == ["op", "invoke_agent rollout_trace"]
    pipeline.shutdown()
    with provider.get_tracer("host").start_as_current_span("still works"):
        pass
    assert names(memory)[-1] == "still works"


def test_exporters_given_by_name_join_the_hosts(memory):
    mine = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    configure(exporters=[mine])
    rollout()
    assert flush(10)
    assert names(memory) == names(mine) == ["op", "invoke_agent rollout_trace"]


def test_a_provider_given_is_used_and_not_made_global(memory):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    configure(tracer_provider=provider)
    rollout()
    assert len(names(memory)) == 2
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_shutdown_and_configure_again_with_exporters(memory):
    configure("p", exporters=[memory])
    rollout()
    pipeline.shutdown()
    pipeline.shutdown()
    assert len(names(memory)) == 2
    second = InMemorySpanExporter()
    configure("q", exporters=[second])
    rollout()
    assert flush(10)
    found = second.get_finished_spans()[1].resource.attributes
    assert found["rollout.project_name"] == "q"
    assert len(names(memory)) == 2


def test_shutdown_and_configure_again_from_the_environment(tmp_path):
    for number in range(3):
        configure("p")
        rollout()
        assert flush(10)
        assert len(written(tmp_path)) == number + 1
        pipeline.shutdown()


# flush and shutdown


class Hanging(SpanExporter):
    def __init__(self):
        self.gate = threading.Event()

    def export(self, spans):
        self.gate.wait(20)

    def shutdown(self):
        pass


def test_flush_says_whether_all_was_delivered(memory):
    assert flush(1) is True
    configure(exporters=[memory])
    rollout()
    assert flush(10) is True
    assert len(names(memory)) == 2


def test_flush_and_shutdown_are_bounded_where_an_exporter_hangs(monkeypatch):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")
    monkeypatch.setattr(pipeline, "_SHUTDOWN_SECONDS", 0.3)
    hanging = Hanging()
    try:
        configure(exporters=[hanging])
        rollout()
        started = time.monotonic()
        assert flush(0.3) is False
        assert 0.2 < time.monotonic() - started < 1.5
        started = time.monotonic()
        pipeline.shutdown()
        assert time.monotonic() - started < 1.5
    finally:
        hanging.gate.set()


def test_flush_keeps_its_time_where_late_work_hangs(memory):
    gate = threading.Event()
    configure(exporters=[memory])
    late.submit(lambda: gate.wait(10))
    try:
        started = time.monotonic()
        assert flush(0.5) is False
        assert time.monotonic() - started < 0.9
    finally:
        gate.set()


EXIT = """
import sys, time
from otel_rollout import configure, rollout_trace_attr
configure(exporters="otlp_file")
for index in range(200):
    with rollout_trace_attr(sample_index=index) as trajectory:
        trajectory.reward(1)
if "raise" in sys.argv:
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["end", "raise"])
def test_what_is_queued_is_delivered_at_exit(tmp_path, how):
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", EXIT, how], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == (3 if how == "raise" else 0), done.stderr
    assert time.monotonic() - started < 20
    assert "".join(text_of(tmp_path)).count('"rollout.status"') == 200


HANG = """
import os, time
os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "1"
from opentelemetry.sdk.trace.export import SpanExporter
from otel_rollout import configure, rollout_trace_attr
class Hanging(SpanExporter):
    def export(self, spans):
        time.sleep(600)
configure(exporters=[Hanging()])
with rollout_trace_attr():
    pass
"""


def test_a_hanging_exporter_does_not_hold_the_exit_of_the_process():
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert time.monotonic() - started < 15


# The real thing over loopback


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP; `status` may make it refuse."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.metrics, self.paths, self.status = [], [], [], 200

    def resource_spans(self):
        return [found for request in self.requests for found in request.resource_spans]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        kind, into = {
            "/v1/traces": (ExportTraceServiceRequest, self.server.requests),
            "/v1/metrics": (ExportMetricsServiceRequest, self.server.metrics),
        }[self.path]
        if self.server.status == 200:
            into.append(kind.FromString(body))
        self.server.paths.append((self.path, self.headers["content-type"]))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def collector(monkeypatch):
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    pipeline.shutdown()
    server.shutdown()
    thread.join()
    server.server_close()


def plain(attributes):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def test_otlp_has_one_resource_a_trajectory_with_its_identity(collector, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    configure("gsm8k", "qwen")
    open_ones = [rollout_trace_attr(sample_index=index, step=1, rollout_n=0, color="red") for index in range(8)]
    for attr in open_ones:
        with attr:
            for _ in range(3):
                op()
    assert flush(10)
    assert {path for path, _ in collector.paths} == {"/v1/traces"}
    assert {kind for _, kind in collector.paths} == {"application/x-protobuf"}
    found = {}
    for resource_spans in collector.resource_spans():
        identity = plain(resource_spans.resource.attributes)
        found.setdefault(identity["rollout.trajectory_id"], []).append((identity, resource_spans))
    assert len(found) == 8
    for parts in found.values():
        identity = parts[0][0]
        assert all(other == identity for other, _ in parts)
        spans = [span for _, part in parts for scope in part.scope_spans for span in scope.spans]
        assert len(spans) == 4
        assert len({span.trace_id for span in spans}) == 1
        assert {scope.scope.name for _, part in parts for scope in part.scope_spans} == {"otel_rollout"}
        assert identity["rollout.project_name"] == identity["service.name"] == "gsm8k"
        assert identity["rollout.group_id"] == f"qwen/1/{identity['rollout.sample_index']}"
        assert (identity["rollout.step"], identity["rollout.validate"], identity["rollout.attr.color"]) == (
            1,
            False,
            "red",
        )
    assert (
        len(
            {
                span.trace_id
                for parts in found.values()
                for _, part in parts
                for scope in part.scope_spans
                for span in scope.spans
            }
        )
        == 8
    )


def test_metrics_go_to_the_same_collector(collector, monkeypatch):
    configure("gsm8k")
    rollout()
    pipeline.shutdown()
    sent = {
        metric.name
        for request in collector.metrics
        for r in request.resource_metrics
        for s in r.scope_metrics
        for metric in s.metrics
    }
    assert {"rollout.trajectories", "gen_ai.invoke_agent.duration", "rollout.export.spans"} <= sent
    assert plain(collector.metrics[0].resource_metrics[0].resource.attributes)["service.name"] == "gsm8k"


def test_a_collector_that_refuses_costs_the_spans_but_not_the_rollout(collector, monkeypatch, caplog):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    collector.status = 400
    configure()
    rollout()
    assert flush(10)
    (processor,) = pipeline._pipeline.processors
    assert processor.counts == {"sent": 0, "dropped": 2}
    collector.status = 200
    rollout()
    assert flush(10)
    assert processor.counts == {"sent": 2, "dropped": 2}


def test_the_exporters_own_requests_are_no_spans(collector, monkeypatch):
    from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, get_value

    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    suppressed = []
    real = socket.socket.connect

    def connect(self, address):
        if threading.current_thread().name == "otel-rollout-otlp":
            suppressed.append(get_value(_SUPPRESS_INSTRUMENTATION_KEY))
        return real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    configure()
    rollout()
    assert flush(10)
    assert suppressed
    assert set(suppressed) == {True}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_sends_over_a_connection_of_its_own(collector, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    configure()
    rollout(sample_index="parent")
    assert flush(10)
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(20):
                    rollout(sample_index=f"child {number}")
                    flush(10)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    for _ in range(20):
        rollout(sample_index="parent")
        assert flush(10)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    counted = {}
    for found in collector.resource_spans():
        key = plain(found.resource.attributes)["rollout.sample_index"]
        counted[key] = counted.get(key, 0) + sum(len(scope.spans) for scope in found.scope_spans)
    assert counted == {"parent": 42, "child 0": 40, "child 1": 40, "child 2": 40}

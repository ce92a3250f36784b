import errno
import json
import logging
import os
import socket
import stat
import threading

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_rollout import otlp_file
from otel_rollout.otlp_file import OTLPFileSpanExporter
from otel_rollout.otlp_json import decode_line


def some_spans(*names):
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"a": 1}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    for name in names:
        provider.get_tracer("x").start_span(name).end()
    return memory.get_finished_spans()


def names_in(path):
    return [span["name"] for line in path.read_bytes().splitlines() if line for _, _, span in decode_line(line)]


def test_a_directory_gets_one_private_file_per_process_with_the_first_span(tmp_path):
    exporter = OTLPFileSpanExporter(str(tmp_path / "deep" / "traces"))
    assert not (tmp_path / "deep").exists()
    assert exporter.export(some_spans("a", "b")) is SpanExportResult.SUCCESS
    (file,) = (tmp_path / "deep" / "traces").iterdir()
    assert file == exporter.path
    assert file.name == f"traces-{socket.gethostname()}-{os.getpid()}.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert names_in(file) == ["a", "b"]
    exporter.shutdown()


def test_spans_are_appended_and_each_line_is_a_request(tmp_path):
    path = tmp_path / "x.jsonl"
    for name in ("a", "b"):
        exporter = OTLPFileSpanExporter(path)
        exporter.export(some_spans(name))
        exporter.shutdown()
    assert [list(json.loads(line)) for line in path.read_text().splitlines()] == [["resourceSpans"], ["resourceSpans"]]
    assert names_in(path) == ["a", "b"]


def test_the_environment_and_the_working_directory_at_construction_decide(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_ROLLOUT_FILE", " here.jsonl ")
    monkeypatch.chdir(tmp_path)
    exporter = OTLPFileSpanExporter()
    monkeypatch.delenv("OTEL_ROLLOUT_FILE")
    default = OTLPFileSpanExporter()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert exporter.path == tmp_path / "here.jsonl"
    assert default.path.parent == tmp_path / "otel-rollout"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_writes_its_own_file(tmp_path):
    exporter = OTLPFileSpanExporter(tmp_path)
    exporter.export(some_spans("parent"))
    spans = some_spans("child")
    # The child inherits the lock as held by a thread that it does not have.
    exporter._process.lock.acquire()
    child = os.fork()
    if child == 0:
        os._exit(0 if exporter.export(spans) is SpanExportResult.SUCCESS else 1)
    exporter._process.lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert exporter.export(some_spans("parent again")) is SpanExportResult.SUCCESS
    written = {file.name.rsplit("-", 1)[1]: names_in(file) for file in tmp_path.iterdir()}
    assert written == {f"{os.getpid()}.jsonl": ["parent", "parent again"], f"{child}.jsonl": ["child"]}
    exporter.shutdown()


def test_threads_and_processes_that_share_a_file_do_not_mix_lines(tmp_path):
    path = tmp_path / "shared.jsonl"
    batches = [some_spans(*[f"{thread}-{'x' * 3_000}-{number}" for number in range(20)]) for thread in range(4)]
    exporters = [OTLPFileSpanExporter(path) for _ in batches]
    threads = [
        threading.Thread(target=lambda e=exporter, b=batch: [e.export([span]) for span in b])
        for exporter, batch in zip(exporters, batches, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for exporter in exporters:
        exporter.shutdown()
    assert sorted(names_in(path)) == sorted(span.name for batch in batches for span in batch)


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"resourceSpans":[{"torn')
    exporter = OTLPFileSpanExporter(path)
    exporter.export(some_spans("a"))
    exporter.shutdown()
    torn, whole = path.read_bytes().splitlines()
    assert torn == b'{"resourceSpans":[{"torn'
    assert [span["name"] for _, _, span in decode_line(whole)] == ["a"]


def test_a_removed_file_is_made_anew(tmp_path):
    exporter = OTLPFileSpanExporter(tmp_path / "sub")
    exporter.export(some_spans("a"))
    exporter.path.unlink()
    exporter.path.parent.rmdir()
    assert exporter.export(some_spans("b")) is SpanExportResult.SUCCESS
    assert names_in(exporter.path) == ["b"]
    exporter.shutdown()


def test_a_file_in_the_way_fails_with_one_line_that_names_the_fix(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    exporter = OTLPFileSpanExporter(tmp_path / "file")
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        assert exporter.export(some_spans("a")) is SpanExportResult.FAILURE
        assert exporter.export(some_spans("b", "c")) is SpanExportResult.FAILURE
    assert len(caplog.records) == 1
    assert "OTEL_ROLLOUT_FILE" in caplog.text
    assert "must end in .jsonl" in caplog.text
    (tmp_path / "file").unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        assert exporter.export(some_spans("d")) is SpanExportResult.SUCCESS
    assert "3 were lost" in caplog.text
    assert names_in(exporter.path) == ["d"]
    exporter.shutdown()


def test_a_place_where_nobody_can_write_fails(caplog):
    exporter = OTLPFileSpanExporter("/proc/otel-rollout")
    assert exporter.export(some_spans("a")) is SpanExportResult.FAILURE
    assert "a directory that this user can write" in caplog.text


def test_a_full_disk_fails_and_leaves_a_readable_file(tmp_path, caplog, monkeypatch):
    path = tmp_path / "x.jsonl"
    exporter = OTLPFileSpanExporter(path)
    exporter.export(some_spans("before"))
    write = os.write

    def half_then_full(descriptor, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, bytes(data)[: len(data) // 2])

    monkeypatch.setattr(otlp_file.os, "write", half_then_full)
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        assert exporter.export(some_spans("lost")) is SpanExportResult.FAILURE
    monkeypatch.undo()
    assert "Free some space" in caplog.text
    assert exporter.export(some_spans("after")) is SpanExportResult.SUCCESS
    exporter.shutdown()
    first, _, last = path.read_bytes().splitlines()
    assert [span["name"] for line in (first, last) for _, _, span in decode_line(line)] == ["before", "after"]


def test_after_shutdown_it_refuses(tmp_path, caplog):
    exporter = OTLPFileSpanExporter(tmp_path)
    exporter.shutdown()
    exporter.shutdown()
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        assert exporter.export(some_spans("late")) is SpanExportResult.FAILURE
    assert "1 spans came after the shutdown" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_span_without_a_form_is_left_out_and_the_rest_is_written(tmp_path, caplog):
    good = some_spans("good")
    bad = ReadableSpan("bad", resource=good[0].resource)
    exporter = OTLPFileSpanExporter(tmp_path)
    assert exporter.export([bad, *good]) is SpanExportResult.SUCCESS
    assert names_in(exporter.path) == ["good"]
    assert "'bad' has no OTLP JSON form" in caplog.text
    exporter.shutdown()

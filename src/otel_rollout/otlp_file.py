"""Spans as OTLP JSON lines on disk, in the form that the Collector reads: one file per process, for its owner only."""

import errno
import logging
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_rollout.otlp_json import encode_lines

FILE_VARIABLE: Final = "OTEL_ROLLOUT_FILE"
DEFAULT_DIRECTORY: Final = "otel-rollout"

logger: Final = logging.getLogger("otel_rollout")


class OTLPFileSpanExporter(SpanExporter):
    """Appends spans to a file of OTLP JSON lines.

    Args:
        path: a directory, in which every process writes ``traces-<host>-<pid>.jsonl``, or a file whose name ends in
            ``.jsonl``, to which all processes that are given it append. Default: ``OTEL_ROLLOUT_FILE``, else
            ``otel-rollout/`` in the working directory.

    Nothing is touched before the first span. A forked child opens its own file. `export` never raises: where the file
    cannot be written it returns ``FAILURE`` and says why once, then again only after it had worked in between.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        chosen = path if path is not None else os.environ.get(FILE_VARIABLE, "").strip() or DEFAULT_DIRECTORY
        # Absolute now: a process may change its working directory before its first span.
        self._target: Final = Path(chosen).expanduser().absolute()
        self._process = _Process()
        self._lost = 0
        self._shut_down = False

    @property
    def path(self) -> Path:
        """The file that this process writes."""
        if self._target.suffix == ".jsonl":
            return self._target
        return self._target / f"traces-{socket.gethostname()}-{os.getpid()}.jsonl"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans; FAILURE if they are not (all) on disk."""
        process = self._this_process()
        with process.lock:
            if self._shut_down:
                logger.warning("%d spans came after the shutdown of the file exporter and are lost", len(spans))
                return SpanExportResult.FAILURE
            try:
                self._write(process, spans)
            except Exception as error:  # an exporter must not raise into its processor
                self._failed(process, error, len(spans))
                return SpanExportResult.FAILURE
        if self._lost:
            logger.warning("Spans are written to %s again; %d were lost", self.path, self._lost)
            self._lost = 0
        return SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002  the SDK's signature
        """True: every export has already been handed to the operating system."""
        return True

    def shutdown(self) -> None:
        """Close the file; later exports are refused."""
        process = self._this_process()
        with process.lock:
            self._shut_down = True
            process.close()

    def _this_process(self) -> "_Process":
        if self._process.pid != os.getpid():
            # Forked: the lock may be held by a thread that only the parent has, and the file is the parent's.
            inherited, self._process = self._process, _Process()
            inherited.close()
        return self._process

    def _write(self, process: "_Process", spans: Sequence[ReadableSpan]) -> None:
        descriptor = process.open(self.path)
        for line in encode_lines(spans, on_error=_skipped):
            _write_whole(descriptor, b"\n" + line if process.torn else line)
            process.torn = False

    def _failed(self, process: "_Process", error: Exception, count: int) -> None:
        process.close()
        if not self._lost:
            logger.error("Spans cannot be written to %s and are lost: %s. %s", self.path, error, _fix(error))
        self._lost += count


class _Process:
    """The open file of one process."""

    def __init__(self) -> None:
        self.pid: Final = os.getpid()
        self.lock: Final = threading.Lock()
        self.descriptor = -1
        self.torn = False

    def open(self, path: Path) -> int:
        if self.descriptor >= 0 and os.fstat(self.descriptor).st_nlink == 0:
            self.close()  # somebody removed the file: start a new one
        if self.descriptor < 0:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
            size = os.fstat(self.descriptor).st_size
            # A process that was killed (or a full disk) may have left half a line.
            self.torn = size > 0 and os.pread(self.descriptor, 1, size - 1) != b"\n"
        return self.descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _write_whole(descriptor: int, line: bytes) -> None:
    # One call writes the whole line, so lines of several processes do not mix; only a full disk cuts it short.
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _skipped(span: ReadableSpan, error: Exception) -> None:
    logger.error("Span %r has no OTLP JSON form and is lost: %s: %s", span.name, type(error).__name__, error)


def _fix(error: Exception) -> str:
    place = f"set {FILE_VARIABLE} to a directory that this user can write"
    if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        return f"A file name must end in .jsonl, anything else is a directory: {place}."
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"Free some space there, or {place}."
    return f"{place[0].upper()}{place[1:]}."


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

"""The queue between the rollout and one exporter: bounded in spans and bytes, emptied by a thread of its own."""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_rollout import semconv, tokens
from otel_rollout.guard import failures, guard, warn_once
from otel_rollout.late import late
from otel_rollout.metrics import instruments

MEGABYTE: Final = 1 << 20
_FRAME: Final = 512
"""Bytes of a span without its texts, roughly."""
_PACKED: Final = (semconv.DELTA_PROMPT, semconv.DELTA_COMPLETION, semconv.DELTA_LOGPROBS)


class RolloutSpanProcessor(SpanProcessor):
    """Hands ended spans to an exporter in batches, from its own thread.

    The thread works in small portions and rests between them while trajectories run, so that an event loop in the same
    process never waits long for the interpreter.

    Args:
        exporter: where the spans go.
        name: what logs and the metric ``rollout.export.spans`` call it.
        max_queue_spans, max_queue_bytes: beyond either the oldest spans are dropped, counted and said once.
        max_batch_spans, max_batch_bytes: of one call of the exporter.
        delay: seconds between two looks at the queue.
        shutdown_timeout: seconds that a shutdown may take.
        busy: whether the host is in the middle of rollouts.
        rebuild: makes the exporter anew in a forked child, which must not write to its parent's connections.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        name: str | None = None,
        max_queue_spans: int = 65_536,
        max_queue_bytes: int = 512 * MEGABYTE,
        max_batch_spans: int = 64,
        max_batch_bytes: int = 3 * MEGABYTE,
        delay: float = 0.5,
        shutdown_timeout: float = 5.0,
        busy: Callable[[], bool] = lambda: False,
        rebuild: Callable[[], SpanExporter] | None = None,
    ) -> None:
        self.exporter, self.name = exporter, name or type(exporter).__name__
        self._limits = (max_queue_spans, max_queue_bytes)
        self._batch_limits = (max_batch_spans, max_batch_bytes)
        self._delay, self._timeout, self._busy = delay, shutdown_timeout, busy
        self.counts: dict[str, int] = {"sent": 0, "dropped": 0}
        self._rebuild = rebuild
        self._inherited: SpanExporter | None = None
        self._forked = self._closed = False
        self._reset()
        _processors.add(self)

    def _reset(self) -> None:
        self._queue: deque[tuple[ReadableSpan, int]] = deque()
        self._bytes = 0
        self._accepted = self._finished = 0
        self._changed = threading.Condition()
        self._hurry = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing: a span is of interest when it has ended."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue an ended span; called on the host's thread, so it only appends."""
        if not (span.context and span.context.trace_flags.sampled):
            return
        with guard("queue a span"):
            size = _size(span)
            with self._changed:
                if self._closed:
                    return
                self._queue.append((span, size))
                self._bytes += size
                self._accepted += 1
                dropped = self._make_room()
                if self._thread is None:
                    self._start_thread()
            if dropped:
                self._account(dropped, "dropped", "queue_full")

    def _make_room(self) -> int:
        dropped = 0
        while len(self._queue) > self._limits[0] or (self._bytes > self._limits[1] and len(self._queue) > 1):
            self._bytes -= self._queue.popleft()[1]
            dropped += 1
        self._finished += dropped
        return dropped

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"otel-rollout-{self.name}", daemon=True)
        thread.start()
        self._thread = thread

    def _work(self) -> None:
        # What an exporter does (an HTTP call) is not part of any trajectory.
        key = otel_context._SUPPRESS_INSTRUMENTATION_KEY  # noqa: SLF001  the SDK has no public name for it
        otel_context.attach(otel_context.set_value(key, value=True))
        if self._forked and self._rebuild is not None:
            with guard(f"make {self.name} anew after a fork"):
                # The old one is kept: its end, too, would be seen on the connections of the parent.
                self._inherited, self.exporter = self.exporter, self._rebuild()
        while True:
            with self._changed:
                if not self._hurry and not self._closed:
                    self._changed.wait(self._delay)
                self._hurry = False
            while batch := self._next_batch():
                self._export(batch)
                if self._busy() and not self._closed:
                    time.sleep(0.001)
            if self._closed and not self._queue:
                return

    def _next_batch(self) -> list[ReadableSpan]:
        batch: list[ReadableSpan] = []
        size = 0
        with self._changed:
            # Encoding holds the GIL: beside running rollouts in portions that a loop does not feel.
            gently = self._busy() and len(self._queue) < self._limits[0] // 4
            most = max(1, self._batch_limits[0] // 4) if gently else self._batch_limits[0]
            while self._queue and len(batch) < most:
                if batch and size + self._queue[0][1] > self._batch_limits[1]:
                    break
                span, bytes_ = self._queue.popleft()
                size += bytes_
                batch.append(span)
            self._bytes -= size
        return batch

    def _export(self, batch: list[ReadableSpan]) -> None:
        outcome = SpanExportResult.FAILURE
        try:
            with guard(f"export spans with {self.name}"):
                outcome = self.exporter.export([_compacted(span) for span in batch])
        except BaseException:  # SystemExit, a panic of native code: neither may end the thread
            failures[f"export spans with {self.name}"] += 1
        if outcome is SpanExportResult.SUCCESS:
            self._account(len(batch), "sent")
        else:
            self._account(len(batch), "dropped", "export_failed")
        with self._changed:
            self._finished += len(batch)
            self._changed.notify_all()

    def _account(self, number: int, outcome: str, reason: str | None = None) -> None:
        self.counts[outcome] += number
        labels = {semconv.LABEL_EXPORTER: self.name, semconv.LABEL_OUTCOME: outcome}
        if reason == "queue_full":
            warn_once(
                f"{self.name}:full",
                "exporter %s is too slow: its queue is full (%d spans or %d MiB) and the oldest spans are dropped",
                self.name, self._limits[0], self._limits[1] // MEGABYTE,
            )  # fmt: skip
        elif reason is not None:
            warn_once(
                f"{self.name}:failed",
                "exporter %s could not deliver %d spans and they are dropped; `otel-rollout doctor` says why",
                self.name, number,
            )  # fmt: skip
        with guard("count exported spans"):
            instruments().add(
                semconv.METRIC_EXPORT_SPANS,
                number,
                labels if reason is None else {**labels, semconv.LABEL_REASON: reason},
            )

    def hurry(self) -> None:
        """Empty the queue soon, without waiting for it."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until all spans that ended before this call went through the exporter; False if time ran out."""
        deadline = time.monotonic() + timeout_millis / 1000
        done = late.flush(timeout_millis / 1000)
        goal = self._accepted
        self.hurry()
        with self._changed:
            while self._finished < goal and self._thread is not None and self._thread.is_alive():
                if (
                    not self._changed.wait(max(0.0, min(0.05, deadline - time.monotonic())))
                    and time.monotonic() >= deadline
                ):
                    return False
                self._hurry = True
        return done

    def shutdown(self) -> None:
        """Send what is queued, for at most `shutdown_timeout` seconds, and close the exporter."""
        if self._closed:
            return
        self.force_flush(int(self._timeout * 1000))
        with self._changed:
            self._closed = True
            left, self._bytes = len(self._queue), 0
            self._queue.clear()
            self._finished += left
            self._changed.notify_all()
        if left:
            self._account(left, "dropped", "shutdown")
        with guard(f"shut down {self.name}"):
            self.exporter.shutdown()

    def after_fork(self) -> None:
        """In a forked child: the parent sends what the parent queued."""
        if self._pid != os.getpid():
            self._forked = True
            self._reset()


def _size(span: ReadableSpan) -> int:
    return _FRAME + _text_bytes(span.attributes) + sum(_text_bytes(event.attributes) for event in span.events)


def _text_bytes(attributes: Mapping[str, Any] | None) -> int:
    size = 0
    for value in (attributes or {}).values():
        if isinstance(value, str):
            size += len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    return size


def _compacted(span: ReadableSpan) -> ReadableSpan:
    attributes = span.attributes
    if not attributes or semconv.DELTA_PREFIX_LENGTH not in attributes:
        return span
    short = dict(attributes)
    for key in _PACKED:
        if key in short:
            short[key] = tokens.compact(str(short[key]))
    return ReadableSpan(
        name=span.name, context=span.context, parent=span.parent, resource=span.resource, attributes=short,
        events=span.events, links=span.links, kind=span.kind, status=span.status,
        start_time=span.start_time, end_time=span.end_time, instrumentation_scope=span.instrumentation_scope,
    )  # fmt: skip


_processors: Final["weakref.WeakSet[RolloutSpanProcessor]"] = weakref.WeakSet()


def _after_fork() -> None:
    for processor in list(_processors):
        processor.after_fork()


os.register_at_fork(after_in_child=_after_fork)

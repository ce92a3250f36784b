"""An exporter that encodes spans to OTLP protobuf as the real one does, and says which kind of content each byte is."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

KINDS: Final = ("tokens", "messages on turns", "conversation on the root", "tool I/O", "resource", "rest")


class Breakdown(SpanExporter):
    """Counts bytes by kind; `rest` is span names, ids, times, small attributes and their keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._trajectories = self._spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode, count, forget."""
        request = encode_spans(spans)
        with self._lock:
            self._bytes["all"] += len(request.SerializeToString())
            for group in request.resource_spans:
                self._bytes["resource"] += group.resource.ByteSize()
                for scope in group.scope_spans:
                    for span in scope.spans:
                        self._count(span)
        return SpanExportResult.SUCCESS

    def _count(self, span: Any) -> None:
        self._spans += 1
        self._trajectories += not span.parent_span_id
        for attribute in span.attributes:
            self._bytes[_kind(attribute.key, is_root=not span.parent_span_id)] += attribute.ByteSize()

    def per_trajectory(self) -> dict[str, Any]:
        """Bytes of one trajectory, in all and by kind, and its spans."""
        with self._lock:
            each = {kind: self._bytes[kind] / self._trajectories for kind in KINDS if kind != "rest"}
            whole = self._bytes["all"] / self._trajectories
            each["rest"] = whole - sum(each.values())
            return {"bytes": whole, "kinds": each, "spans": self._spans / self._trajectories}


def _kind(key: str, *, is_root: bool) -> str:
    if key.startswith("rollout.token_delta."):
        return "tokens"
    if key.endswith(".messages") or key == "gen_ai.tool.definitions":
        return "conversation on the root" if is_root else "messages on turns"
    if key.startswith("gen_ai.tool.call."):
        return "tool I/O"
    return "rest"

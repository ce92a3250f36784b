"""A sampler that keeps or drops whole GRPO groups, alike on every worker, without touching any random state."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context, get_value
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.span import TraceState

from otel_rollout import semconv
from otel_rollout.guard import warn_once

_WHOLE: Final = 1 << 64
_STEPS_KEPT: Final = 16
StepKey = tuple[Any, bool]


def group_hash(group_id: str) -> int:
    """A number in 0..2**64-1 that every process computes alike for a group."""
    return int.from_bytes(hashlib.blake2b(str(group_id).encode("utf-8", "replace"), digest_size=8).digest(), "big")


def cutoff_for(count: int, group_ids: Iterable[str]) -> int:
    """The hash below which exactly `count` of these groups lie (all of them, if there are no more than that)."""
    hashes = sorted({group_hash(group) for group in group_ids})
    return hashes[count] if count < len(hashes) else _WHOLE


class _Steps:
    """What is decided per step: a cut-off that an adapter announced, or the first groups that this process saw."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cutoffs: OrderedDict[StepKey, int] = OrderedDict()
        self._first: OrderedDict[StepKey, set[str]] = OrderedDict()

    def announce(self, key: StepKey, cutoff: int) -> None:
        with self._lock:
            self._cutoffs[key] = cutoff
            self._trim(self._cutoffs)

    def keeps(self, key: StepKey, group_id: str, count: int) -> bool:
        with self._lock:
            cutoff = self._cutoffs.get(key)
            if cutoff is not None:
                return group_hash(group_id) < cutoff
            kept = self._first.setdefault(key, set())
            self._trim(self._first)
            if group_id in kept or len(kept) < count:
                kept.add(group_id)
                return True
            return False

    @staticmethod
    def _trim(table: "OrderedDict[StepKey, Any]") -> None:
        while len(table) > _STEPS_KEPT:
            table.popitem(last=False)


_announced: Final = _Steps()


def announce_cutoff(step: int | str | None, cutoff: int, *, validate: bool = False) -> None:
    """Tell the sampler which groups of a step to keep under ``N/step``: those whose `group_hash` is below `cutoff`.

    Whoever sees the whole batch of a step computes it with `cutoff_for`, so that all workers decide alike.
    """
    _announced.announce((step, validate), cutoff)


def per_step(argument: str | float | None) -> int | None:
    """The N of ``N/step``; ``None`` for a share.

    Raises:
        ValueError: neither ``N/step`` nor a number in 0..1.
    """
    text = "1" if argument is None else str(argument).strip()
    count, slash, unit = text.partition("/")
    if slash and unit.strip() == "step" and count.strip().isdigit():
        return int(count)
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError(text)
    return None


class RolloutGroupSampler(Sampler):
    """``OTEL_TRACES_SAMPLER=rollout_group``: all trajectories of a group are kept, or none.

    Args:
        argument: the share of groups to keep, 0..1, or ``"N/step"`` for N groups of each step (validation apart).
            With ``N/step`` and no `announce_cutoff` (an own loop), each process keeps the first N groups that it sees.
            ``OTEL_TRACES_SAMPLER_ARG``; all groups if it is missing or not understood.
    """

    def __init__(self, argument: str | float | None = None) -> None:
        try:
            self._count = per_step(argument)
            self._cutoff = _WHOLE if self._count is not None or argument is None else int(float(argument) * _WHOLE)
        except ValueError:
            warn_once(
                "sampler",
                "OTEL_TRACES_SAMPLER_ARG=%r: use a share such as 0.1 or a number such as 4/step; all groups are kept",
                argument,
            )
            self._count, self._cutoff = None, _WHOLE
        self._text = "all" if argument is None else str(argument)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,  # noqa: ARG002
        kind: SpanKind | None = None,  # noqa: ARG002
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,  # noqa: ARG002
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Follow the parent; decide at the root, by its group (by its trace where it has none)."""
        parent = trace.get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            kept, trace_state = parent.trace_flags.sampled, parent.trace_state
        else:
            kept = self._keeps(parent_context, trace_id, attributes or {})
        decision = Decision.RECORD_AND_SAMPLE if kept else Decision.DROP
        return SamplingResult(decision, attributes if kept else None, trace_state)

    def _keeps(self, context: Context | None, trace_id: int, attributes: Mapping[str, Any]) -> bool:
        identity: Any = get_value(semconv.CONTEXT_IDENTITY, context) or attributes
        group = identity.get(semconv.GROUP_ID) or attributes.get(semconv.SESSION_ID)
        if self._count is None:
            return group_hash(group if group is not None else f"{trace_id:032x}") < self._cutoff
        if group is None:
            return True
        return _announced.keeps(
            (identity.get(semconv.STEP), bool(identity.get(semconv.VALIDATE))), str(group), self._count
        )

    def get_description(self) -> str:
        """Name and argument, as the SDK shows it."""
        return f"RolloutGroupSampler{{{self._text}}}"

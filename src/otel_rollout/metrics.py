"""The instruments: recorded where an op ends, never labelled with a step, a sample or a trajectory."""

import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import metrics, trace
from opentelemetry.context import Context, get_current

from otel_rollout import semconv
from otel_rollout.guard import guard

SECONDS: Final = tuple(0.01 * 2**k for k in range(14))
AGENT_SECONDS: Final = tuple(0.1 * 2**k for k in range(16))
COUNTS: Final = tuple(float(2**k) for k in range(8))
TOKENS: Final = tuple(float(4**k) for k in range(14))
REWARDS: Final = (-1.0, -0.5, -0.1, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 5.0, 10.0)
VERSIONS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

_HISTOGRAMS: Final = {
    semconv.METRIC_AGENT_DURATION: ("s", AGENT_SECONDS, "Duration of a trajectory."),
    semconv.METRIC_AGENT_INFERENCE_CALLS: ("{inference_call}", COUNTS, "Generations of a trajectory."),
    semconv.METRIC_AGENT_TOOL_CALLS: ("{tool_call}", COUNTS, "Tool calls of a trajectory."),
    semconv.METRIC_INFERENCE_DURATION: ("s", SECONDS, "Duration of a generation."),
    semconv.METRIC_TOOL_DURATION: ("s", SECONDS, "Duration of a tool call."),
    semconv.METRIC_TURNS: ("{turn}", COUNTS, "Turns of a trajectory."),
    semconv.METRIC_TOKENS: ("{token}", TOKENS, "Tokens of a trajectory: last prompt and completion."),
    semconv.METRIC_REWARD: ("1", REWARDS, "Reward of a trajectory, by reward name."),
    semconv.METRIC_POLICY_LAG: ("{version}", VERSIONS, "Step of a trajectory less its oldest policy version."),
    semconv.METRIC_TIME: ("s", AGENT_SECONDS, "Where the time of a trajectory goes, by phase."),
}
_COUNTERS: Final = {
    semconv.METRIC_INPUT_TOKENS: ("{token}", "Prompt tokens of generations."),
    semconv.METRIC_OUTPUT_TOKENS: ("{token}", "Completion tokens of generations."),
    semconv.METRIC_TRAJECTORIES: ("{trajectory}", "Trajectories that ended, by status."),
    semconv.METRIC_PREEMPTIONS: ("{preemption}", "Times that the engine preempted a generation."),
    semconv.METRIC_TOKEN_MISMATCHES: ("{mismatch}", "Prompts that did not extend the tokens of the turn before."),
    semconv.METRIC_EXPORT_SPANS: ("{span}", "Spans handed to an exporter, by outcome."),
}
_NOWHERE: Final = trace.set_span_in_context(trace.INVALID_SPAN, Context())
"""No span; an empty context would mean the current one."""


class Instruments:
    """Every instrument of otel-rollout on one meter."""

    __slots__ = ("_instruments",)

    def __init__(self, meter: metrics.Meter) -> None:
        instruments: dict[str, Any] = {
            name: meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=bounds)
            for name, (unit, bounds, text) in _HISTOGRAMS.items()
        }
        instruments |= {name: meter.create_counter(name, unit, text) for name, (unit, text) in _COUNTERS.items()}
        instruments[semconv.METRIC_TRAJECTORIES_ACTIVE] = meter.create_up_down_counter(
            semconv.METRIC_TRAJECTORIES_ACTIVE, "{trajectory}", "Trajectories under way."
        )
        self._instruments = instruments

    def record(self, name: str, value: float, labels: Mapping[str, Any], context: Context | None = None) -> None:
        """Record into a histogram; `context` holds the span that the exemplar points to."""
        instrument = self._instruments[name]
        if value < 0:
            _record_negative(instrument, value, labels, context)
        else:
            instrument.record(value, labels, context=context)

    def add(self, name: str, value: float, labels: Mapping[str, Any]) -> None:
        """Add to a counter; without an exemplar, which the SDK would choose with the host's ``random``."""
        self._instruments[name].add(value, labels, context=_NOWHERE)


def _record_negative(instrument: Any, value: float, labels: Mapping[str, Any], context: Context | None) -> None:
    """A reward may be below zero, which the SDK's histograms hold but refuse at their door."""
    instrument = getattr(instrument, "_real_instrument", None) or instrument
    consumer = getattr(instrument, "_measurement_consumer", None)
    if consumer is None:
        return
    with guard("record a negative reward"):
        from opentelemetry.sdk.metrics._internal.measurement import Measurement  # there is no public way in

        here = get_current() if context is None else context
        consumer.consume_measurement(Measurement(value, time.time_ns(), instrument, here, labels))


_instruments: Instruments | None = None


def instruments() -> Instruments:
    """The instruments on the bound meter provider, else on the global one (which may be set later)."""
    global _instruments  # noqa: PLW0603  one set of instruments a process
    if _instruments is None:
        _instruments = Instruments(metrics.get_meter(semconv.SCOPE))
    return _instruments


def bind(provider: metrics.MeterProvider | None) -> None:
    """Use this meter provider from now on; ``None`` means the global one."""
    global _instruments  # noqa: PLW0603
    _instruments = None if provider is None else Instruments(provider.get_meter(semconv.SCOPE))

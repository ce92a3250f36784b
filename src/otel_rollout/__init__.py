"""OpenTelemetry-native tracing of agentic-RL rollouts."""

from otel_rollout._version import __version__
from otel_rollout.binding import configure_on_first_use
from otel_rollout.op import rollout_trace_op
from otel_rollout.pipeline import configure, flush
from otel_rollout.trajectory import Trajectory, current_trajectory, rollout_trace_attr

configure_on_first_use(configure)

__all__ = [
    "Trajectory",
    "__version__",
    "configure",
    "current_trajectory",
    "flush",
    "rollout_trace_attr",
    "rollout_trace_op",
]

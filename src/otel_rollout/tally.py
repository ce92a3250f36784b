"""What happened in a trajectory, counted whether or not its spans are sampled."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context

from otel_rollout import semconv
from otel_rollout.metrics import instruments


def reward_key(name: Any) -> str:
    """A reward's name as the end of an attribute's name and as a label."""
    return str(name).replace(".", "_")


def measure_reward(name: str, score: float, labels: Mapping[str, Any], here: Context) -> None:
    """Record the metric of one reward; one that is not finite would spoil every sum."""
    if math.isfinite(score):
        instruments().record(semconv.METRIC_REWARD, score, {**labels, semconv.LABEL_REWARD_NAME: name}, here)


@dataclass(slots=True)
class Tally:
    """Counts of one trajectory. Times in seconds, lengths in tokens.

    Attributes:
        output_tokens: what the policy generated.
        observation_tokens: what tools and templates added after the first prompt.
        last_length: prompt and completion of the last turn.
        policy_version_min, policy_version_max: oldest and newest weights that generated a token.
        rewards: by name; ``reward`` is the trajectory's own.
        seconds: by phase, ``generate``, ``tool`` and ``reward``.
    """

    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int | None = None
    observation_tokens: int = 0
    last_length: int = 0
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    seconds: "Counter[str]" = field(default_factory=Counter)

    def saw_policy(self, version: int) -> None:
        """Widen the range of policy versions that generated tokens."""
        low, high = self.policy_version_min, self.policy_version_max
        self.policy_version_min = version if low is None else min(low, version)
        self.policy_version_max = version if high is None else max(high, version)

    def spent(self, phase: str, seconds: float) -> None:
        """Add the time of one op to its phase."""
        self.seconds[phase] += seconds  # type: ignore[assignment]  # typeshed: a Counter counts ints; floats add as well

    def attributes(self) -> dict[str, Any]:
        """Attributes of the root span; what is not known is left out."""
        found: dict[str, Any] = {
            semconv.TURNS: self.turns,
            semconv.TOOL_CALLS: self.tool_calls,
            semconv.TOOL_ERRORS: self.tool_errors,
            semconv.INPUT_TOKENS: self.input_tokens,
            semconv.OUTPUT_TOKENS: self.output_tokens,
            semconv.CACHE_READ_TOKENS: self.cache_read_tokens,
            semconv.RESPONSE_TOKENS: self.output_tokens,
            semconv.OBSERVATION_TOKENS: self.observation_tokens,
            semconv.POLICY_VERSION_MIN: self.policy_version_min,
            semconv.POLICY_VERSION_MAX: self.policy_version_max,
        }
        for name, score in dict(self.rewards).items():
            found[semconv.REWARD if name == "reward" else semconv.REWARDS_PREFIX + name] = score
        return {key: value for key, value in found.items() if value is not None}

    def measure(self, labels: Mapping[str, Any], here: Context, duration: float, step: Any) -> None:
        """Record the metrics of a trajectory that ended after `duration` seconds; `here` holds its root span."""
        record = instruments().record
        record(semconv.METRIC_AGENT_INFERENCE_CALLS, self.turns, labels, here)
        record(semconv.METRIC_AGENT_TOOL_CALLS, self.tool_calls, labels, here)
        record(semconv.METRIC_TURNS, self.turns, labels, here)
        record(semconv.METRIC_TOKENS, self.last_length, labels, here)
        for name, score in dict(self.rewards).items():
            measure_reward(name, score, labels, here)
        if isinstance(step, int) and self.policy_version_min is not None:
            record(semconv.METRIC_POLICY_LAG, max(0, step - self.policy_version_min), labels, here)
        rest = max(0.0, duration - sum(self.seconds.values()))
        for phase, seconds in (*self.seconds.items(), ("other", rest)):
            record(semconv.METRIC_TIME, seconds, {**labels, semconv.LABEL_PHASE: phase}, here)

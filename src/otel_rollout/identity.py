"""Who a trajectory is, as attributes of its resource."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from otel_rollout import content, semconv
from otel_rollout.binding import Binding
from otel_rollout.guard import warn_once

_INT64: Final = 1 << 63
_NAME_LIMIT: Final = 1024


def scalar(value: Any) -> str | bool | int | float:
    """A value that an attribute can hold: itself if it is a plain scalar, else its JSON."""
    if isinstance(value, str):
        return content.text(value)
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return scalar(item())
    return content.to_json(value)


def word(value: Any) -> str:
    """An id or a name as a short string, whatever it is."""
    try:
        found = str(value)
    except Exception:  # the user's __str__
        found = content.to_json(value)
    return content.text(found, _NAME_LIMIT)


def whole_number(value: Any) -> int | str:
    """An id or a count: an int when its source is an int (numpy's too), else its text."""
    try:
        number = operator.index(value)
    except Exception:  # no int, or the user's __index__
        return word(value)
    return number if -_INT64 <= number < _INT64 else str(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `rollout_trace_attr` was given; see there."""

    sample_index: Any = None
    step: Any = None
    rollout_n: Any = None
    validate: Any = False
    group_id: Any = None
    project_name: Any = None
    experiment_name: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def identity_of(asked: Asked, binding: Binding, trajectory_id: str) -> dict[str, Any]:
    """The resource attributes of a trajectory; what is not known is left out."""
    experiment = _name(asked.experiment_name, binding.experiment_name)
    index = None if asked.sample_index is None else whole_number(asked.sample_index)
    step = _step(asked.step)
    found: dict[str, Any] = {
        semconv.PROJECT_NAME: _name(asked.project_name, binding.project_name),
        semconv.EXPERIMENT_NAME: experiment,
        semconv.STEP: step,
        semconv.SAMPLE_INDEX: index,
        semconv.ROLLOUT_N: None if asked.rollout_n is None else whole_number(asked.rollout_n),
        semconv.VALIDATE: _truth(asked.validate),
        semconv.GROUP_ID: _group(asked, experiment, step, index) or trajectory_id,
        semconv.TRAJECTORY_ID: trajectory_id,
        semconv.FRAMEWORK: binding.framework,
        semconv.FRAMEWORK_VERSION: binding.framework_version,
    }
    found.update({semconv.USER_ATTRIBUTE_PREFIX + name: scalar(value) for name, value in asked.extra.items()})
    return {key: value for key, value in found.items() if value is not None}


def _name(given: Any, known: str | None) -> str | None:
    return known if given is None or given == "" else word(given)


def _truth(value: Any) -> bool:
    try:
        return bool(value)
    except Exception:  # an array of several
        kind = type(value).__name__
        warn_once("validate", "rollout_trace_attr(validate=...) is no bool but a %s; it counts as training", kind)
        return False


def _step(step: Any) -> int | str | None:
    number = None if step is None else whole_number(step)
    if isinstance(number, str):
        warn_once("step", "rollout_trace_attr(step=%r): a step is an int; it is recorded as text", number)
        return number
    return None if number is None or number < 0 else number


def _group(asked: Asked, experiment: str | None, step: int | str | None, index: int | str | None) -> str | None:
    if asked.group_id is not None:
        return word(asked.group_id)
    if index is None:
        return None
    return group_name(experiment, step, index)


def group_name(experiment: str | None, step: int | str | None, index: int | str) -> str:
    """The group of a sample at a step where nobody names it."""
    return "/".join(str(part) for part in (experiment, step, index) if part is not None)

"""Which groups of a step a worker traces under verl's ``max_samples_per_step_per_worker``."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final

_STEPS_KEPT: Final = 16


class FirstGroups:
    """Keeps the first groups of each step: the data loader shuffled them, so no dice are needed."""

    def __init__(self) -> None:
        self._steps: OrderedDict[Hashable, set[Any]] = OrderedDict()

    def keeps(self, step: Hashable, group: Any, count: int) -> bool:
        """Whether `group` is among the first `count` of `step`; the same answer for each of its trajectories."""
        kept = self._steps.setdefault(step, set())
        if len(self._steps) > _STEPS_KEPT:
            self._steps.popitem(last=False)
        if group in kept or len(kept) < count:
            kept.add(group)
            return True
        return False

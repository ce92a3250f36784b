"""How many trajectories are open in this process, and a call when the last one has ended."""

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


class _Idle:
    __slots__ = ("callback", "count", "lock")

    def __init__(self) -> None:
        self.callback: Callable[[], None] | None = None
        self.reset()

    def reset(self) -> None:
        """In a forked child the parent's trajectories are not open."""
        self.count = 0
        self.lock = threading.Lock()

    def add(self, number: int) -> None:
        """One more (1) or one less (-1) is open."""
        with self.lock:
            self.count = max(0, self.count + number)
            ended = self.count == 0
        if ended and self.callback is not None:
            self.callback()


idle: Final = _Idle()
os.register_at_fork(after_in_child=idle.reset)

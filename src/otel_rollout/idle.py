"""How many trajectories are open in this process, and a call when the last one has ended."""

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


class _Idle:
    __slots__ = ("callback", "count", "lock")

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()
        self.callback: Callable[[], None] | None = None

    def add(self, number: int) -> None:
        """One more (1) or one less (-1) is open."""
        with self.lock:
            self.count += number
            ended = self.count == 0
        if ended and self.callback is not None:
            self.callback()


idle: Final = _Idle()

"""Work that must not run on the event loop: a thread that completes spans after their op has ended."""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from otel_rollout.guard import guard

_LIMIT: Final = 16_384


class LateWork:
    """A first-in-first-out thread, started with its first job; bounded, so that it cannot hold the host's memory."""

    __slots__ = ("_done", "_jobs", "_lock", "_pid", "_put", "_thread")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._put = self._done = 0

    def submit(self, job: Callable[[], None]) -> bool:
        """Run `job` soon on the thread; False (not taken) when too much waits already."""
        if self._pid != os.getpid():
            self._reset()
        if self._put - self._done >= _LIMIT:
            return False
        with self._lock:
            self._put += 1
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="otel-rollout-late", daemon=True)
                self._thread.start()
        return True

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with guard("complete a span"):
                job()
            del job
            self._done += 1

    def flush(self, timeout: float) -> bool:
        """Wait until all jobs known now are done; False if `timeout` (seconds) passed first."""
        goal, deadline = self._put, time.monotonic() + timeout
        while self._done < goal and self._pid == os.getpid():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True


late: Final = LateWork()

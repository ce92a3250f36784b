"""Work that must not run on the event loop: a thread that completes spans after their op has ended."""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from otel_rollout.guard import failures, guard
from otel_rollout.idle import idle

_LIMIT: Final = 16_384
_PRESSING: Final = 8_192
"""With so many jobs waiting the thread no longer gives way to the rollouts."""
_PATIENCE: Final = 0.25
"""Seconds that a job waits for a lull at the most."""
_PORTION: Final = 0.0005
_REST: Final = 0.001
"""While rollouts run: seconds of work, then seconds of rest, so that an event loop never waits long for the GIL."""


class LateWork:
    """A first-in-first-out thread, started with its first job; bounded, so that it cannot hold the host's memory.

    While trajectories are open it waits for a lull, for a moment, and then works in small portions.
    """

    __slots__ = ("_done", "_hurry", "_jobs", "_lock", "_put", "_thread")

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget everything: in a forked child the parent does what the parent submitted."""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._put = self._done = 0

    def submit(self, job: Callable[[], None], *, must: bool = False) -> bool:
        """Run `job` soon on the thread, after those submitted before; at once where the thread itself submits it.

        Returns:
            False (not taken) when too much waits already, unless it `must` follow a job that was taken, and where no
            thread can be had.
        """
        if threading.current_thread() is self._thread:
            self._run(job)
            return True
        if self._put - self._done >= _LIMIT and not must:
            return False
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="otel-rollout-late", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the process may not have more threads
                    return False
                self._thread = thread
            self._put += 1
            self._jobs.put(job)
        return True

    @staticmethod
    def _run(job: Callable[[], None]) -> None:
        try:
            with guard("complete a span"):
                job()
        except BaseException:  # a panic of a native tokenizer must not end the thread
            failures["complete a span"] += 1

    def hurry(self) -> None:
        """Do what waits now, without giving way."""
        if self._put > self._done:
            self._hurry.set()

    def flush(self, timeout: float) -> bool:
        """Wait until all jobs known now are done; False if `timeout` (seconds) passed first."""
        goal, deadline = self._put, time.monotonic() + timeout
        while self._done < goal:
            if time.monotonic() >= deadline:
                return False
            self.hurry()
            time.sleep(0.002)
        return True

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if idle.count and not self._pressed():
                self._hurry.wait(_PATIENCE)
            started = time.perf_counter()
            while True:
                self._run(job)
                self._done += 1
                del job
                if idle.count and not self._pressed() and time.perf_counter() - started > _PORTION:
                    time.sleep(_REST)
                    started = time.perf_counter()
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    self._hurry.clear()
                    break

    def _pressed(self) -> bool:
        return self._hurry.is_set() or self._put - self._done > _PRESSING


late: Final = LateWork()

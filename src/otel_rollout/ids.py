"""Trace, span and trajectory ids from a generator of our own: the host's ``random`` state stays as it is."""

import os
from random import Random
from typing import Final

_random: Final = Random()  # noqa: S311  ids, not secrets
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """128 random bits as 32 hex digits."""
    return f"{_random.getrandbits(128):032x}"


class PrivateIdGenerator:
    """Random ids as the SDK makes them, but not from the global ``random``, which reproducible training seeds."""

    def generate_span_id(self) -> int:
        """64 random bits; zero would be invalid."""
        return _random.randrange(1, 1 << 64)

    def generate_trace_id(self) -> int:
        """128 random bits; zero would be invalid."""
        return _random.randrange(1, 1 << 128)

    def is_trace_id_random(self) -> bool:
        """Every bit is, as W3C trace context level 2 asks."""
        return True


def keep_random_state(tracer: object) -> None:
    """Give a tracer of ours the private generator, unless the host chose a generator itself."""
    generator = getattr(tracer, "id_generator", None)
    if type(generator).__module__ == "opentelemetry.sdk.trace.id_generator":
        tracer.id_generator = PrivateIdGenerator()  # type: ignore[attr-defined]

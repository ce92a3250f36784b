"""What to capture, read from the environment once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from otel_rollout.guard import warn_once
from otel_rollout.tokens import MODES

CAPTURE_CONTENT: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CAPTURE_TOKENS: Final = "OTEL_ROLLOUT_TOKENS"
CAPTURE_IMAGES: Final = "OTEL_ROLLOUT_IMAGES"
CONTENT_ON: Final = ("SPAN_ONLY", "SPAN_AND_EVENT", "TRUE")
CONTENT_OFF: Final = ("NO_CONTENT", "EVENT_ONLY", "FALSE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a trajectory records.

    Attributes:
        content: messages, arguments, results and texts (default on; ``NO_CONTENT`` turns it off).
        tokens: ``none``, ``counts``, ``ids`` (default) or ``full`` (ids and logprobs); ``counts`` where content is off.
        images: the pixels of images too, not only their size and hash (default off).
    """

    content: bool = True
    tokens: str = "ids"
    images: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Read the settings; a value that is not understood is said once and ignored."""
        content = environ.get(CAPTURE_CONTENT, "").strip().upper()
        if content and content not in CONTENT_ON + CONTENT_OFF:
            warn_once(
                CAPTURE_CONTENT,
                "%s=%s is not understood (use NO_CONTENT or SPAN_ONLY); content is captured",
                CAPTURE_CONTENT,
                content,
            )
        captured = content not in CONTENT_OFF
        tokens = environ.get(CAPTURE_TOKENS, "").strip().lower()
        if tokens and tokens not in MODES:
            warn_once(
                CAPTURE_TOKENS, "%s=%s is not one of %s; the default is used", CAPTURE_TOKENS, tokens, "|".join(MODES)
            )
            tokens = ""
        images = environ.get(CAPTURE_IMAGES, "").strip().lower() in ("1", "true")
        return cls(content=captured, tokens=tokens or ("ids" if captured else "counts"), images=images)

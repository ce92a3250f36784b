"""Token ids and numbers as short strings, and the ledger that stores every token of a trajectory once."""

import base64
import binascii
import hashlib
import re
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_TYPECODES: Final = {"u32": "I", "i64": "q", "f32": "f"}
_FORM: Final = re.compile(r"(u32|i64|f32)(\.shuf)?(\.zlib)?;base64,")
_NO_GIL_SWITCH: Final = 2047
_MIN_COMPRESSED: Final = 128
"""Below this many bytes the compressor's header costs more than it saves."""

MODES: Final = ("none", "counts", "ids", "full")
"""Values of ``OTEL_ROLLOUT_TOKENS``: nothing, lengths and hashes only, token ids (the default), ids and logprobs."""


def encode(values: "Sequence[int] | Sequence[float] | array[Any]", dtype: str = "u32") -> str:
    """Write numbers as ``"<dtype>;base64,<data>"``, little-endian: the form that is cheapest to make. See `compact`.

    Args:
        values: token ids (``u32``, or ``i64`` for what does not fit) or log-probabilities (``f32``), shape (n,).
        dtype: ``u32``, ``i64`` or ``f32``.

    Raises:
        OverflowError, TypeError: a value does not fit the dtype.
    """
    packed = values if isinstance(values, array) else array(_TYPECODES[dtype], values)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return f"{dtype};base64,{binascii.b2a_base64(packed, newline=False).decode()}"


def compact(text: str) -> str:
    """Rewrite what `encode` wrote as ``"<dtype>.shuf.zlib;base64,<data>"`` where that is shorter.

    The bytes are grouped by significance (all lowest first) and compressed: about 3 characters a token instead of 5.3.
    Meant for the exporting thread: the compressor lets go of the GIL, which an event loop pays for with a wait.
    """
    head = _FORM.match(text)
    if head is None or head.end() == len(text) or head[2] or head[3]:
        return text
    raw = base64.b64decode(text[head.end() :])
    if len(raw) < _MIN_COMPRESSED:
        return text
    dtype = head[1]
    width = array(_TYPECODES[dtype]).itemsize
    lanes = [raw[lane::width] for lane in range(width)]
    # Low and high bytes are of different nature: a code table for each half saves 15 %.
    deflate = zlib.compressobj(1)
    small = deflate.compress(b"".join(lanes[: width // 2])) + deflate.flush(zlib.Z_FULL_FLUSH)
    small += deflate.compress(b"".join(lanes[width // 2 :])) + deflate.flush()
    if len(small) >= len(raw):
        return text
    return f"{dtype}.shuf.zlib;base64,{base64.b64encode(small).decode()}"


def encode_ids(ids: "Sequence[int] | array[Any]") -> str:
    """Write token ids (shape (n,)) in their text form; ids outside 0..2**32-1 travel as ``i64``."""
    packed = ids if isinstance(ids, array) else pack(ids)
    return encode(packed, "u32" if packed.typecode == "I" else "i64")


def decode(text: str) -> list[Any]:
    """Read back what `encode` or `compact` wrote.

    Raises:
        ValueError: the text is not in this form, or its data is damaged.
    """
    head = _FORM.match(text)
    if head is None:
        raise ValueError(f"not a token string: {text[:40]!r}")
    dtype, shuffled, compressed = head.groups()
    try:
        raw = base64.b64decode(text[head.end() :], validate=True)
        raw = zlib.decompress(raw) if compressed else raw
    except (ValueError, zlib.error) as error:
        raise ValueError(f"damaged token string {text[:40]!r}: {error}") from error
    numbers = array(_TYPECODES[dtype])
    if len(raw) % numbers.itemsize:
        raise ValueError(f"damaged token string {text[:40]!r}: {len(raw)} bytes are no multiple of {numbers.itemsize}")
    if shuffled:
        count = len(raw) // numbers.itemsize
        whole = bytearray(len(raw))
        for lane in range(numbers.itemsize):
            whole[lane :: numbers.itemsize] = raw[lane * count : (lane + 1) * count]
        raw = bytes(whole)
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def pack(ids: Sequence[int]) -> "array[Any]":
    """Token ids (shape (n,)) as an array of u32, or of i64 where one does not fit."""
    try:
        return array("I", ids)
    except OverflowError:
        return array("q", ids)


def prefix_hash(ids: Sequence[int]) -> str:
    """Hash of token ids (shape (n,)): 8 bytes of BLAKE2b over their low 32 bits, little-endian, as 16 hex digits."""
    return _hash(pack(ids)).hexdigest()


def _hash(packed: "array[Any]", start: hashlib.blake2b | None = None) -> hashlib.blake2b:
    digest = start.copy() if start is not None else hashlib.blake2b(digest_size=8)
    if packed.typecode != "I":
        packed = array("I", [value & 0xFFFFFFFF for value in packed])
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    raw = packed.tobytes()
    # hashlib lets go of the GIL for 2048 bytes and more: an event loop would pay for that with a wait.
    for at in range(0, len(raw), _NO_GIL_SWITCH):
        digest.update(raw[at : at + _NO_GIL_SWITCH])
    return digest


def run_lengths(mask: Sequence[int]) -> list[int]:
    """``[first value, length of each run in turn]``: ``[0, 0, 1]`` becomes ``[0, 2, 1]``; empty stays empty."""
    if not len(mask):
        return []
    bits = bytes(1 if value else 0 for value in mask)
    return [bits[0], *(len(run.group()) for run in re.finditer(rb"\x00+|\x01+", bits))]


def from_run_lengths(runs: Sequence[int]) -> list[int]:
    """The mask (shape (n,), 0 or 1) that `run_lengths` described."""
    mask: list[int] = []
    value = runs[0] if runs else 0
    for length in runs[1:]:
        mask.extend([value] * length)
        value = 1 - value
    return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A prompt that does not extend what the trajectory had seen.

    Attributes:
        position: index of the first token that differs; the prompt's length where it is a prefix of what was seen.
        expected_hash: hash of the tokens seen so far.
        actual_hash: hash of as many tokens of the prompt.
    """

    position: int
    expected_hash: str
    actual_hash: str


@dataclass(slots=True, kw_only=True)
class OpenTurn:
    """A generation under way: its prompt is known, its completion is not."""

    prefix_length: int
    prefix_hash: str
    appended: list[int]
    delta: "array[Any]"
    mismatch: Mismatch | None
    prompt_digest: hashlib.blake2b
    base: list[int]

    @property
    def rebased(self) -> bool:
        """Whether the full prompt is stored because it did not extend the last turn."""
        return self.mismatch is not None

    @property
    def prompt_length(self) -> int:
        """Tokens of the whole prompt."""
        return self.prefix_length + len(self.delta)


class TokenLedger:
    """What one trajectory has said to the model so far, so that each turn stores only what it adds.

    Not thread-safe: the turns of a trajectory follow each other.
    """

    __slots__ = ("_digest", "_seen")

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._digest = hashlib.blake2b(digest_size=8)

    def begin(self, prompt_ids: Sequence[int]) -> OpenTurn:
        """Compare a prompt (shape (prompt_length,)) with what was seen and keep what it appends.

        The ids are copied: the caller may change its list afterwards.
        """
        prompt = prompt_ids if isinstance(prompt_ids, list) else _as_list(prompt_ids)
        seen, known = self._seen, len(self._seen)
        # The same int objects come back turn after turn: comparing them is a comparison of addresses.
        if prompt[:known] == seen:
            appended = prompt[known:]
            delta = pack(appended)
            digest = _hash(delta, self._digest)
            return OpenTurn(
                prefix_length=known,
                prefix_hash=self._digest.hexdigest(),
                appended=appended,
                delta=delta,
                mismatch=None,
                prompt_digest=digest,
                base=seen,
            )
        position = next(
            (at for at, (old, new) in enumerate(zip(seen, prompt, strict=False)) if old != new), len(prompt)
        )
        mismatch = Mismatch(
            position=position, expected_hash=self._digest.hexdigest(), actual_hash=prefix_hash(prompt[:known])
        )
        delta = pack(prompt)
        return OpenTurn(
            prefix_length=0,
            prefix_hash=prefix_hash(()),
            appended=list(prompt),
            delta=delta,
            mismatch=mismatch,
            prompt_digest=_hash(delta),
            base=[],
        )

    def finish(self, turn: OpenTurn, completion_ids: Sequence[int]) -> "array[Any]":
        """Add the completion (shape (completion_length,)) of a turn that `begin` opened; returns it packed."""
        completion = completion_ids if isinstance(completion_ids, list) else _as_list(completion_ids)
        if turn.base is self._seen and len(self._seen) == turn.prefix_length:
            self._seen.extend(turn.appended)
            self._seen.extend(completion)
        else:
            self._seen = [*turn.base[: turn.prefix_length], *turn.appended, *completion]
        packed = pack(completion)
        self._digest = _hash(packed, turn.prompt_digest)
        return packed


def _as_list(ids: Any) -> list[int]:
    tolist = getattr(ids, "tolist", None)
    return [int(value) for value in (tolist() if callable(tolist) else ids)]

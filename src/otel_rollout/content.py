"""Turns any Python value into bounded, strict JSON text, fast enough for an event loop and unable to fail the host."""

# How the size is held: one walk copies the structure and charges each node against the limit, at least `node` bytes
# each, so their number (and the time) is bounded too. Long strings are charged a small floor only; what the structure
# leaves over is then shared between them, the longest cut first. numpy, torch, PIL, pydantic and transformers are
# recognised by the names of a value's classes, never imported.

import base64
import hashlib
import io
import json
import math
import re
from array import array
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from json.encoder import encode_basestring
from types import ModuleType
from typing import Any, Final

DEFAULT_LIMIT: Final = 64 * 1024
LEAST_LIMIT: Final = 256  # a smaller limit could not hold the markers that say what was cut
MAX_DEPTH: Final = 20
MAX_NODES: Final = 8192
MAX_NUMBERS: Final = 2048  # of a list of numbers
LONG_NUMBERS: Final = 64
NO_SUMMARY: Final = 1 << 62
SMALL_ARRAY: Final = 32
CHEAP_ARRAY: Final = 4096
MAX_PIXELS: Final = 1 << 22  # of all images in one value, because each byte is hashed

_NODE: Final = 26  # no scalar and its comma is longer
_LEAST: Final = 64  # any marker, cycle or empty container fits
_MARK: Final = 56  # `,"… #1000":"… [cut: 1000000000000 more items]"`
_FLOOR: Final = 160  # what a long string is sure to get
_SHORT: Final = 100  # characters of a string that is never a candidate for cutting while there is room
_KEY: Final = 256
_FIELDS: Final = 1000
_OBJECT_DEPTH: Final = 5  # objects in objects in objects are plumbing: four levels are enough
_WIDE: Final = 1 << 64
_HEAD: Final = 8
_QUICK_DEPTH: Final = 8
_UNREADABLE: Final = "repr failed"
_ATOMS: Final = frozenset({float, bool, type(None)})
_NUMBERS: Final = frozenset({int, float, bool})
_WIDEST_DECIMAL: Final = 4096
_LONG: Final = object()  # stands for a string whose length is decided last

_encode: Final = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False
).encode
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_mro: Final = type.__dict__["__mro__"].__get__  # not `cls.__mro__`: a metaclass may answer anything


class Whole(str):
    """A string that is useless when cut (base64): it is recorded whole or replaced by its marker."""

    __slots__ = ()


class Records(list[Any]):
    """A list whose readers expect objects.

    Args:
        items: the elements.
        mark: turns the marker of what was cut into such an object.
        nodes: the room that one element needs.
    """

    __slots__ = ("mark", "nodes")

    def __init__(self, items: Iterable[Any], *, mark: Callable[[str], Any], nodes: int) -> None:
        super().__init__(items)
        self.mark = mark
        self.nodes = nodes


def to_json(value: Any, *, limit: int = DEFAULT_LIMIT, images: bool = False, numbers: int = NO_SUMMARY) -> str:
    """Return any value as strict JSON text of at most ``max(limit, LEAST_LIMIT)`` UTF-8 bytes.

    Never raises an ``Exception``: a part that cannot be read becomes ``{"type": …, "error": "repr failed: …"}``.

    Args:
        value: anything; it is neither consumed nor changed, and the text holds no reference to it.
        limit: bytes of the result; a marker ``… [cut: …]`` replaces what does not fit and says how much that is.
        images: record the content of PIL images as PNG data URIs, not only size and hash. Slow: it encodes them.
        numbers: a longer list of numbers (token ids) is shown as its type, length and head; in objects, one longer
            than ``LONG_NUMBERS`` always is.
    """
    with suppress(Exception):  # NaN, or a value that another thread changes: the walk deals with both
        if numbers >= LONG_NUMBERS and room_left(value, min(limit, MAX_NODES * _NODE) // 6, _QUICK_DEPTH) >= 0:
            quick = encode_clean(value)
            if quick is not None:
                return quick
    try:
        return _encode(_Walk(limit, images=images, numbers=numbers).run(value))
    except Exception:
        return f'{{"error":"{_UNREADABLE}"}}'


def encode_clean(value: Any) -> str | None:
    """Return the JSON of a value that `room_left` found small, or None where it holds NaN or a lone surrogate."""
    try:
        quick = _encode(value)
    except ValueError:
        return None
    return quick if quick.isascii() or _is_clean(quick) else None


def plain(value: Any, *, limit: int = DEFAULT_LIMIT, images: bool = False, numbers: int = NO_SUMMARY) -> Any:
    """Return what `to_json` would write as new dicts, lists, strings, ints, finite floats, bools and None."""
    try:
        return _Walk(limit, images=images, numbers=numbers).run(value)
    except Exception:
        return {"error": _UNREADABLE}


def text(value: str, limit: int = DEFAULT_LIMIT) -> str:
    """Return a string of at most ``max(limit, LEAST_LIMIT)`` bytes of UTF-8; a cut says how long the string was."""
    try:
        if type(value) is not str:
            if not is_a(value, "builtins.str"):
                return to_json(value, limit=limit)
            value = str.__getitem__(value, slice(None))
        return _shorten(value, max(limit, LEAST_LIMIT), _utf8_size)
    except Exception:
        return _UNREADABLE


def type_name(cls: type) -> str:
    """Return ``module.Class`` (without ``builtins.``), whatever the metaclass answers."""
    module, name = _class_attribute(cls, "__module__"), _class_attribute(cls, "__qualname__")
    name = name if isinstance(name, str) else "?"
    return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else name


def is_a(value: Any, *names: str) -> bool:
    """Say whether a value's class or a base of it is called so (``module.Class``), without importing it."""
    cls: Any = type(value)
    return not set(names).isdisjoint(_names(cls))


def room_left(value: Any, room: int, depth: int) -> int:
    """Return the characters left if the value is small and of exact JSON types, else -1 (one takes up to 6 bytes)."""
    cls = type(value)
    if cls is str:
        return room - len(value) - 1
    if (cls is not dict and cls is not list and cls is not tuple) or len(value) > LONG_NUMBERS or depth == 0:
        return -1
    if cls is dict:
        room -= _key_lengths(value, room + 1)
        value = value.values()
    for item in value:
        kind = type(item)
        room -= _NODE
        if kind is str:
            room -= len(item)
        elif kind is int:
            room = room if -_WIDE < item < _WIDE else -1
        elif kind not in _ATOMS:
            room = room_left(item, room, depth - 1)
        if room < 0:
            return -1
    return room


def _key_lengths(value: dict[Any, Any], otherwise: int) -> int:
    length = 0
    for key in value:
        if type(key) is not str or len(key) > _KEY:
            return otherwise
        length += len(key)
    return length


class _Walk:
    """One bounded copy of one value; ``room - keep`` bytes may be used, ``keep`` is what open containers still need."""

    __slots__ = ("images", "limit", "long", "node", "numbers", "path", "pending", "pixels", "room")

    def __init__(self, limit: int, *, images: bool, numbers: int) -> None:
        self.limit = self.room = max(limit, LEAST_LIMIT)
        self.node = max(_NODE, self.limit // MAX_NODES)
        self.images = images
        self.numbers = max(numbers, _HEAD)
        self.pixels = MAX_PIXELS
        self.long: list[tuple[Any, Any, str]] = []
        self.path: set[int] = set()
        self.pending = ""

    def run(self, value: Any) -> Any:
        root = [self.value(value, 0, 0, 0)]
        if root[0] is _LONG:
            self._put_off(root, 0)
        if self.long:
            self._share(root)
        return root[0]

    def _put_off(self, out: Any, key: Any) -> None:
        out[key] = ""
        self.long.append((out, key, self.pending))

    def _share(self, root: list[Any]) -> None:
        """Give the long strings what the structure left, the shorter ones first, so that the longest are cut."""
        spare = self.limit + 2 - len(_encode(root).encode())
        self.long.sort(key=lambda entry: len(entry[2]))
        for index, (out, key, string) in enumerate(self.long):
            out[key] = fitted = _shorten(string, spare // (len(self.long) - index), _json_size)
            spare -= _json_size(fitted)

    def value(self, value: Any, keep: int, later: int, depth: int) -> Any:
        """Copy a value for which ``_LEAST`` bytes are free; ``later`` is what its siblings would like to have."""
        cls: Any = type(value)
        if cls is str:
            return self._string(value, keep)
        if cls is int or cls is float or cls is bool or value is None:
            if cls is float and not math.isfinite(value):
                value = _not_finite(value)
            elif cls is int and not -_WIDE < value < _WIDE:
                return self._string(_wide(value), keep)
            self.room -= self.node
            return value
        if cls is Whole:
            return self._long(value, keep)
        return self._composite(value, cls, keep, later, depth)

    def _string(self, value: str, keep: int) -> Any:
        if len(value) <= _SHORT:
            value = _clean(value)
            size = _json_size(value) + 3
            if size <= self.room - keep:
                self.room -= max(size, self.node)
                return value
        return self._long(value, keep)

    def _long(self, value: str, keep: int) -> Any:
        self.room -= max(min(_FLOOR, self.room - keep), self.node)
        self.pending = value
        return _LONG

    def _composite(self, value: Any, cls: Any, keep: int, later: int, depth: int) -> Any:
        identity = id(value)
        if identity in self.path:
            return self._string("… [cycle]", keep)
        if depth >= MAX_DEPTH:
            return self._string(f"… [cut: nested deeper than {MAX_DEPTH}]", keep)
        keep += max(0, min(later, (self.room - keep - _LEAST) // 2))
        before = self.room, len(self.long), self.numbers
        self.path.add(identity)
        try:
            return self._open(value, cls, keep, depth)
        except Exception as error:
            self.room = before[0]
            del self.long[before[1] :]
            failure = {"type": type_name(cls), "error": f"{_UNREADABLE}: {type_name(type(error))}"}
            return self._mapping(failure.items(), 2, keep, depth)
        finally:
            self.path.discard(identity)
            self.numbers = before[2]

    def _open(self, value: Any, cls: Any, keep: int, depth: int) -> Any:
        form: Any = dict if cls is dict else list if cls is list else _form(cls)
        if form is dict:
            taken = list(islice(dict.items(value), self.room // self.node + 1))  # one C call: other threads may write
            return self._mapping(taken, dict.__len__(value), keep, depth)
        if form in _SEQUENCES:
            total = form.__len__(value)
            items: list[Any] = list(islice(form.__iter__(value), MAX_NUMBERS + 1))
            if total > self.numbers and type(items[0]) in _NUMBERS and _all(type(items[0]), items):
                head = {"type": type_name(cls), "length": total, "head": items[:_HEAD]}
                return self._mapping(head.items(), 3, keep, depth)
            return self._sequence(items, total, keep, depth, value)
        shown = self._image(value) if form is image_summary else form(value)
        if type(shown) is dict:
            self.numbers = min(self.numbers, LONG_NUMBERS)
            return self._mapping(shown.items(), len(shown), keep, depth + _OBJECT_DEPTH if form is _object else depth)
        return self.value(shown, keep, 0, depth + 1)

    def _image(self, value: Any) -> dict[str, Any]:
        shown = {"type": type_name(type(value)), **image_summary(value, self.pixels)}
        self.pixels -= math.prod(value.size) if "sha256" in shown else 0
        return shown | {"content": Whole(f"data:image/png;base64,{image_png(value)}")} if self.images else shown

    def _mapping(self, items: Iterable[tuple[Any, Any]], total: int, keep: int, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        self.room -= 2 * self.node  # a container takes longer than a scalar
        keep += _MARK
        for key, item in items:
            name = _unused(_key(key), out)
            cost = _json_size(name) + 4
            if self.room - keep - cost < _LEAST:
                break
            self.room -= cost
            out[name] = shown = self.value(item, keep, 100 * min(total - len(out), 64), depth + 1)
            if shown is _LONG:
                self._put_off(out, name)
        if len(out) < total:
            out[_unused("…", out)] = _more(total - len(out))
        return out

    def _sequence(self, items: list[Any], total: int, keep: int, depth: int, source: Any) -> list[Any]:
        records = type(source) is Records and self.room - keep > 4 * _MARK
        self.room -= 2 * self.node
        keep += 3 * _MARK if records else _MARK
        least = source.nodes * self.node + 200 if records else _LEAST
        out: list[Any] = []
        if len(items) > LONG_NUMBERS:
            out, size = _fitting_numbers(items, self.room - keep)
            self.room -= size
            items = [] if out else items
        for item in items:
            if self.room - keep < least:
                break
            shown = self.value(item, keep, 100 * min(total - len(out) - 1, 4), depth + 1)
            out.append(shown)
            if shown is _LONG:
                self._put_off(out, len(out) - 1)
        if len(out) < total:
            out.append(source.mark(_more(total - len(out))) if records else _more(total - len(out)))
        return out


def _fitting_numbers(items: list[Any], room: int) -> tuple[list[Any], int]:
    """As many numbers as surely fit and their bytes; none if they are not of one type, or not all finite."""
    items = items[:MAX_NUMBERS]
    kind, width = type(items[0]), 25
    if kind not in _NUMBERS or not _all(kind, items):
        return [], 0
    if kind is float and not all(map(math.isfinite, items)):
        return [], 0
    if kind is int:
        ends = min(items), max(items)
        if ends[0] <= -_WIDE or ends[1] >= _WIDE:
            return [], 0
        width = max(len(str(ends[0])), len(str(ends[1]))) + 1
    items = items[: max(0, room // width)]
    return items, len(items) * width


def _all(kind: type, items: Iterable[Any]) -> bool:
    try:
        return set(map(type, items)) == {kind}
    except Exception:  # a metaclass whose hash raises
        return False


def _more(count: int) -> str:
    return f"… [cut: {count} more items]"


def _unused(name: str, taken: dict[str, Any]) -> str:
    return name if name not in taken else _unused(f"{name} #{len(taken)}", taken)


def _json_size(value: str) -> int:
    """UTF-8 bytes of a string inside JSON quotes."""
    quoted = encode_basestring(value)
    return len(quoted) - 2 if quoted.isascii() else len(quoted.encode("utf-8", "surrogatepass")) - 2


def _utf8_size(value: str) -> int:
    return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))


def _is_clean(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _clean(value: str) -> str:
    """The same string with lone surrogates replaced, so that it can be encoded."""
    if value.isascii() or _is_clean(value):
        return value
    return _SURROGATES.sub("\ufffd", value)


def _shorten(value: str, room: int, size: Callable[[str], int]) -> str:
    """The string if it fits, else as much of its start as does and how long it was."""
    length = len(value)
    if length <= room and size(value) <= room:
        return _clean(str(value))
    marker = f"… [cut: {length} characters in all]"
    room -= size(marker)
    end, step = 0, 0 if type(value) is Whole else room
    while step > 0 and room > 0 and end < length:
        cost = size(value[end : end + step])
        if cost <= room:
            end += step
            room -= cost
        else:
            step //= 2
    return _clean(value[:end]) + marker


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _wide(value: int) -> str:
    bits = value.bit_length()  # decimal digits of a huge int cost quadratic time, and Python refuses more than 4300
    return str(value) if bits <= _WIDEST_DECIMAL else f"… [cut: integer of {bits} bits]"


def _key(key: Any) -> str:
    """A dict key as a short string; keys are never walked, so that nothing can nest in them."""
    if type(key) is str:
        return _clean(key) if len(key) <= _KEY else f"{_clean(key[:_KEY])}… [cut: {len(key)} characters in all]"
    try:
        return _key(_key_text(key))
    except Exception:
        return f"<{type_name(type(key))}>"


def _key_text(key: Any) -> Any:
    cls: Any = type(key)
    if cls is int:
        return _wide(key)
    if cls in _ATOMS:
        return _not_finite(key) if cls is float and not math.isfinite(key) else _encode(key)
    if cls is bytes:
        return repr(key[:_LEAST])
    if cls is tuple:
        parts = ["[…]" if type(part) is tuple else _key(part) for part in key[:_HEAD]]
        return f"[{','.join(parts)}{',…' if len(key) > _HEAD else ''}]"
    form = _form(cls)
    return form(key) if form in _ATOMIC else f"<{type_name(cls)}>"


def _class_attribute(cls: type, name: str) -> Any:
    """A class's attribute without asking its metaclass."""
    try:
        return type.__getattribute__(cls, name)
    except Exception:
        return None


@lru_cache(maxsize=256)  # small, because a cache keeps its classes alive
def _names(cls: type) -> tuple[str, ...]:
    return tuple(
        f"{_class_attribute(base, '__module__')}.{_class_attribute(base, '__qualname__')}" for base in _mro(cls)
    )


@lru_cache(maxsize=256)
def _form(cls: type) -> Any:
    """How values of a class are shown: ``dict``, one of ``_SEQUENCES``, or a function that returns a plain value."""
    names = _names(cls)
    if "enum.Enum" in names:
        return _enum
    if "builtins.tuple" in names and _class_attribute(cls, "_fields"):
        return _named_tuple
    for name in names:
        form = _FORMS.get(name) or _FORMS_OF_ANY_MODULE.get(name.rpartition(".")[2])
        if form is not None:
            return form
    if _class_attribute(cls, "__struct_fields__"):
        return _struct
    return _object if _class_attribute(cls, "__dataclass_fields__") is None else _dataclass


def _read(value: Any, *names: str) -> dict[str, Any]:
    """The attributes that can be read: a nested tensor has no shape, a slot may be empty."""
    found = {}
    for name in names:
        with suppress(Exception):
            found[name] = getattr(value, name)
    return found


def _attributes(value: Any) -> dict[Any, Any]:
    """What an object holds in its slots and its ``__dict__``, without asking it."""
    found: dict[Any, Any] = {}
    for base in _mro(type(value)):
        slots = type.__getattribute__(base, "__dict__").get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                found[name] = object.__getattribute__(value, name)
    with suppress(AttributeError):
        held = object.__getattribute__(value, "__dict__")
        found.update(islice(dict.items(held), _FIELDS))
        if len(held) > _FIELDS:
            found["…"] = f"… [cut: {len(held) - _FIELDS} more fields]"
    return found


def _public(fields: dict[Any, Any]) -> dict[Any, Any]:
    return {name: item for name, item in fields.items() if type(name) is not str or name[:1] != "_"}


def _object(value: Any) -> dict[Any, Any]:
    cls = type(value)
    if _class_attribute(cls, "shape") is not None and any(_class_attribute(cls, name) for name in ("dtype", "dtypes")):
        # An array of jax, cupy, pandas, ...: on any device, so no values.
        return {"type": type_name(cls), **_read(value, "shape", "dtype")}
    fields = _public(_attributes(value))
    return {"class" if "type" in fields else "type": type_name(cls), **fields}


def _hides(field: Any) -> bool:
    return getattr(field, "repr", True) is False or getattr(field, "exclude", None) is True


def _dataclass(value: Any) -> dict[str, Any]:
    """The fields like ``dataclasses.asdict``, without those whose author hid them from the repr."""
    fields = _class_attribute(type(value), "__dataclass_fields__")
    shown = [
        name
        for name, field in fields.items()
        if str(getattr(field, "_field_type", "")) == "_FIELD" and not _hides(field)
    ]
    return _read(value, *shown)


def _pydantic(value: Any) -> dict[Any, Any]:
    """The fields like ``model_dump``, but without serialisers and without those that are hidden from the repr."""
    declared = (
        _class_attribute(type(value), "__pydantic_fields__") or _class_attribute(type(value), "model_fields") or {}
    )
    held = object.__getattribute__(value, "__dict__")
    fields = {name: item for name, item in held.items() if name not in declared or not _hides(declared[name])}
    try:
        return fields | (object.__getattribute__(value, "__pydantic_extra__") or {})
    except AttributeError:
        return fields


def _struct(value: Any) -> dict[str, Any]:
    return _read(value, *_class_attribute(type(value), "__struct_fields__"))


def _named_tuple(value: Any) -> dict[str, Any]:
    return dict(zip(_class_attribute(type(value), "_fields"), tuple.__iter__(value), strict=False))


def _enum(value: Any) -> str:
    held = object.__getattribute__(value, "__dict__")
    return held["_value_"] if type(held.get("_value_")) is str else f"{type(value).__qualname__}.{held.get('_name_')}"


def _exact_str(value: Any) -> str:
    return str.__getitem__(value, slice(None))


def _exact_int(value: Any) -> int:
    return int.__pos__(value)


def _exact_float(value: Any) -> float:
    return float.__pos__(value)


def _as_text(value: Any) -> str:
    return str(value)


def _iso_format(value: Any) -> str:
    return str(value.isoformat())


def _bytes(value: Any) -> dict[str, Any]:
    """The length, and the first bytes as text if they are UTF-8, else in hex."""
    length = value.nbytes if type(value) is memoryview else len(value)
    head = bytes(value[:CHEAP_ARRAY])
    shown = {"type": type_name(type(value)), "length": length}
    try:
        string = getincrementaldecoder("utf-8")().decode(head, final=len(head) == length)
    except UnicodeDecodeError:
        return shown | {"head": head[:SMALL_ARRAY].hex()}
    return shown | {"text": string if len(head) == length else f"{string}… [cut: {length} bytes in all]"}


def _error(value: Any) -> dict[str, Any]:
    return {"type": type_name(type(value)), "message": str(value)}


def _named(value: Any) -> dict[str, Any]:
    """Functions, classes, modules, generators and coroutines: by name, never called, entered or consumed."""
    found = _read(value, "__module__", "__qualname__") if type(value) is not ModuleType else {}
    name = found.get("__qualname__") or value.__name__
    module = found.get("__module__")
    return {"type": type_name(type(value)), "name": f"{module}.{name}" if isinstance(module, str) else name}


def _opaque(value: Any) -> dict[str, Any]:
    return {"type": type_name(type(value)), **_read(value, "name_or_path")}


def _tokenizer(value: Any) -> dict[str, Any]:
    return {"type": type_name(type(value)), **_read(value, "name_or_path", "vocab_size")}


def _processor(value: Any) -> dict[str, Any]:
    return {"type": type_name(type(value)), **_read(value, "tokenizer")}


def _numpy_scalar(value: Any) -> Any:
    item = value.item()
    return str(value) if is_a(item, "numpy.generic") else item


def _numpy_array(value: Any) -> dict[str, Any]:
    shown = {"type": type_name(type(value)), **_read(value, "shape", "dtype")}
    numeric = value.dtype.kind in "biuf" and not value.dtype.hasobject
    return {**shown, **_numbers(value.tolist, value.size, numeric=numeric, flat=lambda: value.ravel().tolist())}


def _tensor(value: Any) -> dict[str, Any]:
    """Shape, dtype and device; values of plain CPU tensors only: a device would have to be waited for."""
    shown = {"type": type_name(type(value)), **_read(value, "shape", "dtype", "device")}
    local = (
        type_name(type(value)) in ("torch.Tensor", "torch.nn.parameter.Parameter") and str(shown.get("device")) == "cpu"
    )
    if not local or value.is_nested or str(value.layout) != "torch.strided":
        return shown
    value = value.detach()
    numeric = not value.is_complex()
    try:
        return {
            **shown,
            **_numbers(value.tolist, value.numel(), numeric=numeric, flat=lambda: value.reshape(-1).tolist()),
        }
    except Exception:  # fake tensors, dtypes without values
        return shown


def _numbers(nested: Callable[[], Any], size: int, *, numeric: bool, flat: Callable[[], list[Any]]) -> dict[str, Any]:
    """All values of a small array, the spread of a middling one, nothing of a big one."""
    if size <= SMALL_ARRAY:
        return {"values": nested()}
    if size > CHEAP_ARRAY or not numeric:
        return {}
    values = flat()
    known = [value for value in values if not math.isnan(value)]
    missing = {"nan": size - len(known)} if len(known) < size else {}
    return {"min": min(known), "max": max(known), "mean": sum(known) / len(known), **missing} if known else missing


def image_summary(value: Any, pixels: int = MAX_PIXELS) -> dict[str, Any]:
    """Return a PIL image's mode, size and format, and 64 bits of the SHA-256 of its pixels.

    The hash is left out of images of more than ``pixels`` pixels and of files that PIL has opened but not decoded.
    """
    shown = _read(value, "mode", "size", "format")
    held = object.__getattribute__(value, "__dict__")
    in_memory = (held.get("_im") or held.get("im")) is not None and not held.get(
        "tile"
    )  # else reading would decode a file
    if in_memory and math.prod(shown["size"]) <= pixels:
        shown["sha256"] = hashlib.sha256(value.tobytes()).hexdigest()[:16]
    return shown


def image_png(value: Any) -> str:
    """Return a PIL image as base64 text of a PNG file."""
    target = io.BytesIO()
    (value if value.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else value.convert("RGB")).save(target, "PNG")
    return base64.b64encode(target.getvalue()).decode("ascii")


_SEQUENCES: Final[frozenset[Any]] = frozenset(
    {list, tuple, set, frozenset, deque, range, array, type({}.keys()), type({}.values()), type({}.items())}
)
_ATOMIC: Final = frozenset({_enum, _exact_str, _exact_int, _exact_float, _as_text, _iso_format, _numpy_scalar})
_FORMS: Final[dict[str, Any]] = {
    "builtins.dict": dict,
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _SEQUENCES},
    "builtins.str": _exact_str,
    "builtins.int": _exact_int,
    "builtins.float": _exact_float,
    **dict.fromkeys(("builtins.bytes", "builtins.bytearray", "builtins.memoryview"), _bytes),
    "builtins.BaseException": _error,
    **dict.fromkeys(("builtins.type", "builtins.module", "builtins.function", "builtins.method"), _named),
    **dict.fromkeys(("builtins.builtin_function_or_method", "builtins.method_descriptor"), _named),
    **dict.fromkeys(("builtins.generator", "builtins.coroutine", "builtins.async_generator"), _named),
    **dict.fromkeys(("datetime.date", "datetime.time"), _iso_format),
    **dict.fromkeys(
        ("datetime.timedelta", "uuid.UUID", "decimal.Decimal", "fractions.Fraction", "builtins.complex"), _as_text
    ),
    **dict.fromkeys(("pathlib.PurePath", "pathlib._local.PurePath"), _as_text),
    **dict.fromkeys(("numpy.dtype", "torch.dtype", "torch.device", "torch.SymInt"), _as_text),
    "numpy.generic": _numpy_scalar,
    "numpy.ndarray": _numpy_array,
    "torch.Tensor": _tensor,
    "torch.nn.modules.module.Module": _opaque,
    "PIL.Image.Image": image_summary,
    "pydantic.main.BaseModel": _pydantic,
    "pydantic.v1.main.BaseModel": _pydantic,
    "tokenizers.Tokenizer": _opaque,
}
_FORMS_OF_ANY_MODULE: Final[dict[str, Any]] = {  # transformers moves them between its modules
    "PreTrainedTokenizerBase": _tokenizer,
    "ProcessorMixin": _processor,
}

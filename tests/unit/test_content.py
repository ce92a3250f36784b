import asyncio
import collections
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import inspect
import json
import pathlib
import re
import sys
import threading
import time
import types
import typing
import uuid
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import content
from otel_rollout.content import DEFAULT_LIMIT, LEAST_LIMIT, plain, text, to_json


def read(value, **options):
    """The value read back from strict JSON; fails on NaN literals and on text that is no UTF-8."""

    def refuse(literal):
        raise AssertionError(literal)

    written = to_json(value, **options)
    written.encode("utf-8")
    return json.loads(written, parse_constant=refuse)


class Hostile:
    """Raises from everything it can."""

    def refuse(self, *_args):
        raise ValueError

    __repr__ = __str__ = __eq__ = __hash__ = __iter__ = __len__ = __bool__ = __getattr__ = refuse
    __getattribute__ = __getitem__ = __contains__ = __format__ = __index__ = __float__ = __dir__ = refuse


class HostileMeta(type):
    def __getattribute__(cls, name):
        raise ValueError(name)

    def __hash__(cls):
        raise ValueError

    def __eq__(cls, other):
        raise ValueError

    def __instancecheck__(cls, instance):
        raise ValueError

    def __repr__(cls):
        raise ValueError


class HostileClass(metaclass=HostileMeta):
    pass


class Lying:
    @property
    def __class__(self):
        raise ValueError

    @property
    def __dict__(self):
        raise ValueError


class HostileDict(dict):
    def items(self):
        raise ValueError

    __iter__ = keys = values = __len__ = __getitem__ = items


class HostileList(list):
    def __iter__(self):
        raise ValueError

    __len__ = __getitem__ = __iter__


class HostileStr(str):
    __slots__ = ()

    def __str__(self):
        raise ValueError

    __len__ = __getitem__ = __repr__ = encode = __str__


class HostileError(Exception):
    def __str__(self):
        raise ValueError


class HostileDate(dt.date):
    def isoformat(self):
        raise ValueError


class Slotted:
    __slots__ = ("_hidden", "empty", "shown")

    def __init__(self):
        self.shown = 1
        self._hidden = 2


class Agent:
    """Like verl's AgentData."""

    def __init__(self):
        self.messages = [{"role": "user", "content": "hi"}]
        self.prompt_ids = list(range(151_000, 152_000))
        self.response_mask = [1] * 65
        self.few = [1, 2, 3]
        self._secret = "not shown"
        self.itself = self


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Point:
    x: int = 1
    secret: str = dataclasses.field(default="hidden", repr=False)


class Pair(typing.NamedTuple):
    left: int
    right: list


def count_up():
    yield from range(3)


async def wait():
    return None


def cycle():
    ring = {"name": "ring"}
    ring["self"] = [ring]
    return ring


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


NASTY = [
    Hostile(),
    HostileClass(),
    HostileClass,
    Lying(),
    HostileDict(a=1),
    HostileList([1, 2]),
    HostileStr("text"),
    HostileError(),
    HostileDate(2024, 1, 1),
    {Hostile: 1, (Slotted, 1): 2},
    [HostileClass()] * 100,
    Slotted(),
    Agent(),
    Colour.RED,
    Colour.TWO,
    Level.LOW,
    Point(),
    Pair(1, [2]),
    cycle(),
    deep(100_000),
    float("nan"),
    float("inf"),
    -float("inf"),
    10**30,
    -(10**5000),
    1 << 10_000_000,
    b"bytes",
    b"\xff\x00" * 1000,
    bytearray(b"x" * 10_000),
    memoryview(b"view"),
    "\ud800 lone",
    "\udfff\ud800" * 500,
    "nul \0 and \x1f\x7f\u2028",
    "😀" * 1000,
    {1: "int", "1": "str", 1.5: "float", None: "none", (1, (2,)): "tuple", b"k": "bytes"},
    {float("nan"): 1, "k" * 10_000: 2, "\ud800": 3, 10**5000: 4, Colour.RED: 5, uuid.UUID(int=1): 6},
    {1, 2, 3},
    frozenset({"a"}),
    range(10**40),
    collections.deque([1, 2], maxlen=2),
    collections.OrderedDict(a=1),
    collections.Counter("hello"),
    collections.UserDict(a=1),
    types.MappingProxyType({"a": 1}),
    types.SimpleNamespace(type="own", a=1),
    {}.items(),
    array("d", [1.5, float("nan")]),
    dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc),
    dt.timedelta(seconds=5),
    decimal.Decimal("NaN"),
    fractions.Fraction(1, 3),
    complex(1, float("nan")),
    pathlib.PurePosixPath("/tmp"),
    re.compile("a+"),
    ValueError("what"),
    KeyError("one"),
    threading.Lock(),
    threading.local(),
    sys,
    print,
    "".join,
    read,
    Slotted,
    int,
    type,
    object(),
    ...,
    NotImplemented,
    inspect.signature(read),
    inspect.currentframe(),
    iter([1]),
    map(str, [1]),
    zip([1], [2], strict=False),
    count_up(),
]


@dataclasses.dataclass(frozen=True)
class Nasty:
    """Stands for a nasty value in what hypothesis draws, because hypothesis compares and prints that."""

    index: int


def filled(drawn):
    if isinstance(drawn, Nasty):
        return NASTY[drawn.index]
    if isinstance(drawn, dict):
        return {key: filled(item) for key, item in drawn.items()}
    return type(drawn)(filled(item) for item in drawn) if isinstance(drawn, list | tuple) else drawn


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(st.characters())
    | st.binary(max_size=40)
)
KEYS = st.text() | st.integers() | st.floats() | st.none() | st.tuples(st.integers(), st.text())
ANYTHING = st.recursive(
    SCALARS | st.integers(0, len(NASTY) - 1).map(Nasty),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner),
    max_leaves=30,
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=20), inner, max_size=8),
    max_leaves=20,
)


@given(ANYTHING, st.integers(LEAST_LIMIT, 4000))
@settings(max_examples=150, deadline=None)
def test_any_value_becomes_strict_json_within_the_limit(drawn, limit):
    value = filled(drawn)
    shown = read(value, limit=limit)
    assert len(to_json(value, limit=limit).encode()) <= limit
    assert plain(value, limit=limit) == shown


@pytest.mark.parametrize("index", range(len(NASTY)))
@pytest.mark.parametrize("limit", [LEAST_LIMIT, 1000, DEFAULT_LIMIT])
def test_nasty_values(index, limit):
    value = NASTY[index]
    for held in (value, [value] * 3, {"key": value}, {"a": {"b": [value]}}):
        assert len(to_json(held, limit=limit).encode()) <= limit
        assert plain(held, limit=limit) == read(held, limit=limit)


@given(JSON_VALUES)
@settings(max_examples=100, deadline=None)
def test_what_fits_is_recorded_unchanged(value):
    assert read(value) == value
    assert plain(value) == value


@given(st.lists(st.text(min_size=200), max_size=12), st.integers(3000, 10_000))
@settings(max_examples=50, deadline=None)
def test_long_strings_fill_the_limit_but_never_pass_it(value, limit):
    value = [item * 5 for item in value]
    size = len(to_json(value, limit=limit).encode())
    assert size <= limit
    assert read(value, limit=limit) == value or size > 0.9 * limit


@pytest.mark.parametrize("limit", [-1, 0, 1, 100, LEAST_LIMIT])
def test_tiny_limits_mean_the_least_limit(limit):
    for value in ["x" * 10_000, list(range(1000)), {str(key): "\0" * 50 for key in range(100)}, deep(50), "\x01" * 60]:
        assert len(to_json(value, limit=limit).encode()) <= LEAST_LIMIT


def test_the_layout_is_compact_and_not_escaped():
    assert to_json({"a": [1, 2.5, None, True], "ü": "é\n\0"}) == '{"a":[1,2.5,null,true],"ü":"é\\n\\u0000"}'
    assert to_json("\ud800") == '"\ufffd"'
    assert to_json({"\ud800": "\udfff" * 500}) == '{"\ufffd":"' + "\ufffd" * 500 + '"}'


def test_numbers_that_json_lacks():
    assert read([float("nan"), float("inf"), -float("inf"), 2**64, 2**64 - 1]) == [
        "NaN", "Infinity", "-Infinity", str(2**64), 2**64 - 1,
    ]  # fmt: skip
    assert read(10**5000) == f"… [cut: integer of {(10**5000).bit_length()} bits]"
    assert read([1.0] * 100 + [float("nan")])[-1] == "NaN"
    assert read([1] * 100 + [2**70])[-1] == str(2**70)


def test_a_cut_string_says_its_length():
    shown = read("é" * 100_000, limit=1000)
    assert shown == "é" * shown.count("é") + "… [cut: 100000 characters in all]"
    assert len(to_json("é" * 100_000, limit=1000).encode()) in (999, 1000)


def test_a_cut_list_says_how_many_more():
    items = [{"id": number, "name": "row"} for number in range(100_000)]
    shown = read(items)
    kept = next(index for index, item in enumerate(shown) if item != items[index])
    assert kept > 300
    assert shown[-1] == f"… [cut: {100_000 - (len(shown) - 1)} more items]"


def test_a_cut_list_of_numbers_says_how_many_more():
    for numbers in (list(range(100_000)), [number / 7 for number in range(100_000)], [True] * 100_000):
        shown = read(numbers)
        assert shown[:-1] == numbers[: len(shown) - 1]
        assert len(shown) > 1000
        assert shown[-1] == f"… [cut: {100_000 - (len(shown) - 1)} more items]"


def test_a_cut_dict_says_how_many_more():
    shown = read({f"key {number}": number for number in range(100_000)})
    marker = shown.pop("…")
    assert len(shown) > 500
    assert marker == f"… [cut: {100_000 - len(shown)} more items]"
    assert shown == {f"key {number}": number for number in range(len(shown))}


def test_a_marker_does_not_replace_a_key_of_its_name():
    shown = read({"…": "own", **{str(number): number for number in range(100_000)}})
    assert shown["…"] == "own"
    assert sum(isinstance(value, str) and value.startswith("… [cut: ") for value in shown.values()) == 1


def test_the_longest_strings_are_cut_first_and_small_fields_survive():
    shown = read({"big": "x" * 1_000_000, "middle": "y" * 20_000, "nested": [[{"deep": "z" * 300}]], "answer": 42})
    assert shown["middle"] == "y" * 20_000
    assert shown["nested"] == [[{"deep": "z" * 300}]]
    assert shown["answer"] == 42
    assert shown["big"].endswith("… [cut: 1000000 characters in all]")
    assert len(shown["big"]) > 40_000


def test_fields_after_a_huge_structure_survive():
    shown = read({"table": [{"id": number} for number in range(100_000)], "answer": 42, "last": {"a": "b"}})
    assert shown["answer"] == 42
    assert shown["last"] == {"a": "b"}


def test_too_deep():
    shown = read(deep(1000))
    for _ in range(content.MAX_DEPTH):
        (shown,) = shown
    assert shown == f"… [cut: nested deeper than {content.MAX_DEPTH}]"


def test_cycles_are_marked_and_shared_values_are_not():
    assert read(cycle()) == {"name": "ring", "self": ["… [cycle]"]}
    shared = {"a": object}
    assert read([shared, shared])[0] == read([shared, shared])[1]
    agent = Agent()
    assert read([agent])[0]["itself"] == "… [cycle]"


def test_a_web_of_shared_lists_is_bounded():
    web = []
    for _ in range(60):
        web = [web, web]
    started = time.perf_counter()
    assert len(to_json(web)) <= DEFAULT_LIMIT
    assert time.perf_counter() - started < 0.5


def test_keys_that_are_no_strings():
    assert read({1: "a", (1, "b"): "c", None: "d", b"e": "f", Colour.RED: "g", object: "h", float("nan"): "i"}) == {
        "1": "a", "[1,b]": "c", "null": "d", "b'e'": "f", "red": "g", "<type>": "h", "NaN": "i",
    }  # fmt: skip
    assert read({1: "int", "1": "str"}) == {"1": "int", "1 #1": "str"}
    (key,) = read({"k" * 1000: 1})
    assert key == "k" * 256 + "… [cut: 1000 characters in all]"


def test_objects_show_their_public_fields():
    shown = read(Agent())
    assert shown == {
        "type": f"{__name__}.Agent",
        "messages": [{"role": "user", "content": "hi"}],
        "prompt_ids": {"type": "list", "length": 1000, "head": list(range(151_000, 151_008))},
        "response_mask": {"type": "list", "length": 65, "head": [1] * 8},
        "few": [1, 2, 3],
        "itself": "… [cycle]",
    }
    assert read(Slotted()) == {"type": f"{__name__}.Slotted", "shown": 1}
    assert read(types.SimpleNamespace(type="own")) == {"class": "types.SimpleNamespace", "type": "own"}


def test_long_lists_of_numbers_can_be_summarised_everywhere():
    ids = list(range(1000))
    assert read({"prompt_ids": ids}) == {"prompt_ids": ids}
    summary = {"type": "list", "length": 1000, "head": ids[:8]}
    assert read({"prompt_ids": ids, "words": ["a"] * 100}, numbers=64) == {"prompt_ids": summary, "words": ["a"] * 100}
    assert plain(tuple(ids), numbers=64) == {**summary, "type": "tuple"}
    assert read(ids[:9], numbers=1) == {"type": "list", "length": 9, "head": ids[:8]}


def test_data_classes_are_shown_as_their_data():
    assert read(Point()) == {"x": 1}
    assert read(Pair(1, [2])) == {"left": 1, "right": [2]}
    assert read([Colour.RED, Colour.TWO, Level.LOW]) == ["red", "Colour.TWO", "Level.LOW"]


def test_values_of_the_standard_library():
    assert read(dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)) == "2024-01-02T03:04:05+00:00"
    assert read(dt.date(2024, 1, 2)) == "2024-01-02"
    assert read(pathlib.Path("/a/b")) == "/a/b"
    assert read(uuid.UUID(int=1)) == "00000000-0000-0000-0000-000000000001"
    assert read(decimal.Decimal("1.50")) == "1.50"
    assert read(ValueError("what")) == {"type": "ValueError", "message": "what"}
    assert read(HostileError()) == {"type": f"{__name__}.HostileError", "error": "repr failed: ValueError"}
    assert read(Slotted) == {"type": "type", "name": f"{__name__}.Slotted"}
    assert read(read) == {"type": "function", "name": f"{__name__}.read"}
    assert read(json) == {"type": "module", "name": "json"}
    assert read(threading.Lock()) == {"type": "_thread.lock"}
    assert read([{3}, frozenset({4}), range(2), collections.deque([5])]) == [[3], [4], [0, 1], [5]]


def test_bytes():
    assert read(b"caf\xc3\xa9") == {"type": "bytes", "length": 5, "text": "café"}
    assert read(bytearray(b"\xff\x00")) == {"type": "bytearray", "length": 2, "head": "ff00"}
    shown = read("é".encode() * 100_000)
    assert shown["length"] == 200_000
    assert shown["text"] == "é" * 2048 + "… [cut: 200000 bytes in all]"


def test_overridden_methods_of_builtin_types_are_not_run():
    assert read(HostileDict(a=1)) == {"a": 1}
    assert read(HostileList([1, 2])) == [1, 2]
    assert read(HostileStr("text")) == "text"
    assert type(plain(HostileStr("text"))) is str


def test_hostile_values_become_their_type():
    assert read([Hostile(), 1]) == [{"type": f"{__name__}.Hostile"}, 1]
    assert read([HostileClass(), 1]) == [{"type": f"{__name__}.HostileClass", "error": "repr failed: ValueError"}, 1]
    assert read([HostileDate(2024, 1, 1), 1])[1] == 1


def test_iterators_are_not_consumed():
    generator, iterator, mapped = count_up(), iter([1, 2]), map(str, [1])
    coroutine = wait()
    assert read([generator, iterator, mapped, coroutine])[0] == {"type": "generator", "name": "count_up"}
    assert read(coroutine) == {"type": "coroutine", "name": "wait"}
    assert list(generator) == [0, 1, 2]
    assert list(iterator) == [1, 2]
    assert list(mapped) == ["1"]
    assert asyncio.run(coroutine) is None


@given(JSON_VALUES)
@settings(max_examples=50, deadline=None)
def test_the_value_is_not_changed(value):
    before = copy.deepcopy(value)
    to_json(value, limit=300)
    plain(value, limit=300)
    assert value == before


def test_plain_is_a_copy():
    value = {"a": [1, {"b": 2}]}
    shown = plain(value)
    value["a"][1]["b"] = 3
    value["a"].append(4)
    assert shown == {"a": [1, {"b": 2}]}


def test_a_full_stack_does_not_raise():
    def descend(levels):
        return to_json(Agent()) if levels == 0 else descend(levels - 1)

    answers = set()
    for levels in range(sys.getrecursionlimit() - 120, sys.getrecursionlimit()):
        try:
            answers.add(descend(levels))
        except RecursionError as error:  # the call of to_json itself, or of this function
            last = error.__traceback__
            while last.tb_next is not None:
                last = last.tb_next
            assert last.tb_frame.f_code.co_name in ("descend", "__init__", "to_json")
    assert all(json.loads(answer) for answer in answers)
    assert '{"error":"repr failed"}' in answers


def test_a_dict_that_another_thread_changes():
    shared, stop = {"start": 0}, threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            shared[f"key {number % 500}"] = number
            shared.pop(f"key {(number + 250) % 500}", None)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            assert isinstance(read(shared), dict)
    finally:
        stop.set()
        writer.join()


HUGE = {
    "ints": lambda: list(range(1_000_000)),
    "floats": lambda: [number / 7 for number in range(1_000_000)],
    "mixed": lambda: [1, "a", None] * 300_000,
    "string": lambda: "x" * 5_000_000,
    "emoji": lambda: "😀\n" * 1_000_000,
    "surrogates": lambda: "\ud800" * 1_000_000,
    "strings": lambda: ["x" * 1_000_000] * 100_000,
    "dict": lambda: {number: str(number) for number in range(300_000)},
    "rows": lambda: [{"id": 1, "name": "a", "score": 0.5}] * 300_000,
    "objects": lambda: [Agent() for _ in range(3000)],
    "deep": lambda: deep(300_000),
    "bytes": lambda: b"x" * 5_000_000,
    "set": lambda: set(range(300_000)),
    "range": lambda: range(10**12),
}


@pytest.mark.parametrize("kind", HUGE)
def test_huge_values_take_little_time(kind):
    value = HUGE[kind]()
    took = []
    for _ in range(5):
        started = time.perf_counter()
        written = to_json(value)
        took.append(time.perf_counter() - started)
    assert len(written.encode()) <= DEFAULT_LIMIT
    assert min(took) < 0.05


def test_text():
    assert text("short") == "short"
    assert text("\ud800") == "\ufffd"
    assert text("x" * 1000, 300) == "x" * (300 - 33) + "… [cut: 1000 characters in all]"
    assert len(text("é" * 1000, 300).encode()) in (299, 300)
    assert type(text(HostileStr("text"))) is str
    assert text(["no", "string"]) == '["no","string"]'


@given(st.text() | st.text(st.characters()), st.integers(LEAST_LIMIT, 400))
@settings(max_examples=50, deadline=None)
def test_text_keeps_to_its_limit(value, limit):
    value *= 40
    assert len(text(value, limit).encode()) <= limit

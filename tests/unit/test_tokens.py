"""tokens.py: ids as short strings, and every token of a trajectory once, rebuilt exactly."""

import asyncio
import base64
import hashlib
import json
import math
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import rollout_trace_attr, rollout_trace_op, tokens
from otel_rollout.trace_view import SpanView, from_spans

U32 = st.integers(0, 2**32 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
MASK = st.lists(st.integers(0, 1), max_size=200)


def hash_of(ids):
    return hashlib.blake2b(b"".join(struct.pack("<I", i & 0xFFFFFFFF) for i in ids), digest_size=8).hexdigest()


def read_back(text):
    """The form as CONVENTIONS.md describes it, read without otel_rollout."""
    form, data = text.split(";base64,")
    dtype, *steps = form.split(".")
    raw = base64.b64decode(data, validate=True)
    if "zlib" in steps:
        raw = zlib.decompress(raw)
    letter, width = {"u32": ("I", 4), "i64": ("q", 8), "f32": ("f", 4)}[dtype]
    count = len(raw) // width
    if "shuf" in steps:
        raw = bytes(raw[lane * count + at] for at in range(count) for lane in range(width))
    return list(struct.unpack(f"<{count}{letter}", raw))


@given(st.lists(U32, max_size=300))
def test_ids_round_trip_as_u32(ids):
    text = tokens.encode_ids(ids)
    assert text.startswith("u32;base64,")
    assert tokens.decode(text) == tokens.decode(tokens.compact(text)) == read_back(text) == ids


@given(st.lists(I64, min_size=1, max_size=300).filter(lambda ids: not all(0 <= i < 2**32 for i in ids)))
def test_wide_and_negative_ids_round_trip_as_i64(ids):
    text = tokens.encode_ids(ids)
    assert text.startswith("i64;base64,")
    assert tokens.decode(text) == tokens.decode(tokens.compact(text)) == read_back(tokens.compact(text)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=300))
def test_floats_round_trip_as_f32(values):
    text = tokens.encode(values, "f32")
    assert text.startswith("f32;base64,")
    assert tokens.decode(text) == tokens.decode(tokens.compact(text)) == values
    assert all(type(value) is float for value in tokens.decode(text))


def test_nan_and_infinities_survive():
    back = tokens.decode(tokens.compact(tokens.encode([math.nan, math.inf, -math.inf] * 50, "f32")))
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]


@given(st.lists(st.integers(0, 151_000), min_size=50, max_size=2000))
def test_compact_never_lengthens_and_is_idempotent(ids):
    text = tokens.encode_ids(ids)
    short = tokens.compact(text)
    assert len(short) <= len(text)
    assert tokens.compact(short) == short
    assert read_back(short) == ids


def test_compact_shortens_real_looking_ids_to_three_characters_a_token():
    ids = [(7919 * at * at) % 50_000 for at in range(4096)]
    short = tokens.compact(tokens.encode_ids(ids))
    assert short.startswith("u32.shuf.zlib;base64,")
    assert len(short) < 3.2 * len(ids)


@pytest.mark.parametrize("text", ["", "hello", "[1, 2]", "u32;base64,", "u32;base64,AAAAAA==", "u8;base64,AAAA"])
def test_compact_leaves_alone_what_it_cannot_shorten(text):
    assert tokens.compact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "u8;base64,AAAA",
        "u32;base64,###",
        "u32;base64,AAA",
        "u32;base64,AAAA",
        "u32.shuf.zlib;base64,AAAA",
        "u32,1,2",
    ],
)
def test_a_damaged_string_is_a_value_error(text):
    with pytest.raises(ValueError, match="token string"):
        tokens.decode(text)


@pytest.mark.parametrize(("values", "dtype"), [([-1], "u32"), ([2**63], "i64"), (["a"], "u32"), ([None], "f32")])
def test_values_that_do_not_fit_are_refused(values, dtype):
    with pytest.raises((OverflowError, TypeError)):
        tokens.encode(values, dtype)


@given(MASK)
def test_run_lengths_round_trip(mask):
    runs = tokens.run_lengths(mask)
    assert tokens.from_run_lengths(runs) == mask
    assert sum(runs[1:]) == len(mask)
    assert all(length > 0 for length in runs[1:])


@pytest.mark.parametrize(
    ("mask", "runs"),
    [([], []), ([0, 0, 1], [0, 2, 1]), ([1], [1, 1]), ([1, 0, 1, 1], [1, 1, 1, 2]), ([True, 0.0, 5], [1, 1, 1, 1])],
)
def test_run_lengths_examples(mask, runs):
    assert tokens.run_lengths(mask) == runs


@given(st.lists(I64, max_size=50))
def test_prefix_hash_is_blake2b_of_the_low_32_bits(ids):
    assert tokens.prefix_hash(ids) == hash_of(ids)


# The ledger, on its own


def test_an_append_only_history_stores_each_token_once():
    ledger = tokens.TokenLedger()
    first = ledger.begin([1, 2, 3])
    assert (first.prefix_length, first.prefix_hash, first.delta.tolist(), first.mismatch) == (
        0,
        hash_of([]),
        [1, 2, 3],
        None,
    )
    assert ledger.finish(first, [4, 5]).tolist() == [4, 5]
    second = ledger.begin([1, 2, 3, 4, 5, 6])
    assert (second.prefix_length, second.prefix_hash, second.delta.tolist()) == (5, hash_of([1, 2, 3, 4, 5]), [6])
    assert (second.rebased, second.prompt_length) == (False, 6)


@pytest.mark.parametrize(
    ("prompt", "position"),
    [
        ([9, 2, 3, 4, 5], 0),
        ([1, 2, 9, 4, 5, 6], 2),
        ([1, 2, 3, 4, 9], 4),
        ([1, 2, 3], 3),
        ([], 0),
        ([1, 2, 3, 4, 6, 5], 4),
    ],
)
def test_a_rewritten_history_is_rebased_at_the_first_difference(prompt, position):
    ledger = tokens.TokenLedger()
    ledger.finish(ledger.begin([1, 2, 3]), [4, 5])
    turn = ledger.begin(prompt)
    assert turn.rebased
    assert (turn.prefix_length, turn.prefix_hash, turn.delta.tolist()) == (0, hash_of([]), prompt)
    assert turn.mismatch == tokens.Mismatch(
        position=position, expected_hash=hash_of([1, 2, 3, 4, 5]), actual_hash=hash_of(prompt[:5])
    )
    ledger.finish(turn, [7])
    assert ledger.begin([*prompt, 7, 8]).mismatch is None


def test_the_ledger_does_not_follow_later_changes_of_the_callers_lists():
    ledger, prompt, completion = tokens.TokenLedger(), [1, 2], [3]
    turn = ledger.begin(prompt)
    prompt[:] = [9, 9, 9]
    ledger.finish(turn, completion)
    completion[0] = 9
    assert turn.delta.tolist() == [1, 2]
    after = ledger.begin([1, 2, 3])
    assert (after.mismatch, after.prefix_length) == (None, 3)


class Tensor:
    """What numpy and torch have in common."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return list(self.values)

    def __len__(self):
        return len(self.values)


@pytest.mark.parametrize("shape", [tuple, Tensor, lambda ids: (i for i in ids)])
def test_the_ledger_takes_any_sequence(shape):
    ledger = tokens.TokenLedger()
    turn = ledger.begin(shape([1, 2]))
    ledger.finish(turn, shape([3]))
    assert ledger.begin([1, 2, 3, 4]).delta.tolist() == [4]


# Whole trajectories: random histories through the public names, rebuilt from the spans' attributes alone

TOKEN = st.one_of(st.integers(0, 5), U32, st.just(2**40), st.just(-1))
IDS = st.lists(TOKEN, max_size=6)
STEP = st.one_of(
    st.tuples(st.just("append"), IDS, IDS),
    st.tuples(st.just("rewrite"), st.integers(0, 40), IDS),
    st.tuples(st.just("shorten"), st.integers(0, 40), IDS),
    st.tuples(st.just("fail"), IDS, IDS),
    st.tuples(st.just("concurrent"), st.permutations([0, 1, 2]), st.tuples(IDS, IDS, IDS)),
)


def rebuild(spans):
    """Prompt and completion of each turn by CONVENTIONS.md, without otel_rollout: in order, prefixes by their hash."""
    known, turns = {(0, hash_of([])): []}, {}
    for span in sorted(spans, key=lambda span: span.attributes["rollout.turn"]):
        found = span.attributes
        if "rollout.token_delta.prompt" not in found:
            continue
        prefix = known[found["rollout.token_delta.prefix_length"], found["rollout.token_delta.prefix_hash"]]
        prompt = prefix + read_back(found["rollout.token_delta.prompt"])
        completion = read_back(found["rollout.token_delta.completion"])
        state = prompt + completion
        known[len(state), hash_of(state)] = state
        turns[found["rollout.turn"]] = (prompt, completion)
    return turns


class Replay:
    """Drives generations through `rollout_trace_op(kind="llm")` and keeps what was really said."""

    def __init__(self):
        self.history, self.said, self.mismatches, self.turn = [], {}, [], 0

    def one(self, prompt, completion):
        self.turn += 1
        seen = self.history
        if prompt[: len(seen)] != seen:
            position = next((at for at, (a, b) in enumerate(zip(seen, prompt, strict=False)) if a != b), len(prompt))
            self.mismatches.append((self.turn, position, hash_of(seen), hash_of(prompt[: len(seen)])))

        @rollout_trace_op(kind="llm")
        def generate(prompt_ids):
            return {"token_ids": completion}

        generate(prompt)
        self.said[self.turn] = (list(prompt), list(completion))
        self.history = prompt + completion

    def fail(self, prompt):
        self.turn += 1

        @rollout_trace_op(kind="llm")
        def generate(prompt_ids):
            raise TimeoutError

        with pytest.raises(TimeoutError):
            generate(prompt)

    def concurrent(self, order, completions):
        """Three turns that start from the same history and end in another order."""
        prompts = [[*self.history, 100 + at] for at in range(3)]
        asyncio.run(side_by_side(prompts, completions, order))
        for at in order:
            self.said[self.turn + 1 + at] = (prompts[at], completions[at])
        self.turn += 3
        self.history = prompts[order[-1]] + completions[order[-1]]


async def side_by_side(prompts, completions, order):
    gates = [asyncio.Event() for _ in prompts]

    @rollout_trace_op(kind="llm")
    async def generate(prompt_ids, at):
        await gates[at].wait()
        return {"token_ids": completions[at]}

    tasks = [asyncio.create_task(generate(prompt, at)) for at, prompt in enumerate(prompts)]
    await asyncio.sleep(0)
    for at in order:
        gates[at].set()
        await tasks[at]


def drive(steps):
    replay = Replay()
    with rollout_trace_attr(sample_index=0):
        for kind, first, second in steps:
            history = replay.history
            if kind == "append":
                replay.one(history + first, second)
            elif kind == "rewrite":
                at = first % (len(history) or 1)
                replay.one([*history[:at], 777, *history[at + 1 :], 3], second)
            elif kind == "shorten":
                replay.one(history[: first % (len(history) + 1)], second)
            elif kind == "fail":
                replay.fail(history + first)
            else:
                replay.concurrent(first, second)
    return replay


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(STEP, max_size=8))
def test_random_histories_are_rebuilt_exactly(recorded, steps):
    replay, finished = recorded(lambda: drive(steps))
    turns = [span for span in finished if span.attributes["openinference.span.kind"] == "LLM"]
    assert rebuild(turns) == replay.said

    (view,) = from_spans(SpanView.from_readable(span) for span in finished)
    assert {
        turn.number: (turn.prompt_ids, turn.completion_ids) for turn in view.turns if turn.prompt_ids is not None
    } == replay.said
    assert [turn.token_error for turn in view.turns if turn.token_error is not None] == []

    (root,) = [span for span in finished if span.parent is None]
    events = [event.attributes for event in root.events if event.name == "rollout.token_mismatch"]
    assert [
        (
            e["rollout.turn"],
            e["rollout.token_mismatch.position"],
            e["rollout.token_mismatch.expected_hash"],
            e["rollout.token_mismatch.actual_hash"],
        )
        for e in events
    ] == replay.mismatches


@pytest.fixture(scope="module")
def recorded():
    """Runs a function and returns its result and its spans; one provider for all examples of hypothesis."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from otel_rollout import binding

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def run(function):
        exporter.clear()
        binding.bind(binding.Binding(tracer=binding.scoped_tracer(provider)))
        try:
            return function(), exporter.get_finished_spans()
        finally:
            binding.unbind()

    return run


def turn_attributes(spans, mode, monkeypatch, result, prompt=(1, 2, 3)):
    from otel_rollout import binding
    from otel_rollout.settings import Settings

    bound = binding.current_binding()
    binding.bind(binding.Binding(tracer=bound.tracer, settings=Settings(tokens=mode)))

    @rollout_trace_op(kind="llm")
    def generate(prompt_ids):
        return result

    with rollout_trace_attr():
        generate(list(prompt))
    (span,) = [span for span in spans.get_finished_spans() if span.attributes["openinference.span.kind"] == "LLM"]
    return {
        key.removeprefix("rollout.token_delta."): value
        for key, value in span.attributes.items()
        if key.startswith("rollout.token_delta.")
    }


RESULT = {"token_ids": [4, 5], "log_probs": [-0.5, -2.0]}


def test_mode_ids_is_the_default_set_of_attributes(spans, monkeypatch):
    found = turn_attributes(spans, "ids", monkeypatch, RESULT)
    assert found == {
        "prefix_length": 0,
        "prefix_hash": hash_of([]),
        "prompt": "u32;base64,AQAAAAIAAAADAAAA",
        "completion": "u32;base64,BAAAAAUAAAA=",
    }
    assert type(found["prefix_length"]) is int


def test_mode_full_adds_logprobs(spans, monkeypatch):
    assert read_back(turn_attributes(spans, "full", monkeypatch, RESULT)["logprobs"]) == [-0.5, -2.0]


def test_mode_counts_keeps_length_and_hash_only(spans, monkeypatch):
    assert turn_attributes(spans, "counts", monkeypatch, RESULT) == {"prefix_length": 0, "prefix_hash": hash_of([])}


def test_mode_none_keeps_nothing(spans, monkeypatch):
    assert turn_attributes(spans, "none", monkeypatch, RESULT) == {}


@pytest.mark.parametrize(
    ("mask", "written"),
    [([0, 0, 0, 1, 1], None), ([0, 0, 0, 1, 0], [0, 3, 1, 1]), ([1] * 5, [1, 5]), ([False, 0, 0, 0.0, 0], [0, 5])],
)
def test_a_mask_is_written_only_where_it_is_not_the_usual_one(spans, monkeypatch, mask, written):
    found = turn_attributes(spans, "ids", monkeypatch, {**RESULT, "mask": mask})
    assert (json.loads(found["mask"]) if "mask" in found else None) == written


def test_rebased_is_written_only_where_it_is_true(spans):
    @rollout_trace_op(kind="llm")
    def generate(prompt_ids):
        return {"token_ids": [9]}

    with rollout_trace_attr():
        for prompt in ([1], [1, 9, 2], [5]):
            generate(prompt)
    written = [
        (span.attributes["rollout.turn"], span.attributes.get("rollout.token_delta.rebased"))
        for span in spans.get_finished_spans()
        if span.parent is not None
    ]
    assert written == [(1, None), (2, None), (3, True)]


@pytest.mark.parametrize("prompt", ["a text", [[1, 2], [3]], [None], 7, [2**70]])
def test_prompt_ids_that_are_no_ids_cost_their_tokens_but_not_the_span(spans, prompt, caplog):
    @rollout_trace_op(kind="llm")
    def generate(prompt_ids):
        return {"token_ids": [1]}

    with rollout_trace_attr():
        assert generate(prompt) == {"token_ids": [1]}
        assert generate(prompt) == {"token_ids": [1]}
    turns = [span.attributes for span in spans.get_finished_spans() if span.parent is not None]
    assert [found["rollout.turn"] for found in turns] == [1, 2]
    assert all("rollout.token_delta.prompt" not in found for found in turns)
    assert len(caplog.records) == 1

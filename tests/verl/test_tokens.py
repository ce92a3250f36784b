import random

import pytest
from verl_loop import Reply, batch_v0, batch_v1, tool_call

from otel_rollout import semconv, tokens
from otel_rollout.otlp_json import decode_line, encode_lines
from otel_rollout.trace_view import SpanView, from_spans

FORGET = {"calculator": "verl_tools.Calculator", "amnesia": "verl_tools.Amnesia"}


def mismatches(view):
    return [event.attributes for event in view.root.events if event.name == semconv.MISMATCH_EVENT]


def through_the_wire(exporter):
    """The spans as a file or a collector has them."""
    lines = encode_lines(exporter.get_finished_spans())
    return from_spans(SpanView.from_otlp(*parts) for line in lines for parts in decode_line(line))


def random_script(seed):
    rng = random.Random(seed)
    turns = rng.randint(1, 7)

    def script(turn, prompt):
        if turn >= turns:
            return Reply(text="seven", tokens=rng.randint(1, 300))
        calls = [
            tool_call("calculator", {"expression": f"{rng.randint(0, 10**9)}+1"}) for _ in range(rng.randint(1, 3))
        ]
        return Reply(text="\n".join(calls), tokens=rng.choice([0, 37, 500]))

    return script


@pytest.mark.parametrize("seed", range(4))
async def test_every_turn_s_ids_are_rebuilt_exactly_from_the_exported_spans(rollout, seed):
    server = rollout.server(script=random_script(seed), seed=seed)
    await rollout.v0(batch_v0(1, prompt_tokens=200), server=server, tools=FORGET, turns=9, response_length=8192)
    rollout.spans()
    (view,) = through_the_wire(rollout.exporter)
    assert [(turn.prompt_ids, turn.completion_ids) for turn in view.turns] == [
        (call.prompt_ids, call.token_ids) for call in server.calls
    ]
    assert [turn.rebased for turn in view.turns] == [False] * len(server.calls)
    assert [turn.token_error for turn in view.turns] == [None] * len(server.calls)
    assert mismatches(view) == []
    for turn in view.turns:
        assert turn.mask == [0] * turn.prompt_delta_length + [1] * len(turn.completion_ids)


async def test_every_token_travels_once(rollout):
    server = rollout.server(turns=6, gen_tokens=120)
    await rollout.v0(batch_v0(1, prompt_tokens=400), server=server, turns=9)
    view = rollout.only()
    stored = sum(
        len(tokens.decode(span.attributes[key]))
        for span in view.spans
        for key in (semconv.DELTA_PROMPT, semconv.DELTA_COMPLETION)
        if key in span.attributes
    )
    last = server.calls[-1]
    assert stored == len(last.prompt_ids) + len(last.token_ids)
    before = 0
    for turn, call in zip(view.turns, server.calls, strict=True):
        attributes = turn.span.attributes
        assert attributes[semconv.DELTA_PREFIX_LENGTH] == before
        assert attributes[semconv.DELTA_PREFIX_HASH] == tokens.prefix_hash(call.prompt_ids[:before])
        before = len(call.prompt_ids) + len(call.token_ids)
    assert [key for span in view.spans for key in span.attributes if key == semconv.DELTA_MASK] == []


async def test_the_loss_mask_of_the_turns_is_verl_s_response_mask(rollout):
    server = rollout.server(turns=4, gen_tokens=50)
    (row,) = (await rollout.v1(batch_v1(1), server=server)).values()
    first, *later = rollout.only().turns
    mask = first.mask[first.prompt_delta_length :] + [bit for turn in later for bit in turn.mask]
    assert mask == row["response_mask"].tolist()


async def test_groups_that_run_side_by_side_keep_their_tokens_apart(rollout):
    server = rollout.server(turns=3, gen_tokens=80, latency=0.002)
    await rollout.v1(batch_v1(3), server=server, group=4)
    asked = {(tuple(call.prompt_ids), tuple(call.token_ids)) for call in server.calls}
    told = {
        (tuple(turn.prompt_ids), tuple(turn.completion_ids)) for view in rollout.trajectories() for turn in view.turns
    }
    assert told == asked
    assert len(asked) == 36


@pytest.mark.parametrize("at", [0, 17, -1])
async def test_a_tool_that_rewrites_history_is_found_at_the_right_position(rollout, at):
    script = [Reply(text=tool_call("amnesia", {"at": at, "to": 3}), tokens=60), Reply(text="seven")]
    server = rollout.server(script=script)
    await rollout.v0(batch_v0(1), server=server, tools=FORGET)
    first, second = server.calls
    seen = first.prompt_ids + first.token_ids
    position = at % len(seen)
    assert [old for old, new in zip(seen, second.prompt_ids, strict=False) if old != new] == [seen[position]]
    view = rollout.only()
    assert [turn.rebased for turn in view.turns] == [False, True]
    assert view.turns[1].span.attributes[semconv.DELTA_PREFIX_LENGTH] == 0
    assert [(turn.prompt_ids, turn.completion_ids) for turn in view.turns] == [
        (call.prompt_ids, call.token_ids) for call in server.calls
    ]
    assert mismatches(view) == [
        {
            semconv.TURN: 2,
            semconv.MISMATCH_POSITION: position,
            semconv.MISMATCH_EXPECTED_HASH: tokens.prefix_hash(seen),
            semconv.MISMATCH_ACTUAL_HASH: tokens.prefix_hash(second.prompt_ids[: len(seen)]),
        }
    ]
    assert (view.status, view.root.status) == ("completed", "UNSET")


async def test_after_a_rewrite_the_turns_go_on_from_what_is_true_now(rollout):
    script = [
        Reply(text=tool_call("calculator", {"expression": "1+1"})),
        Reply(text=tool_call("amnesia", {"at": 5, "to": 3})),
        Reply(text=tool_call("calculator", {"expression": "2+2"})),
        Reply(text="seven"),
    ]
    server = rollout.server(script=script)
    await rollout.v0(batch_v0(1), server=server, tools=FORGET, token2text=True)
    view = rollout.only()
    assert [turn.rebased for turn in view.turns] == [False, False, True, False]
    assert [turn.prompt_ids for turn in view.turns] == [call.prompt_ids for call in server.calls]
    assert len(mismatches(view)) == 1


async def test_the_texts_of_a_rewritten_history_are_those_of_the_worker_s_output(rollout):
    import json

    from verl_loop import load_tokenizer

    script = [Reply(text=tool_call("amnesia", {"at": 5, "to": 3}), tokens=60), Reply(text="seven")]
    output = await rollout.v0(batch_v0(1), server=rollout.server(script=script), tools=FORGET, token2text=True)
    run = next(span for span in rollout.only().spans if span.name == "ToolAgentLoop.run")
    shown = json.loads(run.attributes[semconv.OUTPUT_VALUE])
    decode, mask = load_tokenizer(rollout.model).decode, output.batch["attention_mask"][0].bool()
    width = output.batch["prompts"].shape[1]
    assert shown["prompt_text"] == decode(output.batch["prompts"][0][mask[:width]].tolist())
    assert shown["response_text"] == decode(output.batch["responses"][0][mask[width:]].tolist())


async def test_partial_rollouts_store_the_whole_turn_once(rollout):
    server = rollout.server(script=[Reply(text="seven", tokens=90, cuts=(40,), versions=(3, 4))])
    await rollout.v1(batch_v1(1), server=server, fully_async=True)
    view = rollout.only()
    (turn,) = view.turns
    first, second = server.calls
    assert second.prompt_ids == first.prompt_ids + first.token_ids
    assert turn.prompt_ids == first.prompt_ids
    assert turn.completion_ids == first.token_ids + second.token_ids
    assert [span.attributes.get(semconv.DELTA_COMPLETION) for span in turn.segments] == [None, None]
    assert mismatches(view) == []


async def test_full_adds_the_logprobs(rollout, monkeypatch):
    monkeypatch.setenv("OTEL_ROLLOUT_TOKENS", "full")
    rollout.reconfigure()
    server = rollout.server(logprobs=True)
    await rollout.v0(batch_v0(1), server=server, logprobs=True)
    for turn, call in zip(rollout.only().turns, server.calls, strict=True):
        assert turn.logprobs == pytest.approx(call.logprobs, rel=1e-6)
        assert len(turn.logprobs) == len(turn.completion_ids)


@pytest.mark.parametrize(("mode", "kept"), [
    ("counts", {semconv.DELTA_PREFIX_LENGTH, semconv.DELTA_PREFIX_HASH}),
    ("none", set()),
])  # fmt: skip
async def test_counts_and_none_keep_no_ids(rollout, monkeypatch, mode, kept):
    monkeypatch.setenv("OTEL_ROLLOUT_TOKENS", mode)
    rollout.reconfigure()
    server = rollout.server()
    await rollout.v0(batch_v0(1), server=server, token2text=True)
    view = rollout.only()
    for turn, call in zip(view.turns, server.calls, strict=True):
        assert {key for key in turn.span.attributes if key.startswith("rollout.token_delta.")} == kept
        assert turn.span.attributes[semconv.INPUT_TOKENS] == len(call.prompt_ids)
        assert turn.prompt_ids is None
    assert view.status == "completed"

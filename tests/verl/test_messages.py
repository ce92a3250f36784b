import json
import threading

import pytest
from transformers import PreTrainedTokenizerFast
from verl_loop import FUNCTIONS, Reply, batch_v0, batch_v1, load_tokenizer, tool_call

from otel_rollout import semconv

SYSTEM = {"role": "system", "content": "You add."}
QUESTION = {"role": "user", "content": "What is 1+1?"}
ADD = ("calculator", {"expression": "1+1"})
SCRIPT = [
    Reply(text="I add.\n" + tool_call(*ADD) + tool_call("weather", {"city": "Oslo"})),
    Reply(text=tool_call("nothing", {})),
    Reply(text="It is two."),
]
END = "<|im_end|>"


def said(role, *parts):
    return {"role": role, "parts": list(parts)}


def text(content):
    return {"type": "text", "content": content}


def call(name, arguments):
    return {"type": "tool_call", "name": name, "arguments": arguments}


def answer(content):
    return said("tool", {"type": "tool_call_response", "response": content})


SKY = '{"city": "Oslo", "sky": "blue"}'
UNKNOWN = "Unknown function 'nothing'. Available tools: ['calculator', 'divide', 'weather']"
TURNS = [
    (
        [said("system", text("You add.")), said("user", text("What is 1+1?"))],
        said("assistant", text(f"I add.\n{END}"), call(*ADD), call("weather", {"city": "Oslo"})),
    ),
    ([answer("2"), answer(SKY)], said("assistant", text(END), call("nothing", {}))),
    ([answer(UNKNOWN)], said("assistant", text(f"It is two.{END}"))),
]


@pytest.fixture
def decoders(monkeypatch):
    """Names of the threads that decode tokens."""
    names = []
    decode = PreTrainedTokenizerFast.decode

    def noted(self, *args, **kwargs):
        names.append(threading.current_thread().name)
        return decode(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", noted)
    return names


async def scripted(rollout, trainer="v0", **settings):
    given = {"server": rollout.server(script=SCRIPT), "function_tools": FUNCTIONS, **settings}
    if trainer == "v0":
        return await rollout.v0(batch_v0(1, messages=[[SYSTEM, QUESTION]]), **given)
    return await rollout.v1(batch_v1(1, messages=[[SYSTEM, QUESTION]]), **given)


@pytest.mark.parametrize("token2text", [False, True])
@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_each_turn_has_what_is_new_and_the_root_the_whole_conversation(rollout, trainer, token2text):
    await scripted(rollout, trainer, token2text=token2text)
    view = rollout.only()
    assert [(turn.input_messages, turn.output_messages) for turn in view.turns] == [(new, [out]) for new, out in TURNS]
    assert [turn.span.attributes[semconv.MESSAGE_PREFIX_COUNT] for turn in view.turns] == [0, 3, 6]
    attributes = view.root.attributes
    assert json.loads(attributes[semconv.INPUT_MESSAGES]) == TURNS[0][0]
    after = [message for new, out in TURNS for message in (*new, out)][2:]
    assert json.loads(attributes[semconv.OUTPUT_MESSAGES]) == after
    assert view.messages == TURNS[0][0] + after


async def test_the_tool_definitions_stand_on_the_root_once(rollout):
    await scripted(rollout)
    view = rollout.only()
    assert [span.name for span in view.spans if semconv.TOOL_DEFINITIONS in span.attributes] == [view.root.name]
    definitions = json.loads(view.root.attributes[semconv.TOOL_DEFINITIONS])
    assert [definition["name"] for definition in definitions] == ["calculator", "divide", "weather"]
    assert definitions[2] == {
        "type": "function",
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    }


async def test_an_answer_that_the_loop_keeps_no_message_of_is_decoded_by_us(rollout, decoders):
    """ToolAgentLoop returns before it reads a turn that fills the budget or is the last that is allowed."""
    await rollout.v0(batch_v0(1, messages=[[QUESTION]]), server=rollout.server(script=SCRIPT[:1]), turns=1)
    view = rollout.only()
    (turn,) = view.turns
    whole = f"I add.\n{tool_call(*ADD)}{tool_call('weather', {'city': 'Oslo'})}{END}"
    assert turn.output_messages == [said("assistant", text(whole))]
    assert view.messages == [said("user", text("What is 1+1?")), said("assistant", text(whole))]
    assert [name for name in decoders if not name.startswith("asyncio")] == ["otel-rollout-late"]


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_token2text_is_what_the_tokenizer_says_of_the_real_ids(rollout, trainer):
    server = rollout.server(turns=3, gen_tokens=200)
    decode = load_tokenizer(rollout.model).decode
    if trainer == "v0":
        output = await rollout.v0(batch_v0(1), server=server, token2text=True)
        prompt, response = (output.batch[name][0] for name in ("prompts", "responses"))
        mask = output.batch["attention_mask"][0].bool()
        prompt_ids, response_ids = prompt[mask[: len(prompt)]].tolist(), response[mask[len(prompt) :]].tolist()
    else:
        (row,) = (await rollout.v1(batch_v1(1), server=server, token2text=True)).values()
        prompt_ids, response_ids = row["prompts"].tolist(), row["responses"].tolist()
    view = rollout.only()
    run = next(span for span in view.spans if span.name == "ToolAgentLoop.run")
    shown = json.loads(run.attributes[semconv.OUTPUT_VALUE])
    assert shown["prompt_text"] == decode(prompt_ids)
    assert shown["response_text"] == decode(response_ids)
    assert shown["response_tokens"] == len(response_ids)
    before = 0
    for turn, asked in zip(view.turns, server.calls, strict=True):
        texts = json.loads(turn.span.attributes[semconv.OUTPUT_VALUE])
        assert texts == {
            "prompt_text": decode(asked.prompt_ids[before:]),
            "response_text": decode(asked.token_ids),
        }
        before = len(asked.prompt_ids) + len(asked.token_ids)


async def test_the_texts_of_a_cut_response_are_those_of_what_the_worker_returns(rollout):
    server = rollout.server(script=[Reply(text=tool_call(*ADD), tokens=200), Reply(tokens=200, closed=False)])
    output = await rollout.v0(batch_v0(1), server=server, token2text=True, response_length=300)
    view = rollout.only()
    run = next(span for span in view.spans if span.name == "ToolAgentLoop.run")
    shown = json.loads(run.attributes[semconv.OUTPUT_VALUE])
    assert shown["response_tokens"] == 300
    assert shown["response_text"] == load_tokenizer(rollout.model).decode(output.batch["responses"][0].tolist())


async def test_we_decode_on_our_own_thread_and_only_new_tokens(rollout, decoders):
    lengths = []
    decode = PreTrainedTokenizerFast.decode

    def measured(self, ids, *args, **kwargs):
        if threading.current_thread().name == "otel-rollout-late":
            lengths.append(len(ids))
        return decode(self, ids, *args, **kwargs)

    PreTrainedTokenizerFast.decode = measured
    try:
        await scripted(rollout, token2text=True)
        view = rollout.only()
    finally:
        PreTrainedTokenizerFast.decode = decode
    # verl's parser decodes each turn in an executor; the rest is ours, and none of it on the event loop's thread.
    ours = [name for name in decoders if not name.startswith("asyncio_")]
    assert set(ours) == {"otel-rollout-late"}
    last = view.turns[-1]
    assert sum(lengths) == len(last.prompt_ids) + len(last.completion_ids)


async def test_without_token2text_nothing_is_decoded(rollout, decoders):
    await scripted(rollout)
    assert len(rollout.only().turns) == 3
    assert [name for name in decoders if not name.startswith("asyncio_")] == []

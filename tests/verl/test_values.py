import json

import numpy as np
import pytest
import torch
from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils.rollout_trace import rollout_trace_attr, rollout_trace_op
from verl_loop import Reply, batch_v0, load_tokenizer, tool_call

from otel_rollout import semconv
from otel_rollout.frameworks.verl.switch import turn_on

CAMERA = {"camera": "verl_tools.Camera"}


@pytest.fixture
def recorded(rollout):
    """What an op of a user's records of a value, as a reader gets it."""
    turn_on("demo", "exp", "otel", token2text=False, max_samples=None)

    class Owner:
        @rollout_trace_op
        async def take(self, value):
            return value

    async def record(value):
        rollout.exporter.clear()
        with rollout_trace_attr(sample_index=0, step=1, rollout_n=0):
            assert await Owner().take(value) is value
        span = next(span for span in rollout.only().spans if span.kind == "CHAIN")
        texts = span.attributes[semconv.INPUT_VALUE], span.attributes[semconv.OUTPUT_VALUE]
        assert not [text for text in texts if "object at 0x" in text or "built-in" in text]
        shown, returned = (json.loads(text) for text in texts)
        assert shown == {"value": returned}
        return returned

    return record


async def test_arrays_and_tensors_keep_shape_dtype_and_a_sample(recorded):
    array = await recorded(np.arange(20000, dtype=np.float32).reshape(100, 200))
    assert (array["shape"], array["dtype"]) == ([100, 200], "float32")
    tensor = await recorded(torch.arange(20000).reshape(100, 200))
    assert (tensor["shape"], tensor["dtype"]) == ([100, 200], "torch.int64")
    assert len(json.dumps([array, tensor])) < 4000


async def test_small_arrays_and_scalars_keep_their_values(recorded):
    assert "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]" in json.dumps(
        await recorded(np.arange(6, dtype=np.float32).reshape(2, 3))
    )
    assert "[1, 2, 3]" in json.dumps(await recorded(torch.tensor([1, 2, 3])))
    assert await recorded([np.float64(0.5), np.int64(3), np.bool_(True)]) == [0.5, 3, True]
    assert (await recorded([torch.tensor(2)]))[0]["values"] == 2


async def test_an_image_is_its_size_and_hash_and_the_same_image_has_the_same_hash(recorded):
    image = await recorded(Image.new("RGB", (8, 4), (255, 0, 0)))
    assert (image["size"], image["mode"]) == ([8, 4], "RGB")
    again, other = [await recorded(Image.new("RGB", (8, 4), color)) for color in ((255, 0, 0), (0, 255, 0))]
    assert image["sha256"] == again["sha256"] != other["sha256"]
    assert "content" not in image


async def test_a_tokenizer_is_named_and_not_spelled_out(recorded, model):
    tokenizer = await recorded(load_tokenizer(model))
    assert tokenizer["vocab_size"] == load_tokenizer(model).vocab_size
    assert len(json.dumps(tokenizer)) < 1500


async def test_verl_s_own_models(recorded):
    assert (await recorded(AgentLoopMetrics(tool_calls=1.5)))["tool_calls"] == 1.5


async def test_a_configuration_is_recorded_as_its_type(recorded, rollout):
    shown = await recorded(rollout.config().actor_rollout_ref.rollout.trace)
    assert shown == {"type": "omegaconf.dictconfig.DictConfig"}


async def test_agent_data_that_a_tool_is_given_is_its_state(rollout):
    script = [Reply(text="look\n" + tool_call("camera", {})), Reply(text="seven")]
    await rollout.v0(batch_v0(1), server=rollout.server(script=script), tools=CAMERA)
    view = rollout.only()
    (call,) = view.tools
    (execute,) = view.children(call.span_id)
    (look,) = view.children(execute.span_id)
    assert (execute.name, look.name) == ("Camera.execute", "Camera.look")
    for span in (execute, look):
        text = span.attributes[semconv.INPUT_VALUE]
        assert "object at 0x" not in text
        data = json.loads(text)["agent_data"]
        assert data["type"] == "verl.experimental.agent_loop.tool_agent_loop.AgentData"
        assert data["assistant_turns"] == 1
        assert [message["role"] for message in data["messages"]] == ["user", "assistant"]
    given = json.loads(look.attributes[semconv.INPUT_VALUE])
    assert given["image"]["size"] == [8, 4]
    assert given["array"]["shape"] == [2, 3]
    assert given["tensor"]["shape"] == [3, 4]
    assert given["scalar"] == 0.5
    assert call.attributes[semconv.TOOL_CALL_RESULT] == "agent_data, array, image, raw, scalar, tensor"


async def test_ids_in_agent_data_do_not_fill_the_trace(rollout):
    """agent_data holds the whole prompt at each tool call; the ids stand on the turns, once."""
    script = [Reply(text=tool_call("camera", {}), tokens=3000), Reply(text="seven")]
    server = rollout.server(script=script)
    await rollout.v0(batch_v0(1), server=server, tools=CAMERA)
    execute = next(span for span in rollout.only().spans if span.name == "Camera.execute")
    data = json.loads(execute.attributes[semconv.INPUT_VALUE])["agent_data"]
    assert data["prompt_ids"]["length"] == len(server.calls[0].prompt_ids) + 3000
    assert data["response_mask"]["length"] == 3000
    assert all(len(json.dumps(data[name])) < 200 for name in ("prompt_ids", "response_ids", "response_mask"))


async def test_an_image_that_a_tool_answers_with_is_its_size_and_hash(rollout):
    """The tiny model cannot see, so verl raises after the call."""
    script = [Reply(text=tool_call("photographer", {})), Reply(text="seven")]
    with pytest.raises(ValueError, match="Multimedia data can only be processed"):
        await rollout.v0(
            batch_v0(1), server=rollout.server(script=script), tools={"photographer": "verl_tools.Photographer"}
        )
    view = rollout.only()
    (call,) = view.tools
    shown = json.loads(call.attributes[semconv.TOOL_CALL_RESULT])
    assert shown["text"] == "click"
    (image,) = shown["image"]
    assert (image["size"], image["mode"], len(image["sha256"])) == ([8, 4], "RGB", 16)
    assert (call.status, view.status) == ("UNSET", "error")


async def test_every_text_of_a_rollout_is_json(rollout):
    await rollout.v0(batch_v0(1), token2text=True, reward=True)
    for span in rollout.only().spans:
        for key, value in span.attributes.items():
            if key.endswith((".messages", ".definitions", ".value", "sampling_params")) and isinstance(value, str):
                json.loads(value)
            assert "object at 0x" not in str(value), key

import base64
import hashlib
import io
import json
import subprocess
import sys
import time
import types
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import OpenAIFunctionToolSchema

from otel_rollout.content import DEFAULT_LIMIT, MAX_PIXELS, plain, to_json
from otel_rollout.messages import genai_messages, messages_json, tool_definitions_json


def read(value, **options):
    return json.loads(to_json(value, **options), parse_constant=pytest.fail)


def picture(width=4, height=3, mode="RGB", colour="red"):
    return Image.new(mode, (width, height), colour)


DTYPES = [np.dtype(name) for name in np.typecodes["All"] if name not in "OVSU"] + [np.dtype("S5"), np.dtype("U5")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 5, 100, 10_000])
def test_numpy_arrays_of_every_dtype(dtype, size):
    value = np.zeros(size, dtype)
    shown = read(value)
    assert shown["type"] == "numpy.ndarray"
    assert shown["shape"] == [size]
    assert shown["dtype"] == str(dtype)
    assert ("values" in shown) == (size <= 32)
    assert ("mean" in shown) == (size == 100 and dtype.kind in "biuf")
    assert read([value[index] for index in range(min(size, 2))]) is not None


def test_numpy_values():
    assert read(np.arange(4).reshape(2, 2))["values"] == [[0, 1], [2, 3]]
    assert read(np.array(2.5)) == {"type": "numpy.ndarray", "shape": [], "dtype": "float64", "values": 2.5}
    assert read(np.array([np.nan, np.inf, -np.inf]))["values"] == ["NaN", "Infinity", "-Infinity"]
    spread = np.arange(100.0)
    spread[::10] = np.nan
    shown = read(spread)
    assert (shown["min"], shown["max"], shown["nan"]) == (1, 99, 10)
    assert shown["mean"] == pytest.approx(np.nanmean(spread))
    assert read(np.full(100, np.nan)) == {"type": "numpy.ndarray", "shape": [100], "dtype": "float64", "nan": 100}
    messages = np.array([{"role": "user"}, None], dtype=object)
    assert read(messages)["values"] == [{"role": "user"}, None]
    structured = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
    assert read(structured)["values"] == [[0, 0.0], [0, 0.0]]


def test_numpy_scalars():
    scalars = [
        np.int64(3),
        np.float32(0.5),
        np.bool_(True),
        np.str_("a"),
        np.float64("nan"),
        np.longdouble(2),
        np.float16(1),
    ]
    assert read(scalars) == [3, 0.5, True, "a", "NaN", "2.0", 1.0]
    assert read(np.datetime64("2024-01-02")) == "2024-01-02"
    assert read({np.int64(3): np.complex64(1j)}) == {"3": "1j"}
    assert type(plain(np.float64(1))) is float


TORCH_DTYPES = [
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 5, 100, 10_000])
def test_tensors_of_every_dtype(dtype, size):
    shown = read(torch.empty(size, dtype=dtype).view(size))
    assert shown["type"] == "torch.Tensor"
    assert shown["shape"] == [size]
    assert shown["dtype"] == str(dtype)
    assert shown["device"] == "cpu"


def test_tensor_values():
    small = torch.tensor([1.5, float("nan")], dtype=torch.bfloat16, requires_grad=True)
    assert read(small) == {
        "type": "torch.Tensor",
        "shape": [2],
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "values": [1.5, "NaN"],
    }
    shown = read(torch.arange(100, dtype=torch.bfloat16).reshape(10, 10).T)
    assert (shown["shape"], shown["min"], shown["max"], shown["mean"]) == ([10, 10], 0, 99, 49.5)
    assert set(read(torch.zeros(5000))) == {"type", "shape", "dtype", "device"}
    assert read(torch.nn.Parameter(torch.ones(1)))["values"] == [1]
    assert read({"dtype": torch.float32, "device": torch.device("cpu"), "size": torch.Size([1])}) == {
        "dtype": "torch.float32",
        "device": "cpu",
        "size": [1],
    }


class Watched(torch.Tensor):
    """A tensor that must not be computed with."""

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        if function.__name__ != "__get__":
            raise AssertionError(function)
        return super().__torch_function__(function, kinds, args, kwargs or {})


def test_values_of_other_tensors_are_not_asked_for():
    meta = torch.zeros(3, device="meta")
    assert read(meta) == {"type": "torch.Tensor", "shape": [3], "dtype": "torch.float32", "device": "meta"}
    for value in (
        torch.zeros(3).as_subclass(Watched),
        torch.zeros(3).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ):
        assert read(value)["dtype"] == "torch.float32"
        assert "values" not in read(value)
    with torch._subclasses.FakeTensorMode():  # what torch.compile hands out
        assert read(torch.zeros(3))["shape"] == [3]


def test_modules_do_not_unfold():
    assert read(torch.nn.Linear(2, 2)) == {"type": "torch.nn.modules.linear.Linear"}


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_images(mode):
    image = picture(mode=mode, colour=0 if mode in ("1", "L", "P", "I", "F", "I;16") else None)
    shown = read({"image": image})["image"]
    assert shown == {
        "type": "PIL.Image.Image",
        "mode": mode,
        "size": [4, 3],
        "format": None,
        "sha256": hashlib.sha256(image.tobytes()).hexdigest()[:16],
    }
    content = read({"image": image}, images=True)["image"]["content"]
    head, _, data = content.partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (4, 3)


def test_big_images_are_not_hashed_and_their_content_is_whole_or_absent():
    assert "sha256" not in read(picture(MAX_PIXELS + 1, 1))
    three = read([picture(MAX_PIXELS // 2, 1)] * 3)
    assert ["sha256" in shown for shown in three] == [True, True, False]
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8))
    assert read(noise, images=True)["content"].startswith("… [cut: ")


def test_an_image_file_is_not_decoded(tmp_path):
    picture().save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert read(image) == {
            "type": "PIL.PngImagePlugin.PngImageFile",
            "mode": "RGB",
            "size": [4, 3],
            "format": "PNG",
        }
        assert image.tile
        image.load()
        assert "sha256" in read(image)


class Model(BaseModel):
    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)
    name: str
    ids: list[int] = []
    anything: Any = None
    token: SecretStr | None = None
    hidden: str = Field("x", repr=False)
    left_out: str = Field("y", exclude=True)
    _private: int = 1


def test_pydantic_models():
    model = Model(name="a", ids=list(range(100)), anything=object(), token=SecretStr("password"), more=1)
    shown = read(model)
    assert shown == {
        "name": "a",
        "ids": {"type": "list", "length": 100, "head": list(range(8))},
        "anything": {"type": "object"},
        "token": {"type": "pydantic.types.SecretStr"},
        "more": 1,
    }
    model.anything = model
    assert read(model)["anything"] == "… [cycle]"
    assert read(Model.model_construct()) is not None


def test_pydantic_models_of_version_one():
    from pydantic.v1 import BaseModel as OldModel

    class Old(OldModel):
        name: str = "a"

    assert read(Old()) == {"name": "a"}


def test_what_verl_passes_around():
    data = AgentData(
        messages=[{"role": "user", "content": "hi"}],
        image_data=[picture()],
        video_data=[(torch.zeros(10, 3, 64, 64), {"fps": 1})],
        audio_data=None,
        mm_processor_kwargs=None,
        metrics={},
        request_id="r",
        tools_kwargs={},
    )
    data.prompt_ids = list(range(10_000))
    data.tool_calls = [FunctionCall(name="f", arguments="{}")]
    shown = read(data)
    assert shown["type"] == "verl.experimental.agent_loop.tool_agent_loop.AgentData"
    assert shown["prompt_ids"] == {"type": "list", "length": 10_000, "head": list(range(8))}
    assert shown["image_data"][0]["size"] == [4, 3]
    assert shown["video_data"][0][0]["shape"] == [10, 3, 64, 64]
    assert shown["tool_calls"][0]["name"] == "f"
    assert len(to_json(data)) < 1500
    output = AgentLoopOutput(
        prompt_ids=[1] * 1000, response_ids=[2] * 1000, response_mask=[1] * 1000, metrics=AgentLoopMetrics()
    )
    assert len(to_json(output)) < 1000
    assert read(output)["response_mask"]["length"] == 1000


def test_tokenizers():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words)
    fast.name_or_path = "org/model"
    shown = read({"tokenizer": fast})["tokenizer"]
    assert shown["type"].endswith("PreTrainedTokenizerFast") or shown["type"].endswith("TokenizersBackend")
    assert (shown["name_or_path"], shown["vocab_size"]) == ("org/model", 2)
    assert len(shown) == 3
    assert read(Tokenizer(models.WordLevel()))["type"] == "tokenizers.Tokenizer"
    assert read(fast("a b"))["data"]["input_ids"] == [0, 1]


def test_msgspec_structs():
    struct = msgspec.defstruct("Sampling", [("n", int), ("stop", list)])
    assert read(struct(1, ["x"])) == {"n": 1, "stop": ["x"]}


def test_images_in_messages():
    image = picture()
    message = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what?"}, image]}
    ((shown),) = genai_messages([message])
    summary = {
        "type": "PIL.Image.Image",
        "mode": "RGB",
        "size": [4, 3],
        "format": None,
        "sha256": hashlib.sha256(image.tobytes()).hexdigest()[:16],
    }
    blob = {"type": "blob", "modality": "image", "mime_type": "image/x-pixels", "summary": summary}
    assert shown["parts"] == [blob, {"type": "text", "content": "what?"}, blob]
    ((shown),) = genai_messages([message], images=True)
    assert shown["parts"][0]["mime_type"] == "image/png"
    assert Image.open(io.BytesIO(base64.b64decode(shown["parts"][0]["content"]))).size == (4, 3)
    (response,) = genai_messages([{"role": "tool", "content": [image]}])[0]["parts"]
    assert response["response"] == [blob]


def test_arrays_of_messages():
    raw_prompt = np.empty(2, dtype=object)
    raw_prompt[:] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": np.str_("yes")}]
    assert [message["role"] for message in genai_messages(raw_prompt)] == ["user", "assistant"]
    assert genai_messages(raw_prompt)[1]["parts"] == [{"type": "text", "content": "yes"}]
    assert len(genai_messages(np.zeros(1_000_000))) == 1


def test_messages_and_tools_of_pydantic():
    class Message(BaseModel):
        role: str
        content: str | None = None
        tool_calls: list[FunctionCall] = []

    message = Message(role="assistant", tool_calls=[FunctionCall(name="f", arguments='{"a": 1}', tool_call_id="c")])
    call = {"type": "tool_call", "id": "c", "name": "f", "arguments": {"a": 1}}
    assert json.loads(messages_json([message])) == [{"role": "assistant", "parts": [call]}]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"name": "f", "description": "d", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    assert json.loads(tool_definitions_json([schema])) == [{"type": "function", **function}]


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(10_000_000),
        torch.zeros(10_000_000),
        np.full(10_000_000, None),
        [np.float32(1)] * 1_000_000,
        [torch.zeros(2)] * 100_000,
        {"images": [picture(64, 64)] * 10_000},
        types.SimpleNamespace(prompt_ids=np.arange(1_000_000), response_ids=list(range(1_000_000))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_huge_values_take_little_time(value):
    took = []
    for _ in range(3):
        started = time.perf_counter()
        written = to_json(value)
        took.append(time.perf_counter() - started)
    assert len(written.encode()) <= DEFAULT_LIMIT
    assert min(took) < 0.05


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from otel_rollout import messages; messages.messages_json(['x']);"
        "print(sorted({'numpy', 'torch', 'PIL', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"

import base64
import hashlib
import json
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout.content import LEAST_LIMIT
from otel_rollout.messages import (
    MAX_PARTS,
    assistant_message,
    genai_messages,
    messages_json,
    tool_definitions_json,
)

PIXEL = base64.b64encode(b"not really a png").decode()


def parts(message, **options):
    ((shown),) = genai_messages([message], **options)
    return shown["parts"]


def is_schema(messages):
    """Say whether every message has a role and parts with a type."""
    return all(
        set(message) <= {"role", "parts", "name", "finish_reason"}
        and isinstance(message["role"], str)
        and all(isinstance(part["type"], str) for part in message["parts"])
        for message in messages
    )


def test_a_conversation_with_a_tool_call():
    conversation = [
        {"role": "system", "content": "You calculate."},
        {"role": "user", "content": "1+1?", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "easy",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2", "finish_reason": "stop"},
    ]
    shown = genai_messages(conversation)
    assert shown == [
        {"role": "system", "parts": [{"type": "text", "content": "You calculate."}]},
        {"role": "user", "parts": [{"type": "text", "content": "1+1?"}], "name": "ann"},
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "easy"},
                {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1, "b": 1}},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "2"}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "2"}], "finish_reason": "stop"},
    ]
    assert json.loads(messages_json(conversation)) == shown
    assert genai_messages(shown) == shown


@pytest.mark.parametrize(
    ("given_arguments", "recorded"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1', '{"a": 1'),
        ("[1, 2]", "[1, 2]"),
        ("", ""),
        ('{"a": NaN}', {"a": "NaN"}),
        ('{"a":' * 100_000, None),
        ('{"a":' + "[" * 50_000, '{"a":' + "[" * 50_000),
        (None, None),
    ],
)
def test_arguments_are_objects_where_they_parse(given_arguments, recorded):
    (part,) = parts({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given_arguments}}]})
    if given_arguments == '{"a":' * 100_000:
        assert part["arguments"] == given_arguments
    else:
        assert part == {"type": "tool_call", "name": "f", "arguments": recorded}


def test_tool_calls_that_are_flat_or_objects():
    flat = {"name": "f", "arguments": "{}"}
    held = types.SimpleNamespace(id=7, function=types.SimpleNamespace(name="f", arguments="{}"))
    verl = types.SimpleNamespace(name="f", arguments="{}", tool_call_id="c1")
    shown = parts({"role": "assistant", "content": None, "tool_calls": (flat, held, verl)})
    call = {"type": "tool_call", "name": "f", "arguments": {}}
    assert shown == [call, {**call, "id": 7}, {**call, "id": "c1"}]


def test_message_objects():
    message = types.SimpleNamespace(role="assistant", content="hi", tool_calls=None)
    assert genai_messages([message]) == [{"role": "assistant", "parts": [{"type": "text", "content": "hi"}]}]


def test_what_is_no_list_of_messages():
    user = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
    assert genai_messages("hi") == user
    assert genai_messages(["hi"]) == user
    assert genai_messages({"role": "user", "content": "hi"}) == user
    assert genai_messages(({"role": "user", "content": "hi"},)) == user
    assert genai_messages(None) == genai_messages([]) == []
    assert messages_json(None) == "[]"
    assert genai_messages([3]) == [{"role": "unknown", "parts": [{"type": "text", "content": "3"}]}]
    generator = (number for number in range(3))
    (message,) = genai_messages(generator)
    assert message["parts"][0]["content"].startswith('{"type":"generator"')
    assert list(generator) == [0, 1, 2]


def test_content_in_parts():
    assert parts(
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}]}
    ) == [
        {"type": "text", "content": "a"},
        {"type": "text", "content": "b"},
        {"type": "text", "content": "c"},
    ]
    assert parts({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}) == [
        {"type": "reasoning", "content": "hm"}
    ]
    assert parts({"role": "user", "content": [{"type": "own", "a": 1}]}) == [{"type": "own", "a": 1}]
    assert parts({"role": "user", "content": {"a": 1}}) == [{"type": "text", "content": '{"a":1}'}]
    assert parts({"role": "user", "content": 5}) == [{"type": "text", "content": "5"}]
    assert parts({"role": "user", "content": [{"type": "image"}]}) == [{"type": "image"}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        {"type": "image_url", "image_url": "https://a/b.png"},
        {"type": "image", "image": "https://a/b.png"},
        {"type": "image", "url": "https://a/b.png"},
    ],
)
def test_image_addresses(part):
    assert parts({"role": "user", "content": [part]}) == [
        {"type": "uri", "modality": "image", "uri": "https://a/b.png"}
    ]


def test_data_uris_without_and_with_content():
    message = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}],
    }
    summary = {"bytes": 16, "sha256": hashlib.sha256(b"not really a png").hexdigest()[:16]}
    blob = {"type": "blob", "modality": "image", "mime_type": "image/png", "summary": summary}
    assert parts(message) == [blob]
    assert parts(message, images=True) == [{**blob, "content": PIXEL}]


def test_audio_and_video():
    audio = {"type": "input_audio", "input_audio": {"data": PIXEL, "format": "wav"}}
    video = {"type": "video", "video": [1, 2]}
    shown = parts({"role": "user", "content": [audio, video, {"type": "video_url", "video_url": {"url": "file:///v"}}]})
    assert (shown[0]["modality"], shown[0]["mime_type"], shown[0]["summary"]["bytes"]) == ("audio", "audio/wav", 16)
    assert shown[1] == {"type": "blob", "modality": "video", "summary": [1, 2]}
    assert shown[2] == {"type": "uri", "modality": "video", "uri": "file:///v"}


def test_data_that_is_not_base64_or_too_long_to_hash():
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,a"}}
    long = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4_000_000}}
    shown = parts({"role": "user", "content": [broken, long]})
    assert shown[0]["summary"]["error"] == "not base64"
    assert shown[1]["summary"] == {"bytes": 3_000_000}


def test_content_of_an_image_is_never_cut_in_the_middle():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}
    (shown,) = parts({"role": "user", "content": [image]}, limit=10_000, images=True)
    assert shown["content"] == "… [cut: 40000 characters in all]"


def test_tool_responses_that_are_no_string():
    assert parts({"role": "tool", "content": {"a": 1}}) == [{"type": "tool_call_response", "response": {"a": 1}}]
    assert parts({"role": "tool", "content": [1, 2]}) == [{"type": "tool_call_response", "response": [1, 2]}]
    assert parts({"role": "tool", "content": None}) == [{"type": "tool_call_response", "response": None}]
    text = {"type": "text", "text": "two"}
    assert parts({"role": "tool", "content": [text]})[0]["response"] == "two"
    uri = {"type": "uri", "modality": "image", "uri": "https://a"}
    assert parts({"role": "tool", "content": [text, {"type": "image", "url": "https://a"}]})[0]["response"] == [
        {"type": "text", "content": "two"},
        uri,
    ]


def test_the_longest_texts_are_cut_first():
    conversation = [
        {"role": "system", "content": "s" * 3000},
        {"role": "user", "content": "u" * 100_000},
        {"role": "assistant", "content": "a" * 500},
        {"role": "tool", "content": "t" * 50_000},
        {"role": "assistant", "content": "the answer"},
    ]
    written = messages_json(conversation, limit=20_000)
    shown = json.loads(written)
    assert 19_000 < len(written.encode()) <= 20_000
    assert [shown[index]["parts"][0]["content"] for index in (0, 2, 4)] == ["s" * 3000, "a" * 500, "the answer"]
    assert shown[1]["parts"][0]["content"].endswith("u… [cut: 100000 characters in all]")
    assert shown[3]["parts"][0]["response"].endswith("t… [cut: 50000 characters in all]")


@pytest.mark.parametrize("limit", [LEAST_LIMIT, 1000, 10_000, 1_000_000])
def test_of_too_many_messages_the_middle_ones_are_left_out(limit):
    conversation = [{"role": "user", "content": f"message {number} " + "x" * 50} for number in range(5000)]
    written = messages_json(conversation, limit=limit)
    shown = json.loads(written)
    assert len(written.encode()) <= limit
    assert is_schema(shown)
    if limit > 1000:
        (marker,) = [message for message in shown if message["role"] == "unknown"]
        left_out = int(marker["parts"][0]["content"].split()[2])
        assert left_out == 5000 - (len(shown) - 1)
        assert shown[0]["parts"][0]["content"] == conversation[0]["content"]
        assert shown[-1]["parts"][0]["content"] == conversation[-1]["content"]


@pytest.mark.parametrize("limit", [LEAST_LIMIT, 500, 1000, 3000, 30_000])
def test_what_is_cut_keeps_the_schema(limit):
    calls = [{"id": str(number), "function": {"name": "f", "arguments": {"a": [1] * 30}}} for number in range(300)]
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "part"}] * 300},
        {"role": "assistant", "content": "x", "tool_calls": calls},
        {"role": "r" * 1000, "name": "\0" * 1000, "content": "y"},
    ]
    written = messages_json(conversation, limit=limit)
    assert len(written.encode()) <= limit
    assert is_schema(json.loads(written))


def test_too_many_parts():
    shown = parts({"role": "user", "content": ["part"] * (MAX_PARTS + 5)})
    assert len(shown) == MAX_PARTS + 1
    assert shown[-1] == {"type": "text", "content": "… [cut: 5 parts]"}


def test_the_result_holds_nothing_of_the_callers():
    arguments = {"a": [1]}
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    shown = genai_messages([message])
    arguments["a"].append(2)
    message["role"] = "user"
    assert shown == [{"role": "assistant", "parts": [{"type": "tool_call", "name": "f", "arguments": {"a": [1]}}]}]


def test_tool_definitions():
    function = {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "default": None},
        "strict": True,
    }
    expected = [{"type": "function", "name": "add", "description": "Adds.", "parameters": function["parameters"]}]
    assert json.loads(tool_definitions_json([{"type": "function", "function": function}])) == expected
    assert json.loads(tool_definitions_json([function])) == expected
    assert json.loads(tool_definitions_json(None)) == []
    assert json.loads(tool_definitions_json([5])) == [{"type": "function", "description": "5"}]


def test_assistant_message():
    assert assistant_message("hi") == {"role": "assistant", "parts": [{"type": "text", "content": "hi"}]}
    shown = assistant_message("", [{"name": "f", "arguments": '{"a": 1}'}], finish_reason="tool_calls")
    assert shown == {
        "role": "assistant",
        "parts": [{"type": "tool_call", "name": "f", "arguments": {"a": 1}}],
        "finish_reason": "tool_calls",
    }
    assert genai_messages([shown]) == [shown]


class Hostile:
    def refuse(self, *_args):
        raise ValueError

    __getattribute__ = __iter__ = __len__ = __eq__ = __hash__ = __repr__ = __bool__ = refuse


class HostileMessage(dict):
    def get(self, *_args):
        raise ValueError

    __getitem__ = __iter__ = __contains__ = get


def test_hostile_messages():
    for hostile in (Hostile(), object(), HostileMessage(role="user", content="hi"), [[]], {1: 2}, type, float("nan")):
        for messages in (
            hostile,
            [hostile],
            [{"role": hostile, "content": hostile, "tool_calls": hostile, "name": hostile}],
        ):
            assert isinstance(genai_messages(messages), list)
            assert is_schema(json.loads(messages_json(messages)))
        assert isinstance(json.loads(tool_definitions_json([hostile])), list)
    assert genai_messages(HostileMessage(role="user", content="hi"))[0]["parts"][0]["content"] == "hi"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200) | st.binary(max_size=5)
NAMES = st.sampled_from(
    [
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "type",
        "text",
        "image_url",
        "url",
        "id",
        "parts",
    ]
)
TYPES = st.sampled_from(["text", "image", "image_url", "input_audio", "video", "thinking", "tool", "assistant", "user"])
ODD = st.recursive(
    LEAVES | TYPES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=30,
)


@given(ODD, st.integers(LEAST_LIMIT, 3000))
@settings(max_examples=200, deadline=None)
def test_whatever_is_given_a_bounded_list_of_messages_comes_back(messages, limit):
    written = messages_json(messages, limit=limit)
    assert len(written.encode()) <= limit
    shown = json.loads(written)
    assert isinstance(shown, list)
    assert genai_messages(messages, limit=limit) == shown

"""generation.py: one turn as a span, by the letter of CONVENTIONS.md."""

import json
from types import SimpleNamespace

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from otel_rollout import rollout_trace_attr, rollout_trace_op
from otel_rollout.generation import Generation, Response, Segment, close_turn, read_response, sampling_attributes
from otel_rollout.op import instrument


def turns(spans):
    return [span for span in spans.get_finished_spans() if span.attributes["openinference.span.kind"] == "LLM"]


def root_of(spans):
    (root,) = [span for span in spans.get_finished_spans() if span.parent is None]
    return root


def test_a_token_in_token_out_generation_by_the_letter(spans):
    @rollout_trace_op(kind="llm")
    def generate(prompt_ids, sampling_params):
        return {"token_ids": [7, 8], "stop_reason": "stop"}

    with rollout_trace_attr():
        generate([1, 2, 3], {"temperature": 1, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.1})
    (span,) = turns(spans)
    assert (span.name, span.kind, span.status.status_code) == (
        "text_completion unknown",
        SpanKind.CLIENT,
        StatusCode.UNSET,
    )
    found = {key: value for key, value in span.attributes.items() if not key.startswith("rollout.token_delta")}
    assert found == {
        "openinference.span.kind": "LLM",
        "code.function.name": f"{__name__}.{generate.__qualname__}",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "unknown",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": -1,
        "rollout.sampling_params": '{"repetition_penalty":1.1}',
        "rollout.turn": 1,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert type(span.attributes["gen_ai.request.temperature"]) is float


CHAT = SimpleNamespace(
    id="r-1",
    choices=[SimpleNamespace(message={"role": "assistant", "content": "4"}, finish_reason="length")],
    usage=SimpleNamespace(
        prompt_tokens=11, completion_tokens=1, prompt_tokens_details=SimpleNamespace(cached_tokens=8)
    ),
)


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_chat_completion_by_the_letter(spans, as_dict):
    result = json.loads(json.dumps(CHAT, default=vars)) if as_dict else CHAT

    @rollout_trace_op(kind="llm")
    def chat(messages, model, temperature=None, max_tokens=None, stop=None):
        return result

    with rollout_trace_attr():
        assert chat([{"role": "user", "content": "2+2?"}], "qwen", temperature=0, max_tokens=16, stop="\n") is result
    (span,) = turns(spans)
    assert span.name == "chat qwen"
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "qwen",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.stop_sequences": ("\n",),
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.id": "r-1",
        "gen_ai.input.messages": '[{"role":"user","parts":[{"type":"text","content":"2+2?"}]}]',
        "gen_ai.output.messages": '[{"role":"assistant","parts":[{"type":"text","content":"4"}]}]',
        "rollout.message_prefix_count": 0,
    }
    assert {key: span.attributes.get(key) for key in expected} == expected


def test_a_text_prompt_and_a_text_result(spans):
    @rollout_trace_op(kind="llm")
    def complete(prompt):
        return "there"

    with rollout_trace_attr():
        complete("hi")
    (span,) = turns(spans)
    assert json.loads(span.attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]}
    ]
    assert json.loads(span.attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "there"}]}
    ]


def test_the_root_sums_the_turns(spans):
    @rollout_trace_op(kind="llm")
    def generate(prompt_ids):
        return {"token_ids": [9, 9]}

    with rollout_trace_attr():
        generate([1, 2, 3])
        generate([1, 2, 3, 9, 9, 4])
        generate([1, 2, 3, 9, 9, 4, 9, 9, 5, 6])
    assert [span.attributes["rollout.turn"] for span in turns(spans)] == [1, 2, 3]
    expected = {
        "rollout.turns": 3,
        "gen_ai.usage.input_tokens": 19,
        "gen_ai.usage.output_tokens": 6,
        "rollout.response_tokens": 6,
        "rollout.observation_tokens": 3,
    }
    found = root_of(spans).attributes
    assert {key: found[key] for key in expected} == expected
    assert all(type(found[key]) is int for key in expected)
    assert "gen_ai.usage.cache_read.input_tokens" not in found


def test_cached_tokens_are_summed_where_they_are_known(spans):
    results = [CHAT, {"token_ids": [1]}, CHAT]

    @rollout_trace_op(kind="llm")
    def chat(at):
        return results[at]

    with rollout_trace_attr():
        for at in range(3):
            chat(at)
    assert root_of(spans).attributes["gen_ai.usage.cache_read.input_tokens"] == 16


def test_a_failed_generation(spans):
    @rollout_trace_op(kind="llm")
    def generate(prompt_ids):
        raise ConnectionError("gone")

    with rollout_trace_attr(), pytest.raises(ConnectionError, match="gone"):
        generate([1])
    (span,) = turns(spans)
    assert (span.attributes["error.type"], span.attributes["rollout.turn"]) == ("ConnectionError", 1)
    assert "gen_ai.usage.output_tokens" not in span.attributes
    assert root_of(spans).attributes["rollout.turns"] == 1


def test_sampling_parameters_keep_standard_names_and_types():
    found = sampling_attributes(
        {
            "temperature": "0.5",
            "top_k": 5.0,
            "max_new_tokens": 7,
            "seed": None,
            "stop": ["a", 1],
            "n": 2,
            "logprobs": True,
            "top_p": "x",
        }
    )
    assert found == {
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.stop_sequences": ["a", "1"],
        "rollout.sampling_params": '{"n":2,"logprobs":true,"top_p":"x"}',
    }


@pytest.mark.parametrize("stop", [5, object()])
def test_an_odd_stop_costs_nothing_but_itself(spans, stop):
    @rollout_trace_op(kind="llm")
    def generate(prompt_ids, sampling_params):
        return {"token_ids": [1]}

    with rollout_trace_attr():
        generate([1], {"stop": stop, "temperature": 1})
    (span,) = turns(spans)
    assert span.attributes["gen_ai.request.temperature"] == 1.0
    assert span.attributes["gen_ai.usage.output_tokens"] == 1


@pytest.mark.parametrize("params", [None, "greedy", 7, SimpleNamespace(temperature=1)])
def test_sampling_parameters_of_an_unknown_form_are_left_out(spans, params):
    @rollout_trace_op(kind="llm")
    def generate(prompt_ids, sampling_params):
        return {"token_ids": [1]}

    with rollout_trace_attr():
        generate([1], params)
    assert turns(spans)[0].attributes["gen_ai.usage.output_tokens"] == 1


@pytest.mark.parametrize(
    "result",
    [
        *(None, 7, [], {}, object(), [1, 2]),
        *({"choices": choices} for choices in ([], [{}], 3)),
        *({"token_ids": ids} for ids in (None, "text", [None])),
    ],
)
def test_any_result_leaves_a_turn(spans, result, monkeypatch):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")

    @rollout_trace_op(kind="llm")
    def generate(prompt_ids):
        return result

    with rollout_trace_attr():
        assert generate([1]) is result
        assert generate([1, 2]) is result
    assert [span.attributes["rollout.turn"] for span in turns(spans)] == [1, 2]
    assert root_of(spans).attributes["rollout.turns"] == 2


def test_read_response_of_openai_text_fields():
    response = read_response({"token_ids": [1], "log_probs": [-1.0], "mask": [1], "text": "x", "finish_reason": "stop"})
    assert (response.token_ids, response.logprobs, response.mask, response.finish_reason) == ([1], [-1.0], [1], "stop")
    assert response.messages == [{"role": "assistant", "content": "x"}]


class Partial(Generation):
    """Like an adapter of a framework: a generation in two parts, under two policies."""

    def keep(self, call, result):
        turn = call.notes
        for number, (version, ids) in enumerate(result):
            part = Response(
                token_ids=ids,
                output_tokens=len(ids),
                policy_version=version,
                finish_reason="abort" if number == 0 else "stop",
            )
            turn.segments.append(Segment(call.started + number, call.started + number + 1, part))
        response = Response(
            token_ids=[i for _, ids in result for i in ids],
            policy_version=result[-1][0],
            preemptions=2,
            server_address="node1:8000",
            finish_reason="stop",
        )
        return close_turn(call, response)


def test_a_partial_rollout_has_a_child_for_each_segment(spans):
    def generate(prompt_ids):
        return [(4, [7]), (5, [8, 9])]

    with rollout_trace_attr(step=6):
        instrument(generate, Partial())([1, 2])
    segments = [span for span in turns(spans) if "rollout.segment" in span.attributes]
    (turn,) = [span for span in turns(spans) if "rollout.turn" in span.attributes]
    assert [
        (
            s.attributes["rollout.segment"],
            s.attributes["rollout.policy_version"],
            s.attributes["gen_ai.usage.output_tokens"],
            s.attributes["gen_ai.response.finish_reasons"],
        )
        for s in segments
    ] == [
        (1, 4, 1, ("abort",)),
        (2, 5, 2, ("stop",)),
    ]
    assert {s.parent.span_id for s in segments} == {turn.context.span_id}
    assert {s.name for s in segments} == {turn.name}
    assert (
        turn.attributes["rollout.policy_version"],
        turn.attributes["rollout.preemptions"],
        turn.attributes["server.address"],
    ) == (5, 2, "node1:8000")
    found = root_of(spans).attributes
    assert (found["rollout.policy_version_min"], found["rollout.policy_version_max"], found["rollout.turns"]) == (
        4,
        5,
        1,
    )

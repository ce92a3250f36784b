import pytest
from verl_loop import Reply, batch_v0, batch_v1, tool_call

from otel_rollout import semconv

CALL = tool_call("calculator", {"expression": "1+1"})
USAGE = (semconv.INPUT_TOKENS, semconv.OUTPUT_TOKENS, semconv.CACHE_READ_TOKENS)


def typed(attributes, *without):
    return {key: (type(value), value) for key, value in attributes.items() if not key.startswith(without)}


async def test_exact_names_values_and_types(rollout):
    script = [
        Reply(text=CALL, tokens=50, cached=96, preempted=2, versions=(4,)),
        Reply(text="seven", cached=0, versions=(5,)),
    ]
    server = rollout.server(script=script)
    await rollout.v0(batch_v0(1), server=server)
    view = rollout.only()
    first = view.turns[0].span
    assert (first.name, first.kind, first.status) == ("chat tiny", "LLM", "UNSET")
    kinds = {span.name: span.kind.name for span in rollout.exporter.get_finished_spans()}
    assert (kinds.pop("chat tiny"), set(kinds.values())) == ("CLIENT", {"INTERNAL"})
    sent = server.calls[0]
    assert typed(first.attributes, semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES, "rollout.token_delta") == {
        semconv.SPAN_KIND: (str, "LLM"),
        semconv.OPERATION_NAME: (str, "chat"),
        semconv.REQUEST_MODEL: (str, "tiny"),
        semconv.PROVIDER_NAME: (str, "vllm"),
        "gen_ai.request.temperature": (float, 1.0),
        "gen_ai.request.top_p": (float, 1.0),
        "gen_ai.request.top_k": (int, -1),
        semconv.SAMPLING_PARAMS: (str, '{"repetition_penalty":1.0,"logprobs":false}'),
        semconv.TURN: (int, 1),
        semconv.MESSAGE_PREFIX_COUNT: (int, 0),
        semconv.INPUT_TOKENS: (int, len(sent.prompt_ids)),
        semconv.OUTPUT_TOKENS: (int, 50),
        semconv.CACHE_READ_TOKENS: (int, 96),
        semconv.FINISH_REASONS: (list, ["stop"]),
        semconv.PREEMPTIONS: (int, 2),
        semconv.POLICY_VERSION: (int, 4),
        semconv.CODE_FUNCTION_NAME: (str, "verl.workers.rollout.llm_server.LLMServerClient.generate"),
    }
    assert typed({key: first.attributes[key] for key in first.attributes if "token_delta" in key}).keys() == {
        semconv.DELTA_PROMPT,
        semconv.DELTA_COMPLETION,
        semconv.DELTA_PREFIX_LENGTH,
        semconv.DELTA_PREFIX_HASH,
    }
    assert view.turns[1].span.attributes[semconv.CACHE_READ_TOKENS] == 0
    assert [turn.policy_version for turn in view.turns] == [4, 5]


async def test_the_root_sums_the_turns(rollout):
    script = [
        Reply(text=CALL, tokens=50, cached=96, versions=(4,)),
        Reply(text="seven", tokens=20, cached=8, versions=(5,)),
    ]
    server = rollout.server(script=script)
    await rollout.v0(batch_v0(1), server=server)
    first, second = (len(call.prompt_ids) for call in server.calls)
    attributes = rollout.only().root.attributes
    assert [attributes[key] for key in USAGE] == [first + second, 70, 104]
    assert attributes[semconv.RESPONSE_TOKENS] == 70
    assert attributes[semconv.OBSERVATION_TOKENS] == second - first - 50
    assert (attributes[semconv.POLICY_VERSION_MIN], attributes[semconv.POLICY_VERSION_MAX]) == (4, 5)
    assert attributes[semconv.TURNS] == 2


async def test_an_engine_that_says_nothing_of_caches_and_preemptions(rollout):
    await rollout.v0(batch_v0(1), server=rollout.server(script=[Reply(text="seven", preempted=None)]))
    view = rollout.only()
    assert semconv.CACHE_READ_TOKENS not in view.root.attributes
    assert not {semconv.CACHE_READ_TOKENS, semconv.PREEMPTIONS} & view.turns[0].span.attributes.keys()


async def test_validation_parameters_are_those_of_validation(rollout):
    own = {"actor_rollout_ref__rollout__val_kwargs__temperature": 0.25}
    await rollout.v1(batch_v1(1, validate=True), turns=1, **own)
    assert rollout.only().turns[0].span.attributes["gen_ai.request.temperature"] == 0.25


async def test_finish_reason_length_is_recovered(rollout):
    """verl's vLLM server says "completed" also for a generation that ran into its limit."""
    budget = 300
    reply = Reply(tokens=budget, closed=False)
    await rollout.v0(batch_v0(1), server=rollout.server(script=[reply]), response_length=budget, prompt_length=2048)
    view = rollout.only()
    assert [turn.finish_reason for turn in view.turns] == ["length"]
    assert view.status == "truncated"


async def test_a_full_budget_that_ends_with_the_end_token_is_a_stop(rollout):
    await rollout.v0(batch_v0(1), server=rollout.server(script=[Reply(tokens=300)]), response_length=300)
    assert [turn.finish_reason for turn in rollout.only().turns] == ["stop"]


async def test_the_limit_of_a_later_turn_is_what_prompt_and_response_leave(rollout):
    server = rollout.server(script=[Reply(text=CALL, tokens=100), Reply(tokens=150, closed=False)])
    await rollout.v0(batch_v0(1), server=server)
    whole = len(server.calls[1].prompt_ids) + 150
    rollout.exporter.clear()
    # Now exactly so much room that the second turn cannot go on.
    first = len(server.calls[0].prompt_ids)
    again = rollout.server(script=[Reply(text=CALL, tokens=100), Reply(tokens=150, closed=False)])
    await rollout.v0(batch_v0(1), server=again, prompt_length=first + 20, response_length=whole - first - 20)
    assert [turn.finish_reason for turn in rollout.only().turns] == ["stop", "length"]


async def test_other_stop_reasons_stay_what_the_server_says(rollout):
    script = [Reply(text=CALL, stop_reason="stop_sequence"), Reply(text="seven", stop_reason=None)]
    await rollout.v0(batch_v0(1), server=rollout.server(script=script))
    assert [turn.finish_reason for turn in rollout.only().turns] == ["stop_sequence", None]


async def test_logprobs_are_left_out_by_default(rollout):
    await rollout.v0(batch_v0(1), server=rollout.server(logprobs=True), logprobs=True)
    assert [turn.logprobs for turn in rollout.only().turns] == [None, None, None]


async def test_partial_rollout_is_one_turn_with_a_child_for_each_segment(rollout):
    cut = Reply(text=CALL, tokens=90, cuts=(40, 0), versions=(3, 4, 5), cached=64, preempted=1)
    server = rollout.server(script=[cut, Reply(text="seven", tokens=10, versions=(6,))])
    await rollout.v1(batch_v1(1), server=server, fully_async=True)
    view = rollout.only()
    assert [call.stop_reason for call in server.calls] == ["aborted", "aborted", "completed", "completed"]
    turn, last = view.turns
    assert [span.name for span in view.generations] == ["chat tiny", "chat tiny"]
    assert len([span for span in view.spans if span.kind == "LLM"]) == 5
    assert view.root.attributes[semconv.TURNS] == 2
    prompt = len(server.calls[0].prompt_ids)
    assert [typed(span.attributes, "gen_ai.request") for span in turn.segments] == [
        {
            semconv.SPAN_KIND: (str, "LLM"),
            semconv.OPERATION_NAME: (str, "chat"),
            semconv.SEGMENT: (int, number),
            semconv.INPUT_TOKENS: (int, prompt + before),
            semconv.OUTPUT_TOKENS: (int, tokens),
            semconv.CACHE_READ_TOKENS: (int, 64),
            semconv.FINISH_REASONS: (list, [reason]),
            semconv.PREEMPTIONS: (int, 1),
            semconv.POLICY_VERSION: (int, version),
            semconv.CODE_FUNCTION_NAME: (str, "verl.workers.rollout.llm_server.FullyAsyncLLMServerClient.generate"),
        }
        for number, before, tokens, reason, version in [
            (1, 0, 40, "abort", 3), (2, 40, 0, "abort", 4), (3, 40, 50, "stop", 5),
        ]
    ]  # fmt: skip
    assert {span.parent_id for span in turn.segments} == {turn.span.span_id}
    assert turn.span.start_ns <= turn.segments[0].start_ns
    assert all(one.end_ns <= two.start_ns for one, two in zip(turn.segments, turn.segments[1:], strict=False))
    assert turn.segments[-1].end_ns <= turn.span.end_ns + 1_000_000
    assert (turn.policy_version, turn.finish_reason) == (5, "stop")
    assert turn.span.attributes[semconv.OUTPUT_TOKENS] == 90
    assert turn.span.attributes[semconv.PREEMPTIONS] == 3
    assert last.segments == []
    # The segment without a token made none of them.
    assert view.root.attributes[semconv.POLICY_VERSION_MIN] == 3
    assert view.root.attributes[semconv.POLICY_VERSION_MAX] == 6
    assert view.root.attributes[semconv.OUTPUT_TOKENS] == 100
    assert [len(turn.completion_ids) for turn in view.turns] == [90, 10]
    assert view.status == "completed"


async def test_an_empty_first_segment_does_not_widen_the_versions(rollout):
    server = rollout.server(script=[Reply(text="seven", tokens=30, cuts=(0,), versions=(2, 5))])
    await rollout.v1(batch_v1(1), server=server, fully_async=True)
    attributes = rollout.only().root.attributes
    assert (attributes[semconv.POLICY_VERSION_MIN], attributes[semconv.POLICY_VERSION_MAX]) == (5, 5)


async def test_a_generation_at_once_has_no_segment(rollout):
    await rollout.v1(batch_v1(1), fully_async=True)
    view = rollout.only()
    assert [turn.segments for turn in view.turns] == [[], [], []]
    assert len([span for span in view.spans if span.kind == "LLM"]) == 3


async def test_without_partial_rollout_an_aborted_turn_ends_the_trajectory_as_aborted(rollout):
    server = rollout.server(script=[Reply(text=CALL), Reply(text="seven", tokens=90, cuts=(40,), versions=(3, 4))])
    await rollout.v0(batch_v0(1), server=server, fully_async=True, partial_rollout=False, reward=True)
    view = rollout.only()
    assert view.status == "aborted"
    assert [turn.finish_reason for turn in view.turns] == ["stop", "abort"]
    assert [len(turn.completion_ids) for turn in view.turns][1] == 40
    assert (view.root.status, view.turns[1].segments) == ("UNSET", [])


async def test_the_fully_async_limit_is_the_client_s_own(rollout):
    """The client passes max_tokens on; the parameters recorded are those that the loop asked for."""
    server = rollout.server(script=[Reply(text="seven")])
    await rollout.v1(batch_v1(1), server=server, fully_async=True, response_length=512)
    assert server.calls[0].sampling_params["max_tokens"] == 512
    attributes = rollout.only().turns[0].span.attributes
    assert "gen_ai.request.max_tokens" not in attributes


async def test_a_failing_server_fails_the_turn_and_the_trajectory_with_its_own_error(rollout):
    error = ConnectionError("engine is gone")
    with pytest.raises(ConnectionError) as raised:
        await rollout.v0(batch_v0(1), server=rollout.server(script=[Reply(text=CALL), Reply(error=error)]))
    assert raised.value is error
    view = rollout.only()
    failed = view.generations[1]
    assert (failed.status, failed.attributes[semconv.ERROR_TYPE]) == ("ERROR", "ConnectionError")
    assert semconv.OUTPUT_TOKENS not in failed.attributes
    assert (view.status, view.root.status, view.root.attributes[semconv.ERROR_TYPE]) == (
        "error",
        "ERROR",
        "ConnectionError",
    )
    stacks = ["exception.stacktrace" in event.attributes for span in view.spans for event in span.events]
    assert stacks.count(True) == 1
    run = next(span for span in view.spans if span.name == "ToolAgentLoop.run")
    assert run.status == "ERROR"


async def test_the_model_s_name_is_low_in_cardinality(rollout):
    await rollout.v0(batch_v0(1), server=rollout.server(turns=1))
    assert rollout.model.endswith("/tiny")
    assert rollout.only().turns[0].span.name == "chat tiny"

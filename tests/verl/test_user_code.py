import json

import pytest
import verl_loops
from verl.utils.rollout_trace import rollout_trace_attr, rollout_trace_op
from verl_loop import Reply, batch_v0, batch_v1, load_tokenizer

from otel_rollout import semconv

IN, OUT = semconv.INPUT_VALUE, semconv.OUTPUT_VALUE
SCRIPT = [Reply(text="looking", tokens=20), Reply(text="seven")]


def read(span, key):
    return json.loads(span.attributes[key])


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_an_agent_loop_of_the_user_s_own(rollout, tree, trainer):
    server = rollout.server(script=SCRIPT)
    if trainer == "v0":
        await rollout.v0(batch_v0(1, agent="search_agent"), server=server)
    else:
        await rollout.v1(batch_v1(1, columns={"agent_name": ["search_agent"]}), server=server)
    view = rollout.only()
    assert tree(view) == (
        "invoke_agent search_agent",
        [
            (
                "SearchAgentLoop.run",
                [
                    ("chat tiny", []),
                    ("shorten", []),
                    ("Searcher.search", []),
                    ("Searcher.join", []),
                    ("Searcher.search", []),
                    ("text_completion tiny", []),
                    ("Searcher.count", []),
                ],
            ),
            ("evaluate reward", []),
        ],
    )
    assert view.status == "completed"
    assert view.reward == 0.5
    by_name = {span.name: span for span in reversed(view.spans)}
    assert (read(by_name["shorten"], IN), read(by_name["shorten"], OUT)) == (
        {"text": "sun and moon", "limit": 3},
        "sun",
    )
    search = by_name["Searcher.search"]
    assert (read(search, IN), read(search, OUT)) == ({"query": "sun", "top_k": 2}, ["wiki:sun:0", "wiki:sun:1"])
    assert search.attributes[semconv.CODE_FUNCTION_NAME] == "verl_loops.Searcher.search"
    assert read(by_name["Searcher.join"], OUT) == "wiki:sun:0 wiki:sun:1"
    assert read(by_name["Searcher.count"], OUT) == 2
    failed = [span for span in view.spans if span.name == "Searcher.search"][1]
    assert (failed.status, failed.attributes[semconv.ERROR_TYPE]) == ("ERROR", "ValueError")
    assert view.root.status == "UNSET"


async def test_its_generations_are_turns_with_tokens(rollout):
    server = rollout.server(script=SCRIPT)
    await rollout.v0(batch_v0(1, agent="search_agent"), server=server)
    view = rollout.only()
    first, second = view.turns
    assert [(turn.prompt_ids, turn.completion_ids) for turn in (first, second)] == [
        (call.prompt_ids, call.token_ids) for call in server.calls
    ]
    assert (first.rebased, second.rebased) == (False, False)
    assert first.span.attributes["gen_ai.request.max_tokens"] == 64
    assert first.span.attributes["gen_ai.request.stop_sequences"] == ["\n"]
    assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
    run = next(span for span in view.spans if span.name == "SearchAgentLoop.run")
    shown = read(run, OUT)
    assert (shown["num_turns"], shown["reward_score"]) == (4, 0.5)
    assert shown["response_tokens"] == len(second.prompt_ids) + len(second.completion_ids) - len(first.prompt_ids)
    assert shown["extra_fields"]["hits"] == '["wiki:sun:0", "wiki:sun:1"]'


async def test_a_generation_that_runs_into_the_limit_it_was_given_is_a_length(rollout):
    server = rollout.server(script=[Reply(tokens=64, closed=False), Reply(text="seven")])
    await rollout.v0(batch_v0(1, agent="search_agent"), server=server)
    view = rollout.only()
    assert [turn.finish_reason for turn in view.turns] == ["length", "stop"]
    assert view.status == "completed"


async def test_token2text_of_its_output(rollout):
    server = rollout.server(script=SCRIPT)
    await rollout.v0(batch_v0(1, agent="search_agent"), server=server, token2text=True)
    view = rollout.only()
    first, second = server.calls
    decode = load_tokenizer(rollout.model).decode
    shown = read(next(span for span in view.spans if span.name == "SearchAgentLoop.run"), OUT)
    assert shown["prompt_text"] == decode(first.prompt_ids)
    assert shown["response_text"] == decode((second.prompt_ids + second.token_ids)[len(first.prompt_ids) :])
    assert [read(turn.span, OUT)["response_text"] for turn in view.turns] == [
        decode(first.token_ids),
        decode(second.token_ids),
    ]


@pytest.mark.parametrize("token2text", [False, True])
async def test_an_agent_loop_with_several_outputs(rollout, token2text):
    server = rollout.server(turns=1)
    batch = batch_v1(1, columns={"agent_name": ["two_answers_agent"]})
    rows = await rollout.v1(batch, server=server, reward=True, token2text=token2text)
    assert len(rows) == 2
    view = rollout.only()
    assert (view.status, view.reward, view.root.attributes[semconv.TURNS]) == ("completed", 1.0, 2)
    assert [(turn.prompt_ids, turn.completion_ids) for turn in view.turns] == [
        (call.prompt_ids, call.token_ids) for call in server.calls
    ]
    run = next(span for span in view.spans if span.name == "TwoAnswersAgentLoop.run")
    assert [shown["response_tokens"] for shown in read(run, OUT)] == [len(call.token_ids) for call in server.calls]


async def test_single_turn_agent_loop(rollout, tree):
    server = rollout.server(script=[Reply(text="It is seven.")])
    await rollout.v0(batch_v0(1, agent=None), server=server, agent="single_turn_agent", reward=True)
    view = rollout.only()
    assert tree(view) == (
        "invoke_agent single_turn_agent",
        [("SingleTurnAgentLoop.run", [("chat tiny", [])]), ("evaluate reward", [])],
    )
    (turn,) = view.turns
    assert (turn.prompt_ids, turn.completion_ids) == (server.calls[0].prompt_ids, server.calls[0].token_ids)
    assert turn.input_messages[0]["parts"][0]["content"].startswith("problem 0 ")
    assert turn.output_messages == [
        {"role": "assistant", "parts": [{"type": "text", "content": "It is seven.<|im_end|>"}]}
    ]
    assert view.messages == [*turn.input_messages, *turn.output_messages]
    assert (view.status, view.reward) == ("completed", 1.0)


async def test_a_scope_of_the_user_s_own_inside_a_rollout_is_a_trajectory_of_its_own(rollout):
    """verl's own rollout_trace_attr, called by other code than verl's worker."""
    await rollout.v0(batch_v0(1), server=rollout.server(turns=1))
    rollout.exporter.clear()
    with rollout_trace_attr(sample_index=3, step=4, rollout_n=1, name="mine", validate=True):
        assert verl_loops.shorten("abcdef") == "abc"
    with rollout_trace_attr(sample_index=4, step=4, trace=False):
        assert verl_loops.shorten("abcdef") == "abc"
    view = rollout.only()
    assert (view.root.name, view.step, view.sample_index, view.rollout_n, view.validate) == (
        "invoke_agent mine",
        4,
        3,
        1,
        True,
    )
    assert [span.name for span in view.spans] == ["invoke_agent mine", "shorten"]


@pytest.mark.parametrize("active", [True, False])
def test_a_decorated_plain_function_works_traced_or_not(rollout, active, monkeypatch):
    from otel_rollout.frameworks.verl.switch import switch

    monkeypatch.setattr(switch, "active", active)

    @rollout_trace_op
    def double(x):
        return 2 * x

    @rollout_trace_op
    async def nothing():
        return "done"

    import asyncio

    assert double(4) == 8
    assert double(x=5) == 10
    assert asyncio.run(nothing()) == "done"
    assert len(rollout.spans()) == (3 if active else 0)
    assert double.__name__ == "double"

"""recorders.py: how agents, tools and rewards look as spans, by the letter of CONVENTIONS.md."""

import json

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from otel_rollout import binding, rollout_trace_attr, rollout_trace_op
from otel_rollout.settings import Settings


def of_kind(spans, kind):
    return [span for span in spans.get_finished_spans() if span.attributes["openinference.span.kind"] == kind]


def one(spans, kind):
    (span,) = of_kind(spans, kind)
    return span


@pytest.fixture
def no_content(spans):
    binding.bind(
        binding.Binding(tracer=binding.current_binding().tracer, settings=Settings(content=False, tokens="counts"))
    )


@rollout_trace_op(kind="tool")
async def search(query, *, limit=3):
    if query == "bad":
        raise TimeoutError("too slow")
    return ["a", {"b": limit}]


async def test_a_tool_call_by_the_letter(spans):
    async with rollout_trace_attr():
        await search("x")
    span = one(spans, "TOOL")
    assert (span.name, span.kind, span.status.status_code) == (
        "execute_tool search",
        SpanKind.INTERNAL,
        StatusCode.UNSET,
    )
    assert dict(span.attributes) == {
        "openinference.span.kind": "TOOL",
        "code.function.name": f"{__name__}.search",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.arguments": '{"query":"x","limit":3}',
        "gen_ai.tool.call.result": '["a",{"b":3}]',
    }


async def test_a_failed_tool_call(spans):
    async with rollout_trace_attr():
        with pytest.raises(TimeoutError, match="too slow"):
            await search("bad")
        await search("good")
    failed, good = of_kind(spans, "TOOL")
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "TimeoutError")
    assert "gen_ai.tool.call.result" not in failed.attributes
    assert "error.type" not in good.attributes
    root = one(spans, "AGENT")
    assert (root.attributes["rollout.tool_calls"], root.attributes["rollout.tool_errors"]) == (2, 1)
    assert root.attributes["rollout.status"] == "completed"


def test_a_tool_has_the_name_that_it_was_given(spans):
    @rollout_trace_op(kind="TOOL", name="look_up")
    def anything():
        return None

    anything()
    span = one(spans, "TOOL")
    assert (span.name, span.attributes["gen_ai.tool.name"]) == ("execute_tool look_up", "look_up")
    assert span.attributes["gen_ai.tool.call.result"] == "null"


def test_a_method_that_is_a_tool_is_called_by_its_short_name(spans):
    class Box:
        @rollout_trace_op(kind="tool")
        def run(self, code):
            return code

    Box().run("1+1")
    span = one(spans, "TOOL")
    assert (span.name, span.attributes["gen_ai.tool.call.arguments"]) == ("execute_tool run", '{"code":"1+1"}')


def test_an_agent_inside_a_trajectory(spans):
    @rollout_trace_op(kind="agent", name="planner")
    def plan(goal):
        return goal

    with rollout_trace_attr(name="main"):
        plan("win")
    span = next(span for span in of_kind(spans, "AGENT") if span.parent is not None)
    assert (span.name, span.kind) == ("invoke_agent planner", SpanKind.INTERNAL)
    assert dict(span.attributes) == {
        "openinference.span.kind": "AGENT",
        "code.function.name": f"{__name__}.{plan.__qualname__}",
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "planner",
        "input.value": '{"goal":"win"}',
        "input.mime_type": "application/json",
        "output.value": '"win"',
        "output.mime_type": "application/json",
    }


class ZeroDim:
    ndim = 0

    def item(self):
        return 0.5

    __float__ = item


@pytest.mark.parametrize(("result", "score"), [(1, 1.0), (0.25, 0.25), (True, 1.0), (-2, -2.0), (ZeroDim(), 0.5)])
def test_a_reward_function_by_the_letter(spans, result, score):
    @rollout_trace_op(kind="evaluator", name="format")
    def judge(answer):
        return result

    with rollout_trace_attr():
        assert judge("42") is result
    span, root = one(spans, "EVALUATOR"), one(spans, "AGENT")
    assert (span.name, span.attributes["code.function.name"]) == ("evaluate format", f"{__name__}.{judge.__qualname__}")
    found = {"gen_ai.evaluation.name": "format", "gen_ai.evaluation.score.value": score}
    assert {key: value for key, value in span.attributes.items() if key.startswith("gen_ai.")} == found
    assert type(span.attributes["gen_ai.evaluation.score.value"]) is float
    assert [(event.name, dict(event.attributes)) for event in span.events] == [("gen_ai.evaluation.result", found)]
    assert span.attributes["input.value"] == '{"answer":"42"}'
    assert root.attributes["rollout.rewards.format"] == score


def test_the_reward_function_called_reward_is_the_trajectorys_own(spans):
    @rollout_trace_op(kind="evaluator")
    def reward():
        return 0.75

    with rollout_trace_attr():
        reward()
    assert one(spans, "AGENT").attributes["rollout.reward"] == 0.75


@pytest.mark.parametrize("result", [{"score": 1}, "1", None, [1.0]])
def test_a_reward_function_without_a_number_is_a_span_without_a_score(spans, result):
    @rollout_trace_op(kind="evaluator")
    def judge():
        return result

    with rollout_trace_attr():
        assert judge() is result
    span = one(spans, "EVALUATOR")
    assert json.loads(span.attributes["output.value"]) == result
    assert span.events == ()
    assert not any(key.startswith("rollout.reward") for key in one(spans, "AGENT").attributes)


def test_a_failed_reward_function_gives_no_reward(spans):
    @rollout_trace_op(kind="evaluator")
    def judge():
        raise ValueError("no judge")

    with rollout_trace_attr(), pytest.raises(ValueError, match="no judge"):
        judge()
    assert one(spans, "EVALUATOR").attributes["error.type"] == "ValueError"
    assert not any(key.startswith("rollout.reward") for key in one(spans, "AGENT").attributes)


async def test_without_content_only_names_and_numbers_are_kept(no_content, spans):
    @rollout_trace_op(kind="llm")
    def generate(prompt_ids, messages):
        return {"token_ids": [1], "text": "secret"}

    @rollout_trace_op
    def chain(text):
        return "secret"

    @rollout_trace_op(kind="evaluator")
    def judge(text):
        return 0.5

    async with rollout_trace_attr():
        generate([1], [{"role": "user", "content": "secret"}])
        chain("secret")
        judge("secret")
        await search("secret")
    assert len(spans.get_finished_spans()) == 5
    for span in spans.get_finished_spans():
        written = {key: value for key, value in span.attributes.items() if "secret" in str(value)}
        assert written == {}, span.name
        assert not {"input.value", "output.value", "gen_ai.tool.call.arguments", "gen_ai.input.messages"} & set(
            span.attributes
        )
    assert one(spans, "EVALUATOR").attributes["gen_ai.evaluation.score.value"] == 0.5
    assert one(spans, "LLM").attributes["gen_ai.usage.input_tokens"] == 1

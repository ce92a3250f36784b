import json

import pytest
from verl_loop import FUNCTIONS, Reply, batch_v0, batch_v1, tool_call

from otel_rollout import semconv

NAME, ARGUMENTS, RESULT = semconv.TOOL_NAME, semconv.TOOL_CALL_ARGUMENTS, semconv.TOOL_CALL_RESULT
DONE = Reply(text="seven")


def asks(*calls):
    return [Reply(text="".join(tool_call(*call) for call in calls)), DONE]


async def one(rollout, *calls, **settings):
    """The trajectory of a policy that makes these calls in its first turn."""
    await rollout.v0(batch_v0(1), server=rollout.server(script=asks(*calls)), **settings)
    return rollout.only()


def described(span):
    return {key: value for key, value in span.attributes.items() if key != "code.function.name"}


def tool(name, arguments, result, reward, **more):
    return {
        semconv.SPAN_KIND: "TOOL",
        semconv.OPERATION_NAME: "execute_tool",
        NAME: name,
        semconv.TOOL_TYPE: "function",
        ARGUMENTS: arguments,
        RESULT: result,
        semconv.TOOL_REWARD: reward,
        **more,
    }


def counts(view):
    return view.root.attributes[semconv.TOOL_CALLS], view.root.attributes[semconv.TOOL_ERRORS]


def assert_fine(view):
    """The trajectory did not fail, whatever its tools did."""
    assert view.status == "completed"
    assert (view.root.status, view.root.events) == ("UNSET", ())
    assert semconv.ERROR_TYPE not in view.root.attributes


async def test_a_tool_that_decorates_nothing(rollout):
    view = await one(rollout, ("calculator", {"expression": "1+2*3"}))
    (span,) = view.tools
    assert span.name == "execute_tool calculator"
    assert described(span) == tool("calculator", '{"expression": "1+2*3"}', "7", 0.25)
    assert type(span.attributes[semconv.TOOL_REWARD]) is float
    assert view.children(span.span_id) == []
    assert counts(view) == (1, 0)
    assert_fine(view)


async def test_a_tool_that_decorates_execute_is_one_tool_span_with_its_own_op_below(rollout):
    view = await one(
        rollout,
        ("traced_calculator", {"expression": "6/2"}),
        tools={"traced_calculator": "verl_tools.TracedCalculator"},
    )
    (span,) = view.tools
    assert described(span) == tool("traced_calculator", '{"expression": "6/2"}', "3.0", 0.25)
    (below,) = view.children(span.span_id)
    assert (below.name, below.kind) == ("TracedCalculator.execute", "CHAIN")
    assert json.loads(below.attributes[semconv.INPUT_VALUE])["parameters"] == {"expression": "6/2"}
    assert counts(view) == (1, 0)


async def test_function_tools_async_and_sync(rollout):
    view = await one(
        rollout, ("weather", {"city": "Oslo"}), ("divide", {"a": 7, "b": 2}), tools=None, function_tools=FUNCTIONS
    )
    assert {span.name: described(span) for span in view.tools} == {
        "execute_tool weather": tool("weather", '{"city": "Oslo"}', '{"city": "Oslo", "sky": "blue"}', 0.0),
        "execute_tool divide": tool("divide", '{"a": 7, "b": 2}', "3.5", 0.5),
    }
    assert counts(view) == (2, 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (("calculator", {"expression": "1/0"}), "ZeroDivisionError", "division by zero"),
        (("divide", {"a": 1, "b": 0}), "ZeroDivisionError", "division by zero"),
        (("weather", {"town": "Oslo"}), "TypeError", "weather() got an unexpected keyword argument 'town'"),
        (("unhappy", {}), "TimeoutError", "the sandbox did not answer"),
    ],
)
async def test_an_exception_that_the_loop_swallows_marks_the_call_and_not_the_trajectory(rollout, call, error, message):
    tools = {"calculator": "verl_tools.Calculator", "unhappy": "verl_tools.Unhappy"}
    view = await one(rollout, call, tools=tools, tool_settings={"where": "execute"}, function_tools=FUNCTIONS)
    (span,) = view.tools
    said = f"Error executing tool '{call[0]}': {message}"
    assert described(span) == tool(call[0], json.dumps(call[1]), said, 0.0, **{semconv.ERROR_TYPE: error})
    assert (span.status, span.status_message) == ("ERROR", f"{error}: {message}")
    (event,) = span.events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == error
    assert event.attributes["exception.message"] == message
    assert "_call_tool" in event.attributes["exception.stacktrace"]
    assert counts(view) == (1, 1)
    assert_fine(view)


async def test_an_exception_in_create_is_the_call_s_too(rollout):
    view = await one(
        rollout, ("unhappy", {}), tools={"unhappy": "verl_tools.Unhappy"}, tool_settings={"where": "create"}
    )
    (span,) = view.tools
    assert span.attributes[semconv.ERROR_TYPE] == "ConnectionError"
    assert span.events[0].attributes["exception.message"] == "no instance left"


async def test_an_exception_in_a_decorated_tool_is_recorded_on_both_and_its_stack_once(rollout):
    view = await one(
        rollout,
        ("traced_calculator", {"expression": "1/0"}),
        tools={"traced_calculator": "verl_tools.TracedCalculator"},
    )
    (span,) = view.tools
    (below,) = view.children(span.span_id)
    assert [each.attributes[semconv.ERROR_TYPE] for each in (span, below)] == ["ZeroDivisionError"] * 2
    assert [each.status for each in (span, below)] == ["ERROR"] * 2
    assert "exception.stacktrace" in below.events[0].attributes
    assert counts(view) == (1, 1)


async def test_an_unknown_tool(rollout):
    view = await one(rollout, ("search", {"q": 1}))
    (span,) = view.tools
    said = "Unknown function 'search'. Available tools: ['calculator']"
    assert span.name == "execute_tool search"
    assert described(span) == tool("search", '{"q": 1}', said, 0.0, **{semconv.ERROR_TYPE: "unknown_tool"})
    assert (span.status, span.status_message, span.events) == ("ERROR", said, ())
    assert counts(view) == (1, 1)
    assert_fine(view)


async def test_arguments_that_are_no_json(rollout, monkeypatch):
    """Hermes' parser drops such a call; others (qwen3_coder, gpt-oss) hand its text on, as this one does."""
    from verl.experimental.agent_loop.tool_parser import FunctionCall, HermesToolParser

    async def extract(self, ids, tools=None):
        text = self.tokenizer.decode(ids)
        return (text, [FunctionCall(name="calculator", arguments='{"expression": 1+')]) if "see" in text else (text, [])

    monkeypatch.setattr(HermesToolParser, "extract_tool_calls", extract)
    await rollout.v0(batch_v0(1), server=rollout.server(script=[Reply(text="let me see"), DONE]))
    view = rollout.only()
    (span,) = view.tools
    assert span.attributes[semconv.ERROR_TYPE] == "invalid_json"
    assert span.attributes[ARGUMENTS] == '{"expression": 1+'
    assert span.attributes[RESULT].startswith("Invalid JSON in arguments for 'calculator': ")
    assert (span.status, span.status_message) == ("ERROR", span.attributes[RESULT])
    assert counts(view) == (1, 1)
    assert_fine(view)


async def test_arguments_that_are_json_of_the_wrong_kind(rollout):
    """Hermes' parser hands them on; the tool fails on them."""
    view = await one(rollout, ("calculator", '"1+1"'))
    (span,) = view.tools
    assert (span.attributes[ARGUMENTS], span.attributes[semconv.ERROR_TYPE]) == ('"1+1"', "TypeError")
    assert counts(view) == (1, 1)
    assert_fine(view)


async def test_a_call_that_the_parser_drops_is_marked_and_counted(rollout):
    """Hermes' parser drops a call that is no JSON and says so in a log only; the model's other call runs."""
    view = await one(rollout, ("calculator", "{broken"), ("calculator", {"expression": "1+1"}))
    dropped, fine = (span for span in view.spans if span.name.endswith("extract_tool_calls"))
    assert (dropped.status, dropped.attributes[semconv.ERROR_TYPE]) == ("ERROR", "invalid_json")
    assert (fine.status, fine.attributes.get(semconv.ERROR_TYPE)) == ("UNSET", None)
    assert [span.attributes.get(semconv.ERROR_TYPE) for span in view.tools] == [None]
    assert counts(view) == (1, 1)
    assert_fine(view)


async def test_all_calls_of_a_turn_run_side_by_side_and_only_as_many_as_verl_allows(rollout):
    calls = [("calculator", {"expression": f"{n}+0"}) for n in range(3)]
    view = await one(rollout, *calls, parallel_calls=2)
    assert [span.attributes[RESULT] for span in view.tools] == ["0", "1"]
    assert len({span.parent_id for span in view.tools}) == 1
    assert view.turns[1].input_messages == [
        {"role": "tool", "parts": [{"type": "tool_call_response", "response": text}]} for text in ("0", "1")
    ]
    assert counts(view) == (2, 0)


async def test_errors_of_calls_side_by_side_do_not_mix(rollout):
    calls = [
        ("calculator", {"expression": "1/0"}),
        ("calculator", {"expression": "x"}),
        ("calculator", {"expression": "1"}),
    ]
    view = await one(rollout, *calls)
    assert [span.attributes.get(semconv.ERROR_TYPE) for span in view.tools] == ["ZeroDivisionError", "ValueError", None]
    assert counts(view) == (3, 2)


async def test_v1_records_tools_alike(rollout):
    await rollout.v1(batch_v1(1), server=rollout.server(script=asks(("calculator", {"expression": "1/0"}))))
    (span,) = rollout.only().tools
    assert span.attributes[semconv.ERROR_TYPE] == "ZeroDivisionError"


async def test_without_content_names_counts_and_errors_stay(rollout, monkeypatch):
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT")
    rollout.reconfigure()
    view = await one(rollout, ("calculator", {"expression": "98765+1"}), ("nothing", {}), token2text=True)
    assert [described(span).keys() & {ARGUMENTS, RESULT} for span in view.tools] == [set(), set()]
    assert [span.attributes[NAME] for span in view.tools] == ["calculator", "unknown_tool"]
    assert counts(view) == (2, 1)
    everything = json.dumps([[span.attributes, [event.attributes for event in span.events]] for span in view.spans])
    for secret in ("problem 0", "98765", "98766", "seven"):
        assert secret not in everything

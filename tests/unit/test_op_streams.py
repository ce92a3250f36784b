"""streams.py: decorated generators are as lazy as they were, and their span ends when the stream does."""

import asyncio
import contextlib
import gc
import json

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from otel_rollout import current_trajectory, rollout_trace_attr, rollout_trace_op


def only(spans):
    (span,) = spans.get_finished_spans()
    return span


def output(span):
    return json.loads(span.attributes["output.value"])


class Log(list):
    """What happened, in order."""


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def count(log):
    """A generator that writes down how far it got."""

    @rollout_trace_op(name="count")
    def count(n):
        try:
            for number in range(n):
                log.append(number)
                yield number
            return "value"
        finally:
            log.append("finally")

    return count


@pytest.fixture
def acount(log):
    @rollout_trace_op(name="acount")
    async def acount(n):
        try:
            for number in range(n):
                log.append(number)
                yield number
        finally:
            log.append("finally")

    return acount


def current():
    return trace.get_current_span()


# Laziness and ends


def test_nothing_is_consumed_early_and_the_span_ends_with_the_stream(spans, log, count):
    stream = count(2)
    assert log == []
    assert next(stream) == 0
    assert log == [0]
    assert not spans.get_finished_spans()
    assert next(stream) == 1
    with pytest.raises(StopIteration) as stop:
        next(stream)
    assert stop.value.value == "value"
    assert log == [0, 1, "finally"]
    span = only(spans)
    assert (span.name, output(span), json.loads(span.attributes["input.value"])) == ("count", [0, 1], {"n": 2})
    assert span.status.status_code is StatusCode.UNSET


async def test_nothing_is_consumed_early_of_an_async_stream(spans, log, acount):
    stream = acount(2)
    assert log == []
    assert await anext(stream) == 0
    assert log == [0]
    assert not spans.get_finished_spans()
    assert await anext(stream) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert log == [0, 1, "finally"]
    assert (only(spans).name, output(only(spans))) == ("acount", [0, 1])


def test_a_stream_that_was_never_started_leaves_no_span(spans, log, count):
    count(3)
    gc.collect()
    assert log == []
    assert not spans.get_finished_spans()


def test_an_infinite_stream_can_be_taken_from(spans):
    @rollout_trace_op
    def forever():
        number = 0
        while True:
            yield number
            number += 1

    stream = forever()
    assert [item for item, _ in zip(stream, range(3), strict=False)] == [0, 1, 2]
    stream.close()
    assert output(only(spans)) == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["close", "del", "break"])
def test_a_stream_that_ends_early_has_not_failed(spans, log, count, how):
    if how == "break":
        for _ in count(5):
            break
    else:
        stream = count(5)
        next(stream)
        if how == "close":
            stream.close()
            stream.close()
        del stream
    gc.collect()
    assert log == [0, "finally"]
    span = only(spans)
    assert output(span) == [0]
    assert (span.status.status_code, span.events) == (StatusCode.UNSET, ())
    assert "error.type" not in span.attributes


@pytest.mark.parametrize("how", ["aclose", "del"])
async def test_an_async_stream_that_ends_early_has_not_failed(spans, log, acount, how):
    stream = acount(5)
    await anext(stream)
    if how == "aclose":
        await stream.aclose()
    del stream
    gc.collect()
    for _ in range(5):  # the event loop closes a collected stream in a task of its own
        await asyncio.sleep(0)
    assert log == [0, "finally"]
    span = only(spans)
    assert (output(span), span.status.status_code, span.events) == ([0], StatusCode.UNSET, ())


def test_a_stream_of_the_loop_that_is_shut_down_is_ended(spans, log, acount):
    async def leave_open():
        streams.append(acount(5))
        await anext(streams[0])

    streams = []
    asyncio.run(leave_open())
    assert log == [0, "finally"]
    assert output(only(spans)) == [0]


def test_a_stream_is_collected_in_another_thread(spans, log, count):
    import threading

    stream = [count(5)]
    next(stream[0])
    thread = threading.Thread(target=stream.pop)
    thread.start()
    thread.join()
    gc.collect()
    assert log == [0, "finally"]
    assert output(only(spans)) == [0]
    assert current() is trace.INVALID_SPAN


def test_a_long_stream_keeps_its_first_items_and_says_how_many_more_there_were(spans):
    @rollout_trace_op
    def many():
        yield from range(1500)

    assert list(many()) == list(range(1500))
    found = only(spans).attributes["output.value"]
    assert "500 more items" in found


# send, throw, return


def test_sent_values_thrown_errors_and_the_return_value_pass_through(spans):
    @rollout_trace_op
    def talk():
        heard = []
        try:
            heard.append((yield "first"))
            heard.append((yield "second"))
        except ValueError as error:
            heard.append(error)
        heard.append((yield "third"))
        return heard

    error, item = ValueError("thrown"), object()
    stream = talk()
    assert next(stream) == "first"
    assert stream.send(item) == "second"
    assert stream.throw(error) == "third"
    with pytest.raises(StopIteration) as stop:
        stream.send("last")
    assert stop.value.value[0] is item
    assert stop.value.value[1] is error
    assert stop.value.value[2] == "last"
    assert output(only(spans)) == ["first", "second", "third"]


async def test_sent_values_and_thrown_errors_pass_through_an_async_stream(spans):
    heard = []

    @rollout_trace_op
    async def talk():
        try:
            heard.append((yield "first"))
            heard.append((yield "second"))
        except ValueError as error:
            heard.append(error)
        heard.append((yield "third"))

    error, item = ValueError("thrown"), object()
    stream = talk()
    assert await stream.asend(None) == "first"
    assert await stream.asend(item) == "second"
    assert await stream.athrow(error) == "third"
    with pytest.raises(StopAsyncIteration):
        await stream.asend("last")
    assert heard[0] is item
    assert heard[1] is error
    assert heard[2] == "last"
    assert output(only(spans)) == ["first", "second", "third"]


def test_yield_from_gives_the_return_value(spans, count):
    def outer():
        return (yield from count(1))

    stream = outer()
    assert next(stream) == 0
    with pytest.raises(StopIteration) as stop:
        next(stream)
    assert stop.value.value == "value"


@pytest.mark.parametrize("where", ["body", "thrown"])
def test_a_failed_stream_raises_the_same_object_and_keeps_what_it_gave(spans, where):
    error = KeyError("lost")

    @rollout_trace_op
    def fail():
        yield 1
        if where == "body":
            raise error
        yield 2

    stream = fail()
    next(stream)
    with pytest.raises(KeyError) as caught:
        next(stream) if where == "body" else stream.throw(error)
    assert caught.value is error
    span = only(spans)
    assert (span.status.status_code, span.attributes["error.type"], output(span)) == (StatusCode.ERROR, "KeyError", [1])
    assert len(span.events) == 1


@pytest.mark.parametrize("error", [KeyError("lost"), asyncio.CancelledError("stop"), KeyboardInterrupt()], ids=repr)
async def test_a_failed_async_stream_raises_the_same_object(spans, error):
    @rollout_trace_op
    async def fail():
        yield 1
        raise error

    stream = fail()
    await anext(stream)
    with pytest.raises(type(error)) as caught:
        await anext(stream)
    assert caught.value is error
    span = only(spans)
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, type(error).__name__)


def test_an_error_while_closing_is_the_functions_own(spans):
    error = OSError("disk")

    @rollout_trace_op
    def fail():
        try:
            yield 1
        finally:
            raise error

    stream = fail()
    next(stream)
    with pytest.raises(OSError, match="disk") as caught:
        stream.close()
    assert caught.value is error
    assert only(spans).attributes["error.type"] == "OSError"


def test_a_stream_that_will_not_close_is_pythons_own_error(spans):
    @rollout_trace_op
    def stubborn():
        with contextlib.suppress(GeneratorExit):
            yield 1
        yield 2

    stream = stubborn()
    next(stream)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        stream.close()
    assert only(spans).attributes["error.type"] == "RuntimeError"


@pytest.mark.parametrize("make", ["generator", "async_generator"])
async def test_a_wrong_call_raises_the_functions_own_error_and_ends_its_span(spans, make):
    def generator(a):
        yield a

    async def async_generator(a):
        yield a

    original = {"generator": generator, "async_generator": async_generator}[make]
    with pytest.raises(TypeError) as own:
        original(1, 2)

    async def take():
        stream = rollout_trace_op(original)(1, 2)
        return await anext(stream) if make == "async_generator" else next(stream)

    with pytest.raises(TypeError) as ours:
        await take()
    assert str(ours.value) == str(own.value)
    assert only(spans).attributes["error.type"] == "TypeError"


# Context


def test_the_span_is_current_in_the_body_and_not_between_the_items(spans):
    inside = []

    @rollout_trace_op(name="outer")
    def outer():
        inside.append(current().get_span_context().span_id)
        yield 1
        inside.append(current().get_span_context().span_id)
        helper()
        yield 2
        inside.append(current().get_span_context().span_id)

    @rollout_trace_op(name="helper")
    def helper():
        return None

    @rollout_trace_op(name="consumer")
    def consumer():
        return None

    with rollout_trace_attr() as trajectory:
        root = current()
        for _ in outer():
            assert current() is root
            assert current_trajectory() is trajectory
            consumer()
    found = {}
    for span in spans.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    (outer_span,) = found["outer"]
    assert inside == [outer_span.context.span_id] * 3
    assert [span.parent.span_id for span in found["consumer"]] == [root.get_span_context().span_id] * 2
    assert [span.parent.span_id for span in found["helper"]] == [outer_span.context.span_id]


async def test_an_async_stream_gives_its_context_to_nobody(spans):
    inside = []

    @rollout_trace_op(name="stream")
    async def stream():
        for number in range(3):
            await asyncio.sleep(0)
            inside.append(current().get_span_context().span_id)
            yield number

    async def consume():
        async with rollout_trace_attr():
            root = current()
            async for _ in stream():
                assert current() is root
                await asyncio.sleep(0)
            return root.get_span_context().trace_id

    traces = await asyncio.gather(*(consume() for _ in range(5)))
    streams = [span for span in spans.get_finished_spans() if span.name == "stream"]
    assert sorted(span.context.trace_id for span in streams) == sorted(traces)
    assert sorted(inside) == sorted(3 * [span.context.span_id for span in streams])


async def test_a_stream_that_moves_between_tasks_stays_one_span(spans, acount):
    stream = acount(3)
    items = [await asyncio.create_task(_next(stream)) for _ in range(3)]
    assert items == [0, 1, 2]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert output(only(spans)) == [0, 1, 2]


async def _next(stream):
    return await anext(stream)


async def test_two_streams_taken_in_turn_do_not_mix(spans, acount, count):
    first, second, third = acount(2), acount(2), count(2)
    taken = [await anext(first), await anext(second), next(third), await anext(second), next(third), await anext(first)]
    assert taken == [0, 0, 0, 1, 1, 1]
    for stream in (second, first):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert list(third) == []
    assert [output(span) for span in spans.get_finished_spans()] == [[0, 1]] * 3
    assert {span.parent for span in spans.get_finished_spans()} == {None}


async def test_a_cancelled_consumer_cancels_the_body(spans):
    @rollout_trace_op
    async def slow():
        yield 1
        await asyncio.sleep(60)
        yield 2

    async def consume():
        async for _ in slow():
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert only(spans).attributes["error.type"] == "CancelledError"


def test_a_stream_outlives_its_trajectory(spans, count):
    with rollout_trace_attr():
        stream = count(2)
        next(stream)
    assert list(stream) == [1]
    root, late = spans.get_finished_spans()
    assert late.context.trace_id == root.context.trace_id


# Off


@pytest.mark.parametrize("off", ["trace", "unconfigured"])
async def test_streams_that_are_not_recorded_behave_the_same(off, request, log, count, acount):
    if off == "trace":
        request.getfixturevalue("spans")
    with rollout_trace_attr(trace=False):
        stream, astream = count(3), acount(3)
        assert next(stream) == 0
        assert await anext(astream) == 0
        stream.close()
        await astream.aclose()
        assert log == [0, 0, "finally", "finally"]
        assert list(count(1)) == [0]
        assert [item async for item in acount(2)] == [0, 1]


def test_a_tool_that_streams_is_no_failure_when_closed(spans):
    @rollout_trace_op(kind="tool")
    def lines():
        yield "a"
        yield "b"

    with rollout_trace_attr():
        stream = lines()
        next(stream)
        stream.close()
    tool, root = spans.get_finished_spans()
    assert tool.attributes["gen_ai.tool.call.result"] == '["a"]'
    assert (root.attributes["rollout.tool_calls"], root.attributes["rollout.tool_errors"]) == (1, 0)


def test_streamed_text_is_one_message(spans):
    @rollout_trace_op(kind="llm")
    def generate(messages):
        yield "Hel"
        yield "lo"

    with rollout_trace_attr():
        assert list(generate([{"role": "user", "content": "hi"}])) == ["Hel", "lo"]
    turn, _ = spans.get_finished_spans()
    assert json.loads(turn.attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "Hello"}]}
    ]

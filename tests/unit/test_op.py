"""op.py and call.py: one span around one function, and a function that cannot tell the difference."""

import asyncio
import functools
import inspect
import json
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from otel_rollout import rollout_trace_attr, rollout_trace_op


def only(spans):
    (span,) = spans.get_finished_spans()
    return span


def inputs(span):
    return json.loads(span.attributes["input.value"])


# Shapes of functions

QUAL = __name__ + ".Agent."


class Agent:
    @rollout_trace_op
    def method(self, x):
        return self, x

    @rollout_trace_op(name="named")
    def named(self, x):
        return self, x

    @rollout_trace_op
    @classmethod
    def outer_class(cls, x):
        return cls, x

    @classmethod
    @rollout_trace_op
    def inner_class(cls, x):
        return cls, x

    @rollout_trace_op
    @staticmethod
    def outer_static(x):
        return None, x

    @staticmethod
    @rollout_trace_op
    def inner_static(x):
        return None, x

    @rollout_trace_op
    async def coroutine(self, x):
        return self, x


@rollout_trace_op
def function(x):
    return None, x


@pytest.mark.parametrize("name", ["method", "outer_class", "inner_class", "outer_static", "inner_static", "coroutine"])
@pytest.mark.parametrize("of", ["class", "instance"])
async def test_every_kind_of_method(spans, name, of):
    agent, item = Agent(), object()
    owner = agent if of == "instance" else Agent
    first = (agent,) if of == "class" and name in ("method", "coroutine") else ()
    result = getattr(owner, name)(*first, item)
    if inspect.isawaitable(result):
        result = await result
    bound_to = agent if name in ("method", "coroutine") else Agent if "class" in name else None
    assert result[0] is bound_to
    assert result[1] is item
    span = only(spans)
    assert span.name == f"Agent.{name}"
    assert span.attributes["code.function.name"] == QUAL + name
    assert list(inputs(span)) == ["x"]


def test_a_plain_op_by_the_letter(spans):
    assert function([1, "two"]) == (None, [1, "two"])
    span = only(spans)
    assert dict(span.attributes) == {
        "openinference.span.kind": "CHAIN",
        "code.function.name": f"{__name__}.function",
        "input.value": '{"x":[1,"two"]}',
        "input.mime_type": "application/json",
        "output.value": '[null,[1,"two"]]',
        "output.mime_type": "application/json",
    }
    assert (span.name, span.kind, span.status.status_code, span.events) == (
        "function",
        SpanKind.INTERNAL,
        StatusCode.UNSET,
        (),
    )
    assert (span.instrumentation_scope.name, span.parent) == ("otel_rollout", None)


def test_a_given_name_is_the_spans_name(spans):
    Agent().named(1)
    assert only(spans).name == "named"
    assert only(spans).attributes["code.function.name"] == QUAL + "named"


def test_callable_objects_partials_and_builtins(spans):
    class Judge:
        def __call__(self, x):
            return x + 1

    assert rollout_trace_op(Judge())(1) == 2
    assert rollout_trace_op(functools.partial(Judge(), 5))() == 6
    assert rollout_trace_op(name="longest")(max)(3, 4) == 4
    names = [span.name for span in spans.get_finished_spans()]
    assert names[2] == "longest"
    assert len(names) == 3


async def test_ops_nest_and_siblings_stay_siblings(spans):
    @rollout_trace_op(name="inner")
    async def inner(at):
        await asyncio.sleep(0.01 * at)
        return trace.get_current_span().get_span_context().span_id

    @rollout_trace_op(name="outer")
    async def outer():
        return await asyncio.gather(*(inner(at) for at in range(3)))

    with rollout_trace_attr():
        current = await outer()
    *children, parent, root = spans.get_finished_spans()
    assert (parent.name, root.parent) == ("outer", None)
    assert parent.parent.span_id == root.context.span_id
    assert {span.parent.span_id for span in children} == {parent.context.span_id}
    assert [span.context.span_id for span in children] == current
    assert {span.context.trace_id for span in (*children, parent)} == {root.context.trace_id}


def test_start_and_end_are_the_functions_own_times(spans):
    with rollout_trace_attr():
        function(1)
    op, root = spans.get_finished_spans()
    assert root.start_time <= op.start_time <= op.end_time <= root.end_time


# What is kept of the function


@pytest.mark.parametrize("make", ["plain", "coroutine", "generator", "async_generator"])
def test_a_decorated_function_looks_like_the_function(make):
    def plain(a: int, *, b: str = "x") -> float:
        """Doc."""

    async def coroutine(a: int, *, b: str = "x") -> float:
        """Doc."""

    def generator(a: int, *, b: str = "x") -> float:
        """Doc."""
        yield

    async def async_generator(a: int, *, b: str = "x") -> float:
        """Doc."""
        yield

    original = {"plain": plain, "coroutine": coroutine, "generator": generator, "async_generator": async_generator}[
        make
    ]
    original.mark = "kept"
    for decorated in (rollout_trace_op(original), rollout_trace_op(kind="tool", name="other")(original)):
        for ask in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            assert ask(decorated) is ask(original)
        assert inspect.signature(decorated) == inspect.signature(original)
        assert (decorated.__name__, decorated.__qualname__, decorated.__doc__, decorated.__module__) == (
            original.__name__, original.__qualname__, "Doc.", __name__
        )  # fmt: skip
        assert decorated.__wrapped__ is original
        assert decorated.mark == "kept"


@pytest.mark.parametrize("given", [int, Agent, 7, None, "name"])
def test_what_is_no_function_is_refused_at_once(given):
    with pytest.raises(TypeError, match="functions and methods"):
        rollout_trace_op(name="x")(given)


@pytest.mark.parametrize("kind", ["tools", "", None, 3])
def test_an_unknown_kind_is_refused_at_once_and_names_the_known_ones(kind):
    with pytest.raises(ValueError, match="chain, tool, llm, agent, evaluator"):
        rollout_trace_op(kind=kind)


def test_func_is_positional_only_as_in_verl():
    assert rollout_trace_op(function).__wrapped__ is function
    with pytest.raises(TypeError):
        rollout_trace_op(func=function)


# Inputs


def test_the_signature_is_read_once_a_definition(spans, monkeypatch):
    calls = []
    real = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda *a, **k: calls.append(a) or real(*a, **k))

    @rollout_trace_op
    def op(a, b=2):
        return a

    at_definition = len(calls)
    for number in range(10):
        op(number)
    assert at_definition == 1
    assert len(calls) == at_definition
    assert [inputs(span) for span in spans.get_finished_spans()] == [{"a": number, "b": 2} for number in range(10)]


def everything(a, b, /, c, d=4, *args, e, f=6, **kwargs):
    return (a, b, c, d, args, e, f, kwargs)


def defaults(a=1, /, b=2, *, c=3):
    return (a, b, c)


def own_names(self, cls=0):
    return (self, cls)


def shadow(a, /, **kwargs):
    return (a, kwargs)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "recorded"),
    [
        (everything, (1, 2, 3), {"e": 5}, {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}),
        (
            everything,
            (1, 2),
            {"c": 3, "d": 7, "e": 5, "g": 9},
            {"a": 1, "b": 2, "c": 3, "d": 7, "e": 5, "f": 6, "g": 9},
        ),
        (everything, (1, 2, 3, 4, 8, 9), {"e": 5}, {"a": 1, "b": 2, "c": 3, "d": 4, "args": [8, 9], "e": 5, "f": 6}),
        (defaults, (), {}, {"a": 1, "b": 2, "c": 3}),
        (defaults, (7,), {"c": 9}, {"a": 7, "b": 2, "c": 9}),
        (lambda *args: args, (), {}, {}),
        (lambda *args: args, (1, 2), {}, {"args": [1, 2]}),
        (lambda **kwargs: kwargs, (), {"x": 1}, {"x": 1}),
        (lambda: (), (), {}, {}),
        (own_names, (1,), {}, {"cls": 0}),
    ],
)
def test_inputs_by_name_as_python_binds_them(spans, function, args, kwargs, recorded):
    assert rollout_trace_op(function)(*args, **kwargs) == function(*args, **kwargs)
    assert inputs(only(spans)) == recorded


def test_a_keyword_that_shadows_a_positional_only_input_hides_neither(spans):
    assert rollout_trace_op(shadow)(1, a=2) == (1, {"a": 2})
    found = only(spans).attributes["input.value"]
    assert "1" in found
    assert "2" in found


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"z": 1}), ((1, 2), {"a": 1})])
@pytest.mark.parametrize("make", ["sync", "async"])
async def test_a_wrong_call_raises_the_functions_own_type_error(spans, args, kwargs, make):
    def sync(a, b=2):
        raise AssertionError

    async def coroutine(a, b=2):
        raise AssertionError

    original = sync if make == "sync" else coroutine
    with pytest.raises(TypeError) as own:
        original(*args, **kwargs)
    decorated = rollout_trace_op(original)

    async def call():
        return await decorated(*args, **kwargs) if make == "async" else decorated(*args, **kwargs)

    with pytest.raises(TypeError) as ours:
        await call()
    assert str(ours.value) == str(own.value)
    assert only(spans).attributes["error.type"] == "TypeError"


def test_inputs_are_recorded_as_they_were_before_the_call(spans):
    @rollout_trace_op
    def consume(items):
        items.clear()
        return items

    mine = [1, 2]
    assert consume(mine) is mine
    assert inputs(only(spans)) == {"items": [1, 2]}


# What comes back


def test_results_are_the_callers_own_objects(spans):
    results = [object(), [1], {}, iter([1, 2]), (number for number in range(3)), None]

    @rollout_trace_op
    def give(at):
        return results[at]

    for at, result in enumerate(results):
        assert give(at) is result
    assert list(results[3]) == [1, 2]
    assert list(results[4]) == [0, 1, 2]


async def test_a_function_that_returns_an_awaitable_keeps_it(spans):
    async def work():
        return 5

    @rollout_trace_op
    def start():
        return work()

    assert await start() == 5
    assert only(spans).name.endswith("start")


class OddError(Exception):
    """An exception whose text cannot be had."""

    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("k"),
        OddError(),
        KeyboardInterrupt(),
        SystemExit(3),
        asyncio.CancelledError(),
        StopIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_reach_the_caller_as_the_same_object(spans, error):
    @rollout_trace_op
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    span = only(spans)
    kind = type(error).__qualname__
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description.startswith(kind)
    assert span.attributes["error.type"] == kind
    (event,) = span.events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == kind
    assert type(event.attributes["exception.message"]) is str
    assert "raise error" in event.attributes["exception.stacktrace"]
    assert "output.value" not in span.attributes


def test_the_message_is_in_the_status(spans):
    @rollout_trace_op
    def fail():
        raise ValueError("no such city")

    with pytest.raises(ValueError, match="no such city"):
        fail()
    assert only(spans).status.description == "ValueError: no such city"


@pytest.mark.parametrize("inside", [True, False])
def test_the_stack_trace_stands_once_at_the_innermost_span(spans, inside):
    @rollout_trace_op(name="deep")
    def deep():
        raise ValueError("x")

    @rollout_trace_op(name="middle")
    def middle():
        deep()

    outermost = rollout_trace_attr()(middle) if inside else rollout_trace_op(name="top")(middle)
    with pytest.raises(ValueError, match="x"):
        outermost()
    with_trace = [
        span.name for span in spans.get_finished_spans() if "exception.stacktrace" in span.events[0].attributes
    ]
    assert with_trace == ["deep"]
    assert len(spans.get_finished_spans()) == 3
    assert {span.attributes["error.type"] for span in spans.get_finished_spans()} == {"ValueError"}


def test_two_different_errors_have_a_trace_each(spans):
    @rollout_trace_op
    def fail(error):
        raise error

    with rollout_trace_attr():
        for error in (ValueError("a"), ValueError("b")):
            with pytest.raises(ValueError):
                fail(error)
    failed = [span for span in spans.get_finished_spans() if span.parent is not None]
    assert ["exception.stacktrace" in span.events[0].attributes for span in failed] == [True, True]


async def test_a_cancelled_op_is_cancelled_and_says_so(spans):
    @rollout_trace_op
    async def wait():
        await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel("stop it")
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    # Before Python 3.11 asyncio itself makes a new error for whoever awaits the task.
    assert caught.value.args == (("stop it",) if sys.version_info >= (3, 11) else ())
    assert task.cancelled()
    span = only(spans)
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "CancelledError")


async def test_the_coroutine_starts_when_it_is_awaited_and_not_before(spans):
    started = []

    @rollout_trace_op
    async def work():
        started.append(True)

    pending = work()
    assert not started
    assert trace.get_current_span() is trace.INVALID_SPAN
    await pending
    assert started == [True]
    assert len(spans.get_finished_spans()) == 1


async def test_the_current_span_is_restored_after_success_and_failure(spans):
    @rollout_trace_op
    async def fail():
        assert trace.get_current_span().is_recording()
        raise ValueError

    before = trace.get_current_span()
    with pytest.raises(ValueError):
        await fail()
    assert trace.get_current_span() is before
    function(1)
    assert trace.get_current_span() is before


# Off


def test_without_any_configuration_nothing_happens():
    op, error = rollout_trace_op(lambda x: x), ValueError()
    item = object()
    assert op(item) is item
    with pytest.raises(ValueError) as caught:
        rollout_trace_op(lambda: (_ for _ in ()).throw(error))()
    assert caught.value is error


def test_a_recorder_that_fails_does_not_reach_the_function(spans, monkeypatch, caplog):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")

    def broken(*args, **kwargs):
        raise RuntimeError("ours")

    with monkeypatch.context() as patched:
        patched.setattr("otel_rollout.recorders.to_json", broken)
        assert function(3) == (None, 3)
        assert function(4) == (None, 4)
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "otel-rollout failed to start the span of an op"
    ]


def test_a_result_that_cannot_be_recorded_ends_the_span_nevertheless(spans, monkeypatch):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")

    @rollout_trace_op
    def swap():
        monkeypatch.setattr("otel_rollout.recorders.to_json", lambda *a, **k: 1 / 0)
        return 7

    assert swap() == 7
    assert "output.value" not in only(spans).attributes


def test_deep_recursion_of_the_host_is_the_hosts_own_error():
    script = """
import sys
from otel_rollout import configure, rollout_trace_op
from opentelemetry.sdk.trace import TracerProvider
configure(tracer_provider=TracerProvider(shutdown_on_exit=False))
@rollout_trace_op
def down(n):
    return down(n + 1)
try:
    down(0)
except RecursionError:
    print("RecursionError")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "RecursionError", done.stderr[-2000:]

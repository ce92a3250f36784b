"""trajectory.py, identity.py: who a rollout is, and that it never mixes with another."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import gc
import inspect
import json
import threading
import time
import uuid
import weakref

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from otel_rollout import (
    Trajectory,
    binding,
    configure,
    current_trajectory,
    pipeline,
    rollout_trace_attr,
    rollout_trace_op,
)


def root_of(spans):
    (root,) = [span for span in spans.get_finished_spans() if span.parent is None]
    return root


def identity(span):
    return {key: value for key, value in span.resource.attributes.items() if key.startswith("rollout.")}


@rollout_trace_op(name="op")
def op(x=None):
    return x


@rollout_trace_op(name="aop")
async def aop(x=None):
    await asyncio.sleep(0)
    return x


# The two functions' names, arguments and defaults


def test_the_signature_extends_verls():
    parameters = list(inspect.signature(rollout_trace_attr).parameters.values())
    assert [(p.name, p.default, p.kind.name) for p in parameters[:6]] == [
        ("sample_index", None, "POSITIONAL_OR_KEYWORD"),
        ("step", None, "POSITIONAL_OR_KEYWORD"),
        ("rollout_n", None, "POSITIONAL_OR_KEYWORD"),
        ("name", "rollout_trace", "POSITIONAL_OR_KEYWORD"),
        ("validate", False, "POSITIONAL_OR_KEYWORD"),
        ("trace", True, "POSITIONAL_OR_KEYWORD"),
    ]
    assert {p.kind.name for p in parameters[6:]} == {"KEYWORD_ONLY", "VAR_KEYWORD"}


def test_the_defaults_by_the_letter(spans):
    with rollout_trace_attr() as trajectory:
        assert isinstance(trajectory, Trajectory)
        assert (trajectory.active, trajectory.recording) == (True, True)
    (root,) = spans.get_finished_spans()
    assert (root.name, root.kind, root.parent, root.links) == (
        "invoke_agent rollout_trace",
        SpanKind.INTERNAL,
        None,
        (),
    )
    assert dict(root.attributes) == {
        "openinference.span.kind": "AGENT",
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "rollout_trace",
        "gen_ai.conversation.id": trajectory.id,
        "session.id": trajectory.id,
        "rollout.status": "completed",
        "rollout.turns": 0,
        "rollout.tool_calls": 0,
        "rollout.tool_errors": 0,
        "gen_ai.usage.input_tokens": 0,
        "gen_ai.usage.output_tokens": 0,
        "rollout.response_tokens": 0,
        "rollout.observation_tokens": 0,
    }
    assert identity(root) == {
        "rollout.validate": False,
        "rollout.group_id": trajectory.id,
        "rollout.trajectory_id": trajectory.id,
    }
    assert root.status.status_code is StatusCode.UNSET
    assert len(trajectory.id) == 32


def test_the_whole_identity_stands_on_every_span_with_its_types(spans):
    configure("gsm8k", "qwen", framework="verl", framework_version="0.9.1")
    with rollout_trace_attr(
        7, 3, 2, "math", True, True, trajectory_id="t1", color="red", depth=4, ratio=0.5, flag=True
    ):
        op()
    inner, root = spans.get_finished_spans()
    expected = {
        "rollout.project_name": "gsm8k",
        "rollout.experiment_name": "qwen",
        "rollout.step": 3,
        "rollout.sample_index": 7,
        "rollout.rollout_n": 2,
        "rollout.validate": True,
        "rollout.group_id": "qwen/3/7",
        "rollout.trajectory_id": "t1",
        "rollout.framework": "verl",
        "rollout.framework_version": "0.9.1",
        "rollout.attr.color": "red",
        "rollout.attr.depth": 4,
        "rollout.attr.ratio": 0.5,
        "rollout.attr.flag": True,
    }
    for span in (inner, root):
        assert identity(span) == expected
        assert {key: type(value) for key, value in identity(span).items()} == {
            key: type(value) for key, value in expected.items()
        }
    assert root.name == "invoke_agent math"
    assert (root.attributes["gen_ai.conversation.id"], root.attributes["session.id"]) == ("t1", "qwen/3/7")
    assert not any(key.startswith("rollout.") for key in inner.attributes)


class Index:
    """Like numpy.int64: no int, but an index."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


SAMPLE = uuid.UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (7, 7),
        (0, 0),
        (Index(9), 9),
        ("9", "9"),
        (SAMPLE, str(SAMPLE)),
        (2**70, str(2**70)),
        (-5, -5),
        (None, None),
        (True, 1),
        (1.5, "1.5"),
    ],
)
@pytest.mark.parametrize("key", ["sample_index", "rollout_n"])
def test_ids_are_ints_where_their_source_is_one_else_strings(spans, key, given, written):
    with rollout_trace_attr(**{key: given}):
        pass
    found = identity(root_of(spans)).get(f"rollout.{key}")
    assert (found, type(found)) == (written, type(written))


@pytest.mark.parametrize(
    ("step", "written"), [(0, 0), (12, 12), (Index(3), 3), (-1, None), (-7, None), (None, None), ("5", "5")]
)
def test_the_step_is_an_int_and_left_out_where_it_is_not_known(spans, step, written, caplog):
    for _ in range(2):
        with rollout_trace_attr(step=step):
            pass
    roots = spans.get_finished_spans()
    assert [identity(root).get("rollout.step") for root in roots] == [written] * 2
    assert len(caplog.records) == (1 if step == "5" else 0)


@pytest.mark.parametrize(
    ("experiment", "given", "group"),
    [
        (None, {"sample_index": 4}, "4"),
        (None, {"sample_index": 4, "step": 2}, "2/4"),
        ("e", {"sample_index": 4, "step": 2}, "e/2/4"),
        ("e", {"sample_index": 4, "step": -1}, "e/4"),
        ("e", {"sample_index": 4, "step": 2, "experiment_name": "own"}, "own/2/4"),
        ("e", {"sample_index": SAMPLE, "step": 0}, f"e/0/{SAMPLE}"),
        ("e", {"sample_index": 4, "step": 2, "group_id": "uid-7"}, "uid-7"),
        ("e", {"group_id": SAMPLE}, str(SAMPLE)),
        ("e", {"group_id": 0}, "0"),
    ],
)
def test_the_group(spans, experiment, given, group):
    configure(experiment_name=experiment)
    with rollout_trace_attr(**given):
        pass
    root = root_of(spans)
    assert identity(root)["rollout.group_id"] == group == root.attributes["session.id"]


def test_the_identity_is_merged_with_the_process_resource(spans):
    provider = TracerProvider(resource=Resource({"service.name": "trainer", "host.name": "n1"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    pipeline.shutdown()
    configure(tracer_provider=provider)
    with rollout_trace_attr(sample_index=1):
        op()
    op()
    *inside, outside = spans.get_finished_spans()
    assert all(span.resource.attributes["service.name"] == "trainer" for span in inside)
    assert all(span.resource.attributes["rollout.sample_index"] == 1 for span in inside)
    assert dict(outside.resource.attributes) == {"service.name": "trainer", "host.name": "n1"}
    assert provider.resource.attributes == {"service.name": "trainer", "host.name": "n1"}


# What is wrong is said once and never raises


class Unreadable:
    def __str__(self):
        raise RuntimeError("str")

    __repr__ = __str__


class Undecided:
    """Like an array of two: its truth value is an error."""

    def __bool__(self):
        raise ValueError("ambiguous")

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    "given",
    [
        {"sample_index": Unreadable()},
        {"sample_index": [1, 2]},
        {"step": Unreadable()},
        {"step": object()},
        {"rollout_n": Unreadable()},
        {"validate": Undecided()},
        {"name": Unreadable()},
        {"name": 7},
        {"name": None},
        {"group_id": Unreadable()},
        {"trajectory_id": 7},
        {"trajectory_id": Unreadable()},
        {"project_name": 7},
        {"experiment_name": Unreadable()},
        {"experiment_name": ["e"]},
        {"thing": Unreadable()},
        {"thing": {"a": [1]}},
        {"thing": None},
        {"thing": 2**80},
    ],
    ids=lambda given: f"{next(iter(given))}={type(next(iter(given.values()))).__name__}",
)
def test_odd_values_cost_neither_the_rollout_nor_its_spans(spans, given):
    for _ in range(2):
        with rollout_trace_attr(**given) as trajectory:
            assert op(5) == 5
            assert trajectory.active
    assert len(spans.get_finished_spans()) == 4
    for span in spans.get_finished_spans():
        found = identity(span)
        assert type(found["rollout.trajectory_id"]) is str
        assert type(found["rollout.group_id"]) is str
        assert type(found["rollout.validate"]) is bool
        assert all(type(value) in (str, int, float, bool) for value in found.values())


def test_extra_attributes_that_are_no_scalars_become_json(spans):
    with rollout_trace_attr(tags=["a", 1], nested={"b": None}):
        pass
    found = identity(root_of(spans))
    assert found["rollout.attr.tags"] == '["a",1]'
    assert json.loads(found["rollout.attr.nested"]) == {"b": None}


@pytest.mark.parametrize("value", ["high", None, [1], Unreadable(), {}])
def test_a_reward_that_is_no_number_is_said_once_and_left_out(spans, value, caplog):
    with rollout_trace_attr() as trajectory:
        trajectory.reward(value)
        trajectory.reward(value)
    assert "rollout.reward" not in root_of(spans).attributes
    (record,) = caplog.records
    assert type(value).__name__ in record.getMessage()


@pytest.mark.parametrize("name", [7, None, Unreadable()], ids=lambda name: type(name).__name__)
def test_a_reward_of_an_odd_name_is_recorded(spans, name):
    with rollout_trace_attr() as trajectory:
        trajectory.reward(0.5, name=name)
    found = [key for key in root_of(spans).attributes if key.startswith("rollout.rewards.")]
    assert len(found) == 1


@pytest.mark.parametrize("key", [7, None, Unreadable()], ids=lambda key: type(key).__name__)
def test_odd_keys_and_reasons_never_raise(spans, key):
    with rollout_trace_attr() as trajectory:
        trajectory.set(key, 1)
        trajectory.set(value=Unreadable())
        trajectory.reject(key)
    assert root_of(spans).attributes["rollout.status"] == "rejected"


# What the trajectory takes


def test_rewards_are_a_span_an_event_and_attributes_of_the_root(spans):
    with rollout_trace_attr() as trajectory:
        trajectory.reward(1)
        trajectory.reward(0.25, name="format.strict")
        trajectory.reward(True, name="used_tool")
    *rewards, root = spans.get_finished_spans()
    assert [span.name for span in rewards] == ["evaluate reward", "evaluate format.strict", "evaluate used_tool"]
    for span, name, score in zip(rewards, ["reward", "format.strict", "used_tool"], [1.0, 0.25, 1.0], strict=True):
        found = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": score}
        assert dict(span.attributes) == {"openinference.span.kind": "EVALUATOR", **found}
        assert [(event.name, dict(event.attributes)) for event in span.events] == [("gen_ai.evaluation.result", found)]
        assert type(span.attributes["gen_ai.evaluation.score.value"]) is float
        assert span.parent.span_id == root.context.span_id
    written = {key: value for key, value in root.attributes.items() if key.startswith("rollout.reward")}
    assert written == {"rollout.reward": 1.0, "rollout.rewards.format_strict": 0.25, "rollout.rewards.used_tool": 1.0}
    assert {type(value) for value in written.values()} == {float}


class Scalar:
    """Like a 0-d tensor."""

    ndim = 0

    def item(self):
        return 0.5

    __float__ = item


def test_a_tensor_is_a_reward(spans):
    with rollout_trace_attr() as trajectory:
        trajectory.reward(Scalar())
        trajectory.set(loss=Scalar())
    assert root_of(spans).attributes["rollout.reward"] == 0.5
    assert root_of(spans).attributes["rollout.attr.loss"] == 0.5


def test_the_last_reward_of_a_name_counts(spans):
    with rollout_trace_attr() as trajectory:
        trajectory.reward(0.1)
        trajectory.reward(0.9)
    assert root_of(spans).attributes["rollout.reward"] == 0.9


def test_a_late_reward_joins_the_trace_of_its_trajectory(spans):
    with rollout_trace_attr(sample_index=1) as first:
        pass
    with rollout_trace_attr(sample_index=2):
        first.reward(0.5, name="judge")
    ended, late, other = spans.get_finished_spans()
    assert late.name == "evaluate judge"
    assert late.context.trace_id == ended.context.trace_id != other.context.trace_id
    assert late.parent.span_id == ended.context.span_id
    assert late.resource.attributes["rollout.sample_index"] == 1


def test_set_writes_attributes_of_the_root(spans):
    with rollout_trace_attr() as trajectory:
        trajectory.set("dataset", "gsm8k")
        trajectory.set(level=3, tags=["a"])
    found = root_of(spans).attributes
    assert (found["rollout.attr.dataset"], found["rollout.attr.level"], found["rollout.attr.tags"]) == (
        "gsm8k",
        3,
        '["a"]',
    )


def test_the_id_can_be_given(spans):
    with rollout_trace_attr(trajectory_id="mine") as trajectory:
        assert trajectory.id == "mine"


def test_ids_are_unique(spans):
    ids = set()
    for _ in range(50):
        with rollout_trace_attr() as trajectory:
            ids.add(trajectory.id)
    assert len(ids) == 50


# Statuses


def statuses(spans):
    root = root_of(spans)
    return root.attributes["rollout.status"], root.status.status_code.name, root.attributes.get("error.type")


def test_rejected(spans):
    with rollout_trace_attr() as trajectory:
        trajectory.reject("too_long")
    assert statuses(spans) == ("rejected", "UNSET", None)
    assert root_of(spans).attributes["rollout.rejection_reason"] == "too_long"


@pytest.mark.parametrize("status", ["truncated", "aborted"])
def test_an_adapters_status(spans, status):
    with rollout_trace_attr() as trajectory:
        trajectory.status = status
    assert statuses(spans) == (status, "UNSET", None)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), ("error", "ERROR", "ValueError")),
        (KeyboardInterrupt(), ("error", "ERROR", "KeyboardInterrupt")),
        (asyncio.CancelledError(), ("cancelled", "ERROR", "CancelledError")),
        (GeneratorExit(), ("cancelled", "UNSET", None)),
    ],
    ids=repr,
)
def test_failures(spans, error, expected):
    def fail():
        with rollout_trace_attr() as trajectory:
            trajectory.reject("also")
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert statuses(spans) == expected


async def test_a_cancelled_trajectory(spans):
    async def rollout():
        async with rollout_trace_attr():
            await asyncio.sleep(60)

    task = asyncio.create_task(rollout())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert statuses(spans) == ("cancelled", "ERROR", "CancelledError")


def test_a_caught_tool_error_leaves_the_trajectory_completed(spans):
    @rollout_trace_op(kind="tool")
    def tool():
        raise OSError("down")

    with rollout_trace_attr(), pytest.raises(OSError, match="down"):
        tool()
    assert statuses(spans) == ("completed", "UNSET", None)
    assert (root_of(spans).attributes["rollout.tool_calls"], root_of(spans).attributes["rollout.tool_errors"]) == (1, 1)


def test_the_error_has_its_stack_trace_once(spans):
    @rollout_trace_op
    def fail():
        raise ValueError("deep")

    with pytest.raises(ValueError, match="deep"), rollout_trace_attr():
        fail()
    inner, root = spans.get_finished_spans()
    assert "exception.stacktrace" in inner.events[0].attributes
    assert dict(root.events[0].attributes) == {"exception.type": "ValueError", "exception.message": "deep"}


# Ways to open one


async def test_async_with_and_decorators(spans):
    async with rollout_trace_attr(sample_index=1) as trajectory:
        assert current_trajectory() is trajectory

    @rollout_trace_attr(sample_index=2)
    def sync(a, *, b):
        """Doc."""
        return a, b, current_trajectory().id

    @rollout_trace_attr(sample_index=3)
    async def coroutine(a):
        await asyncio.sleep(0)
        return a, current_trajectory().id

    first, second = sync(1, b=2), sync(1, b=2)
    assert first[:2] == (1, 2)
    assert first[2] != second[2]
    results = await asyncio.gather(*(coroutine(at) for at in range(3)))
    assert [at for at, _ in results] == [0, 1, 2]
    assert len({identifier for _, identifier in results}) == 3
    assert (sync.__name__, sync.__doc__, inspect.iscoroutinefunction(coroutine)) == ("sync", "Doc.", True)
    assert [span.resource.attributes["rollout.sample_index"] for span in spans.get_finished_spans()] == [
        1,
        2,
        2,
        3,
        3,
        3,
    ]
    assert current_trajectory() is None


def test_a_decorated_function_may_call_itself(spans):
    @rollout_trace_attr()
    def down(n):
        return [current_trajectory().id, *(down(n - 1) if n else [])]

    assert len(set(down(3))) == 4
    assert {span.parent for span in spans.get_finished_spans()} == {None}


def test_a_generator_is_refused_as_its_body_would_run_outside():
    def generator():
        yield

    async def async_generator():
        yield

    for function in (generator, async_generator):
        with pytest.raises(TypeError, match="use `with` inside it"):
            rollout_trace_attr()(function)


def test_one_object_may_open_several_in_turn(spans):
    attr = rollout_trace_attr(sample_index=1)
    ids = []
    for _ in range(2):
        with attr as trajectory:
            ids.append(trajectory.id)
    assert len(set(ids)) == 2
    assert len({span.context.trace_id for span in spans.get_finished_spans()}) == 2


# Nothing mixes


async def test_200_concurrent_trajectories_in_one_loop(spans):
    async def rollout(index):
        async with rollout_trace_attr(sample_index=index, rollout_n=index % 4) as trajectory:
            for turn in range(3):
                await aop(index)
                await asyncio.sleep(0.001 * ((index * 7 + turn) % 5))
                assert current_trajectory() is trajectory
            trajectory.reward(index)
            return trajectory.id

    ids = await asyncio.gather(*(rollout(index) for index in range(200)))
    assert len(set(ids)) == 200
    by_trace = {}
    for span in spans.get_finished_spans():
        by_trace.setdefault(span.context.trace_id, []).append(span)
    assert len(by_trace) == 200
    for found in by_trace.values():
        assert [span.name for span in found] == ["aop", "aop", "aop", "evaluate reward", "invoke_agent rollout_trace"]
        (index,) = {span.resource.attributes["rollout.sample_index"] for span in found}
        assert {json.loads(span.attributes["input.value"])["x"] for span in found[:3]} == {index}
        assert {span.parent.span_id for span in found[:-1]} == {found[-1].context.span_id}
        assert found[-1].attributes["rollout.reward"] == float(index)
        assert found[-1].resource.attributes["rollout.trajectory_id"] == ids[index]


def test_threads_do_not_share_a_trajectory(spans):
    barrier = threading.Barrier(8)

    def rollout(index):
        with rollout_trace_attr(sample_index=index):
            barrier.wait(10)
            op(index)
            barrier.wait(10)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(rollout, range(8)))
    ops = [span for span in spans.get_finished_spans() if span.name == "op"]
    assert {span.resource.attributes["rollout.sample_index"] for span in ops} == set(range(8))
    for span in ops:
        assert json.loads(span.attributes["input.value"]) == {"x": span.resource.attributes["rollout.sample_index"]}


def test_an_executor_sees_the_trajectory_only_with_its_context(spans):
    with concurrent.futures.ThreadPoolExecutor(1) as pool, rollout_trace_attr(sample_index=5):
        pool.submit(op, "without").result()
        pool.submit(contextvars.copy_context().run, op, "with").result()
    plain, inside, root = spans.get_finished_spans()
    assert plain.parent is None
    assert not identity(plain)
    assert inside.parent.span_id == root.context.span_id
    assert identity(inside) == identity(root)


async def test_to_thread_carries_the_trajectory(spans):
    async with rollout_trace_attr():
        await asyncio.to_thread(op)
    inside, root = spans.get_finished_spans()
    assert inside.parent.span_id == root.context.span_id


def test_nested_trajectories_are_two_traces_with_a_link(spans):
    with rollout_trace_attr(sample_index=1) as outer:
        with rollout_trace_attr(sample_index=2) as inner:
            assert current_trajectory() is inner
            outer.reward(0.1)
            op("inner")
        assert current_trajectory() is outer
        op("outer")
    reward, in_inner, inner_root, in_outer, outer_root = spans.get_finished_spans()
    assert inner_root.parent is outer_root.parent is None
    assert inner_root.context.trace_id != outer_root.context.trace_id
    assert [link.context.span_id for link in inner_root.links] == [outer_root.context.span_id]
    assert (in_inner.parent.span_id, in_outer.parent.span_id) == (
        inner_root.context.span_id,
        outer_root.context.span_id,
    )
    assert reward.context.trace_id == outer_root.context.trace_id
    assert [span.resource.attributes["rollout.sample_index"] for span in (in_inner, in_outer)] == [2, 1]


def test_a_trajectory_links_to_the_step_and_has_no_parent(spans):
    tracer = binding.current_binding().tracer
    with tracer.start_as_current_span("rollout step") as step:
        with rollout_trace_attr():
            pass
        assert trace.get_current_span() is step
    root, step = spans.get_finished_spans()
    assert root.parent is None
    assert root.context.trace_id != step.context.trace_id
    assert [link.context.span_id for link in root.links] == [step.context.span_id]


def test_spans_of_the_host_inside_are_children(spans):
    tracer = binding.current_binding().tracer
    with rollout_trace_attr(), tracer.start_as_current_span("http"):
        op()
    inside, http, root = spans.get_finished_spans()
    assert http.parent.span_id == root.context.span_id
    assert inside.parent.span_id == http.context.span_id


def test_an_op_outside_any_trajectory_is_a_plain_span(spans):
    tracer = binding.current_binding().tracer
    with tracer.start_as_current_span("host"):
        op()
    inside, host = spans.get_finished_spans()
    assert inside.parent.span_id == host.context.span_id
    assert not identity(inside)


# Off


async def test_trace_false_switches_off_everything_below(spans):
    @rollout_trace_op(kind="tool")
    def tool():
        return 1

    with rollout_trace_attr(trace=False) as off:
        assert (off.active, off.recording) == (False, False)
        assert isinstance(off, Trajectory)
        assert current_trajectory() is off
        off.reward(1)
        off.set("a", 1)
        off.set(b=2)
        off.reject("no")
        assert op(1) == 1
        assert tool() == 1
        assert await aop(2) == 2
        with rollout_trace_attr(sample_index=1) as inner:
            assert not inner.active
            inner.reward(1)
            op()
        async with rollout_trace_attr(trace=True):
            await asyncio.gather(aop(), aop())
    assert spans.get_finished_spans() == ()
    op()
    assert len(spans.get_finished_spans()) == 1


def test_trace_false_inside_a_trajectory(spans):
    with rollout_trace_attr():
        with rollout_trace_attr(trace=False):
            op("off")
        op("on")
    inside, _ = spans.get_finished_spans()
    assert json.loads(inside.attributes["input.value"]) == {"x": "on"}


def test_without_configuration_a_trajectory_does_nothing():
    with rollout_trace_attr(sample_index=1) as trajectory:
        assert not trajectory.active
        trajectory.reward(1)
        trajectory.set(a=1)
        trajectory.reject("no")
        assert op(3) == 3
        assert len(trajectory.id) == 32
    error = ValueError()
    with pytest.raises(ValueError) as caught, rollout_trace_attr():
        raise error
    assert caught.value is error


def test_off_costs_microseconds():
    def best(function, rounds=5, calls=2000):
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - started) / calls)
        return min(times)

    def one():
        with rollout_trace_attr(sample_index=1, trace=False):
            op()

    assert best(op) < 20e-6
    assert best(one) < 80e-6


def test_our_failure_to_open_one_does_not_reach_the_rollout(spans, monkeypatch, caplog):
    monkeypatch.delenv("OTEL_ROLLOUT_RERAISE")
    with monkeypatch.context() as patched:
        patched.setattr("otel_rollout.trajectory.identity_of", lambda *args: 1 / 0)
        with rollout_trace_attr() as trajectory:
            assert op(2) == 2
            trajectory.reward(1)
    assert len(caplog.records) == 1
    assert current_trajectory() is None


# Tracers and memory


class PlainTracer(trace.Tracer):
    """A tracer without a resource, as another SDK may have."""

    def __init__(self, tracer):
        self._tracer = tracer

    def start_span(self, *args, **kwargs):
        return self._tracer.start_span(*args, **kwargs)

    def start_as_current_span(self, *args, **kwargs):
        return self._tracer.start_as_current_span(*args, **kwargs)


def test_without_a_resource_the_identity_stands_on_the_root(spans):
    binding.bind(binding.Binding(tracer=PlainTracer(binding.current_binding().tracer)))
    with rollout_trace_attr(sample_index=4, step=1):
        op()
    inside, root = spans.get_finished_spans()
    assert (root.attributes["rollout.sample_index"], root.attributes["rollout.step"]) == (4, 1)
    assert inside.parent.span_id == root.context.span_id


def test_an_ended_trajectory_holds_nothing_of_the_rollout(spans):
    class Big:
        pass

    @rollout_trace_op(kind="tool")
    def tool(big):
        raise OSError("down")

    def rollout():
        big = Big()
        with rollout_trace_attr() as trajectory, contextlib.suppress(OSError):
            tool(big)
        return trajectory, weakref.ref(big)

    gc.collect()
    gc.disable()
    try:
        trajectory, big = rollout()
        assert big() is None
        assert trajectory.id
    finally:
        gc.enable()

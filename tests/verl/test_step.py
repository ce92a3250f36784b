import asyncio

import pytest
from verl_loop import batch_v0, batch_v1, client, manager_v0, manager_v1, run_v1, worker_v0, worker_v1

from otel_rollout import semconv

STEP = {
    semconv.SPAN_KIND: "CHAIN",
    semconv.STEP: 5,
    semconv.VALIDATE: False,
    semconv.STEP_GROUPS: 3,
    semconv.STEP_TRAJECTORIES: 6,
}


def two(rollout, make, **settings):
    cfg = rollout.config(**{"group": 2, "workers": 2, **settings})
    return cfg, [make(cfg, client(cfg, rollout.server(turns=1))) for _ in range(2)]


def step_span(rollout):
    (span,) = [span for span in rollout.spans() if span.name == "rollout step"]
    return span


def links(view):
    return [(link.trace_id, link.span_id) for link in view.root.links]


async def test_v0_trajectories_of_all_workers_link_to_the_step_s_span(rollout):
    cfg, workers = two(rollout, worker_v0)
    batch = batch_v0(3, group=2, step=5)
    output = await manager_v0(cfg, *workers).generate_sequences(batch)
    assert len(output) == 6
    step = step_span(rollout)
    assert step.parent_id is None
    assert step.attributes == STEP
    views = rollout.trajectories()
    assert [links(view) for view in views] == [[(step.trace_id, step.span_id)]] * 6
    assert step.trace_id not in {view.trace_id for view in views}
    assert "otel_rollout_step" not in batch.meta_info


async def test_v1_trajectories_of_all_workers_link_to_the_step_s_span(rollout):
    cfg, workers = two(rollout, worker_v1)
    batch = batch_v1(3, step=5)
    statuses = await run_v1(*workers, batch=batch, manager=manager_v1(cfg, *workers))
    assert set(statuses.values()) == {"finished"}
    step = step_span(rollout)
    assert step.attributes == STEP
    views = rollout.trajectories()
    assert [links(view) for view in views] == [[(step.trace_id, step.span_id)]] * 6
    assert "otel_rollout_step" not in batch


async def test_without_a_manager_there_is_no_link(rollout):
    await rollout.v0(batch_v0(1), turns=1)
    assert rollout.only().root.links == ()


def test_the_manager_may_be_called_without_an_event_loop_as_the_trainer_does(rollout):
    """verl's auto_await runs the coroutine itself then."""
    cfg = rollout.config(group=2)

    async def make():
        return worker_v0(cfg, client(cfg, rollout.server(turns=1)))

    manager = manager_v0(cfg, asyncio.run(make()))
    output = manager.generate_sequences(batch_v0(1, group=2))
    assert len(output) == 2
    assert step_span(rollout).attributes[semconv.STEP_TRAJECTORIES] == 2


async def test_the_manager_may_be_called_from_plain_code_inside_a_running_loop(rollout):
    cfg = rollout.config()
    manager = manager_v0(cfg, worker_v0(cfg, client(cfg, rollout.server(turns=1))))

    def trainer_code():
        return manager.generate_sequences(batch_v0(1))

    assert len(trainer_code()) == 1
    assert step_span(rollout).end_ns > 0


async def test_switched_off_the_manager_is_verl_s_own(rollout):
    cfg, workers = two(rollout, worker_v0, backend=None)
    assert len(await manager_v0(cfg, *workers).generate_sequences(batch_v0(2, group=2))) == 4
    assert rollout.spans() == []


async def test_a_failing_worker_ends_the_step_and_raises_its_own_error(rollout):
    cfg, workers = two(rollout, worker_v0)
    error = ConnectionError("gone")

    async def fail(batch):
        raise error

    workers[1].generate_sequences = fail
    batch = batch_v0(1, group=2)
    with pytest.raises(ConnectionError) as raised:
        await manager_v0(cfg, *workers).generate_sequences(batch)
    assert raised.value is error
    assert step_span(rollout).end_ns > 0
    assert "otel_rollout_step" not in batch.meta_info

import asyncio

import numpy as np
import pytest
import verl
from verl_loop import ScriptedServer, batch_v0, batch_v1, client, manager_v0, worker_v0

from otel_rollout import semconv

IDENTITY = {
    semconv.PROJECT_NAME: (str, "demo"),
    semconv.EXPERIMENT_NAME: (str, "exp"),
    semconv.STEP: (int, 7),
    semconv.SAMPLE_INDEX: (int, 0),
    semconv.ROLLOUT_N: (int, 0),
    semconv.VALIDATE: (bool, False),
    semconv.FRAMEWORK: (str, "verl"),
    semconv.FRAMEWORK_VERSION: (str, verl.__version__),
}


def expected_tree(turn_spans, turns):
    calls = [span for turn in range(1, turns + 1) for span in turn_spans(*(["calculator"] if turn < turns else []))]
    return ("invoke_agent tool_agent", [("ToolAgentLoop.run", calls), ("evaluate reward", [])])


def serials(views):
    return [(view.sample_index, view.rollout_n) for view in views]


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_each_trajectory_is_one_trace_with_the_whole_tree_below_a_parentless_root(
    rollout, tree, turn_spans, trainer
):
    if trainer == "v0":
        await rollout.v0(batch_v0(2, group=3, step=7), reward=True, group=3)
    else:
        await rollout.v1(batch_v1(2, step=7), reward=True, group=3)
    views = rollout.trajectories()
    assert len({view.trace_id for view in views}) == len(views) == 6
    for view in views:
        assert view.root.parent_id is None
        assert tree(view) == expected_tree(turn_spans, 3)
        assert len(view.spans) == 11
        assert {span.status for span in view.spans} == {"UNSET"}
        assert {span.scope for span in view.spans} == {"otel_rollout"}
    assert len(rollout.spans()) == 66


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_the_identity_is_the_resource_of_every_span_with_exact_types(rollout, trainer):
    if trainer == "v0":
        batch = batch_v0(2, group=3, step=7)
        uids = list(dict.fromkeys(batch.non_tensor_batch["uid"]))
        await rollout.v0(batch, group=3)
    else:
        batch = batch_v1(2, step=7)
        uids = [str(uid) for uid in batch["uid"]]
        await rollout.v1(batch, group=3)
    views = rollout.trajectories()
    assert serials(views) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [view.group_id for view in views] == [uids[0]] * 3 + [uids[1]] * 3
    assert len({view.trajectory_id for view in views}) == 6
    first = views[0]
    for span in first.spans:
        own = {key: value for key, value in span.resource.items() if key.startswith("rollout.")}
        assert own.pop(semconv.GROUP_ID) == uids[0]
        assert own.pop(semconv.TRAJECTORY_ID) == first.trajectory_id
        assert {key: (type(value), value) for key, value in own.items()} == IDENTITY
        assert span.resource["telemetry.sdk.name"] == "opentelemetry"
    attributes = first.root.attributes
    assert attributes[semconv.SPAN_KIND] == "AGENT"
    assert attributes[semconv.AGENT_NAME] == "tool_agent"
    assert attributes[semconv.CONVERSATION_ID] == first.trajectory_id
    assert attributes[semconv.SESSION_ID] == uids[0]


async def test_v1_rollout_n_is_the_session_whose_row_lies_in_the_queue(rollout):
    rows = await rollout.v1(batch_v1(1, step=2), group=3)
    views = {view.rollout_n: view for view in rollout.trajectories()}
    for key, row in rows.items():
        view = views[int(key.rsplit("_", 2)[1])]
        assert view.group_id == key.rsplit("_", 2)[0]
        last = view.turns[-1]
        whole = row["prompts"].tolist() + row["responses"].tolist()
        assert last.prompt_ids + last.completion_ids == whole


async def test_v0_rows_of_the_output_are_the_trajectories_in_order(rollout):
    output = await rollout.v0(batch_v0(2, group=2))
    for row, view in enumerate(rollout.trajectories()):
        last = view.turns[-1]
        mask = output.batch["attention_mask"][row].bool()
        assert last.prompt_ids + last.completion_ids == output.batch["input_ids"][row][mask].tolist()


async def test_a_group_spread_over_two_workers_has_unique_serials(rollout):
    cfg = rollout.config(group=4, workers=2)
    servers = [ScriptedServer(rollout.model, turns=1), ScriptedServer(rollout.model, turns=1)]
    workers = [worker_v0(cfg, client(cfg, server)) for server in servers]
    batch = batch_v0(3, group=4)
    await manager_v0(cfg, *workers).generate_sequences(batch)
    assert [len(server.calls) for server in servers] == [6, 6]
    views = rollout.trajectories()
    assert serials(views) == [(sample, n) for sample in range(3) for n in range(4)]
    assert len({view.group_id for view in views}) == 3


async def test_without_priorities_repeated_rows_are_numbered_by_group_also_when_they_are_not_side_by_side(rollout):
    batch = batch_v0(2, group=2)
    await rollout.v0(batch[np.array([0, 2, 1, 3])], group=2, turns=1)
    assert serials(rollout.trajectories()) == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_two_batches_at_once_in_one_worker_do_not_mix(rollout):
    cfg = rollout.config(group=2)
    worker = worker_v0(cfg, client(cfg, rollout.server(latency=0.01)))
    await asyncio.gather(*[worker.generate_sequences(batch_v0(2, group=2, step=step)) for step in (1, 2)])
    views = rollout.trajectories()
    assert [(view.step, view.sample_index, view.rollout_n) for view in views] == [
        (step, sample, n) for step in (1, 2) for sample in (0, 1) for n in (0, 1)
    ]
    assert all({span.resource[semconv.TRAJECTORY_ID] for span in view.spans} == {view.trajectory_id} for view in views)
    assert {len(view.spans) for view in views} == {10}


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_validation_is_marked_and_numbered_by_its_own_n(rollout, trainer):
    own = {"actor_rollout_ref__rollout__n": 5}
    if trainer == "v0":
        await rollout.v0(batch_v0(1, group=2, step=3, validate=True), group=2, **own)
    else:
        await rollout.v1(batch_v1(1, step=3, validate=True), group=2, **own)
    views = rollout.trajectories()
    assert [(view.resource[semconv.VALIDATE], view.rollout_n, view.step) for view in views] == [
        (True, 0, 3),
        (True, 1, 3),
    ]


async def test_fully_async_rows_have_no_step_and_their_uid_as_group(rollout):
    batch = batch_v0(1, group=2, step=None, validate=None, uid=False, columns={"uid": ["uid_sample_0_5"]})
    await rollout.v0(batch, group=2)
    views = rollout.trajectories()
    assert all(semconv.STEP not in view.resource for view in views)
    assert [(view.group_id, view.rollout_n, view.resource[semconv.VALIDATE]) for view in views] == [
        ("uid_sample_0_5", 0, False),
        ("uid_sample_0_5", 1, False),
    ]


async def test_without_uid_the_group_is_experiment_step_and_sample(rollout):
    await rollout.v0(batch_v0(2, group=2, step=4, uid=False), group=2, turns=1)
    assert [(view.group_id, view.rollout_n) for view in rollout.trajectories()] == [
        ("exp/4/0", 0), ("exp/4/0", 1), ("exp/4/1", 0), ("exp/4/1", 1),
    ]  # fmt: skip


async def test_a_dataset_without_index_still_has_groups_and_serials(rollout):
    await rollout.v1(batch_v1(2, indices=[0, 0]), group=2, turns=1)
    views = rollout.trajectories()
    assert serials(views) == [(0, 0), (0, 0), (0, 1), (0, 1)]
    assert len({(view.group_id, view.rollout_n) for view in views}) == 4


async def test_v0_without_index_column_counts_within_the_uid(rollout):
    await rollout.v0(batch_v0(2, group=2, index=False), group=2, turns=1)
    views = rollout.trajectories()
    assert sorted(view.rollout_n for view in views) == [0, 0, 1, 1]
    assert len({view.group_id for view in views}) == 2


async def test_an_index_that_is_text_stays_text(rollout):
    await rollout.v1(batch_v1(1, indices=["a1b2"]), turns=1)
    assert rollout.only().resource[semconv.SAMPLE_INDEX] == "a1b2"

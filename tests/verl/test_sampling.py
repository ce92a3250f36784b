from collections import Counter

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from verl_loop import batch_v0, batch_v1, client, manager_v0, manager_v1, run_v0, run_v1, worker_v0, worker_v1

import otel_rollout
from otel_rollout import sampling
from otel_rollout.sampling import cutoff_for, group_hash

UIDS = [f"group-{number}" for number in range(12)]


@pytest.fixture
def sampled(rollout, forget, monkeypatch):
    """Rollouts of a process whose environment names our sampler, as a user's does: the provider is our own."""

    def with_argument(argument):
        otel_rollout.pipeline.shutdown()
        forget()
        monkeypatch.setattr(sampling, "_announced", sampling._Steps())
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "rollout_group")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
        rollout.exporter = InMemorySpanExporter()
        otel_rollout.configure(exporters=[rollout.exporter])
        return rollout

    return with_argument


def random_numbers():
    """numpy's global random state, that verl's own sampling draws from and ours must not."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  what verl itself uses
    return kind, keys.tolist(), *rest


async def step(rollout, trainer, *, count=12, group=2, number=1, managed=False, workers=1, **settings):
    """One step over the groups of `UIDS`; returns how many trajectories of each group were traced."""
    cfg = rollout.config(group=group, workers=workers, **settings)
    make, manage = (worker_v0, manager_v0) if trainer == "v0" else (worker_v1, manager_v1)
    own = [make(cfg, client(cfg, rollout.server(turns=1, gen_tokens=4))) for _ in range(workers)]
    columns = {"uid": UIDS[:count]}
    rollout.exporter.clear()
    random_state = random_numbers()
    if trainer == "v0":
        batch = batch_v0(count, group=group, step=number, uid=False, columns=columns)
        output = await run_v0(manage(cfg, *own) if managed else own[0], batch)
        assert len(output) == count * group
    else:
        batch = batch_v1(count, step=number, columns=columns)
        statuses = await run_v1(*own, batch=batch, manager=manage(cfg, *own) if managed else None)
        assert list(statuses.values()) == ["finished"] * count
    assert random_numbers() == random_state
    return Counter(view.group_id for view in rollout.trajectories())


def below(share):
    return {uid: 2 for uid in UIDS if group_hash(uid) < share * 2**64}


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_a_share_keeps_whole_groups_by_their_hash(sampled, trainer):
    kept = await step(sampled("0.5"), trainer)
    assert kept == below(0.5)
    assert 0 < len(kept) < len(UIDS)


async def test_what_is_sampled_out_leaves_no_span_at_all(sampled):
    rollout = sampled("0")
    assert await step(rollout, "v1", count=3) == {}
    assert rollout.spans() == []


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_all_workers_keep_the_same_groups_of_n_per_step(sampled, trainer):
    """Five groups of two over three workers: v0 splits groups, so only what the driver says can keep them whole."""
    rollout = sampled("2/step")
    kept = await step(rollout, trainer, count=6, group=4, managed=True, workers=3)
    low = cutoff_for(2, UIDS[:6])
    assert kept == {uid: 4 for uid in UIDS[:6] if group_hash(uid) < low}
    assert len(kept) == 2


async def test_v0_keeps_a_group_whole_that_two_workers_share(sampled):
    rollout = sampled("1/step")
    kept = await step(rollout, "v0", count=3, group=4, managed=True, workers=2)
    assert list(kept.values()) == [4]


async def test_n_per_step_counts_each_step_and_validation_for_itself(sampled):
    rollout = sampled("3/step")
    for number in (1, 2):
        assert set((await step(rollout, "v1", managed=True, number=number)).values()) == {2}
        assert len(rollout.trajectories()) == 6


async def test_without_a_driver_n_per_step_is_the_first_that_a_process_sees(sampled):
    assert await step(sampled("2/step"), "v0", count=5) == {UIDS[0]: 2, UIDS[1]: 2}


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_max_samples_per_step_per_worker_keeps_whole_groups(rollout, trainer):
    assert await step(rollout, trainer, count=5, max_samples=2) == {UIDS[0]: 2, UIDS[1]: 2}
    assert len(rollout.spans()) == 4 * 4


async def test_max_samples_counts_each_step_and_validation_for_itself(rollout):
    for number in (1, 2):
        assert await step(rollout, "v1", count=3, max_samples=1, number=number) == {UIDS[0]: 2}


async def test_rows_that_come_in_several_batches_of_a_step_count_together(rollout):
    assert await step(rollout, "v0", count=2, max_samples=3, number=4) == {UIDS[0]: 2, UIDS[1]: 2}
    assert await step(rollout, "v0", count=5, max_samples=3, number=4) == dict.fromkeys(UIDS[:3], 2)


async def test_more_samples_allowed_than_there_are_keeps_all(rollout):
    assert await step(rollout, "v0", count=3, max_samples=8) == dict.fromkeys(UIDS[:3], 2)


async def test_zero_samples_keeps_none(rollout):
    assert await step(rollout, "v0", count=3, max_samples=0) == {}

import asyncio
import json

import pytest
from verl_loop import (
    Reply,
    ScriptedServer,
    batch_v0,
    batch_v1,
    client,
    run_v1,
    tool_call,
    worker_v0,
    worker_v1,
    write_reward,
)

from otel_rollout import semconv

CALL = tool_call("calculator", {"expression": "1+1"})


def rewards(span):
    prefix = semconv.REWARDS_PREFIX
    return {
        key: (type(value), value) for key, value in span.attributes.items() if key.startswith((semconv.REWARD, prefix))
    }


def evaluation(view):
    (span,) = [span for span in view.spans if span.kind == "EVALUATOR"]
    return span


@pytest.mark.parametrize("trainer", ["v0", "v1"])
async def test_reward_and_components_stand_on_the_root_and_the_evaluation(rollout, trainer):
    if trainer == "v0":
        output = await rollout.v0(batch_v0(1), reward=True)
        assert output.batch["rm_scores"].sum().item() == 1.0
    else:
        (row,) = (await rollout.v1(batch_v1(1), reward=True)).values()
        assert row["rm_scores"].sum().item() == 1.0
    view = rollout.only()
    assert rewards(view.root) == {
        "rollout.reward": (float, 1.0),
        "rollout.rewards.acc": (float, 1.0),
        "rollout.rewards.format": (float, 0.5),
        "rollout.rewards.turns": (float, 6.0),
    }
    span = evaluation(view)
    assert (span.name, span.parent_id, span.status) == ("evaluate reward", view.root.span_id, "UNSET")
    assert {key: span.attributes[key] for key in span.attributes if key.startswith("gen_ai")} == {
        semconv.EVALUATION_NAME: "reward",
        semconv.EVALUATION_SCORE: 1.0,
    }
    assert [(event.name, event.attributes) for event in span.events] == [
        (semconv.EVALUATION_EVENT, {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: score})
        for name, score in [("reward", 1.0), ("acc", 1.0), ("format", 0.5), ("turns", 6.0)]
    ]
    assert (view.reward, view.rewards) == (1.0, {"reward": 1.0, "acc": 1.0, "format": 0.5, "turns": 6.0})


async def test_a_wrong_answer_has_the_reward_zero_and_not_none(rollout):
    await rollout.v0(batch_v0(1), server=rollout.server(script=[Reply(text="eight")]), reward=True)
    view = rollout.only()
    assert rewards(view.root)["rollout.reward"] == (float, 0.0)
    assert view.status == "completed"


async def test_a_float_reward_function(rollout, tmp_path):
    path = write_reward(tmp_path / "reward.py", "async def compute_score(**kwargs):\n    return 0.75\n")
    cfg = rollout.config(reward=path)
    worker = worker_v0(cfg, client(cfg, rollout.server(turns=1)), reward=True)
    await worker.generate_sequences(batch_v0(1))
    assert rewards(rollout.only().root) == {"rollout.reward": (float, 0.75), "rollout.rewards.acc": (float, 0.75)}


async def test_a_reward_that_comes_later_leaves_no_empty_evaluation(rollout):
    """With a colocated reward model the score is computed in the driver."""
    await rollout.v0(batch_v0(1))
    view = rollout.only()
    assert rewards(view.root) == {}
    assert "EVALUATOR" not in {span.kind for span in view.spans}
    assert view.status == "completed"


async def test_a_failing_reward_function_fails_the_evaluation_and_the_trajectory(rollout, tmp_path):
    path = write_reward(
        tmp_path / "reward.py", "def compute_score(**kwargs):\n    raise LookupError('no ground truth')\n"
    )
    cfg = rollout.config(reward=path)
    worker = worker_v0(cfg, client(cfg, rollout.server(turns=1)), reward=True)
    with pytest.raises(LookupError, match="no ground truth"):
        await worker.generate_sequences(batch_v0(1))
    view = rollout.only()
    assert (evaluation(view).status, evaluation(view).attributes[semconv.ERROR_TYPE]) == ("ERROR", "LookupError")
    assert (view.status, rewards(view.root)) == ("error", {})


async def test_tool_rewards_stand_on_the_tools_not_on_the_root(rollout):
    await rollout.v0(batch_v0(1))
    view = rollout.only()
    assert [tool.attributes[semconv.TOOL_REWARD] for tool in view.tools] == [0.25, 0.25]
    run = next(span for span in view.spans if span.name == "ToolAgentLoop.run")
    assert json.loads(run.attributes[semconv.OUTPUT_VALUE])["extra_fields"]["tool_rewards"] == [0.25, 0.25]


async def test_completed_truncated_and_not_so_by_their_last_turn(rollout):
    """The second group answers at once; the first goes on until the budget is gone."""

    def script(turn, prompt):
        return Reply(text=CALL, tokens=200) if "problem 0" in prompt else Reply(text="seven")

    await rollout.v0(batch_v0(2), server=rollout.server(script=script), response_length=600, turns=9)
    first, second = rollout.trajectories()
    assert (first.status, second.status) == ("truncated", "completed")
    assert (first.root.status, second.root.status) == ("UNSET", "UNSET")


async def test_running_out_of_turns_is_no_truncation_of_tokens(rollout):
    await rollout.v0(batch_v0(1), server=rollout.server(script=[Reply(text=CALL)]), turns=2)
    view = rollout.only()
    assert (view.status, len(view.turns)) == ("completed", 2)


async def test_a_cancelled_worker_leaves_a_cancelled_trajectory(rollout):
    stuck = asyncio.Event()

    class StuckServer(ScriptedServer):
        async def generate(self, request_id, *, prompt_ids, **given):
            if self.turn_of(prompt_ids) == 2:
                stuck.set()
                await asyncio.sleep(600)
            return await super().generate(request_id, prompt_ids=prompt_ids, **given)

    cfg = rollout.config()
    worker = worker_v0(cfg, client(cfg, StuckServer(rollout.model)))
    running = asyncio.create_task(worker.generate_sequences(batch_v0(1)))
    await asyncio.wait_for(stuck.wait(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.05)
    view = rollout.only()
    assert view.status == "cancelled"
    assert (view.root.status, view.root.attributes[semconv.ERROR_TYPE]) == ("ERROR", "CancelledError")
    assert [span.status for span in view.generations] == ["UNSET", "ERROR"]
    assert view.generations[1].attributes[semconv.ERROR_TYPE] == "CancelledError"
    assert [len(turn.completion_ids or ()) > 0 for turn in view.turns] == [True, False]


async def test_one_failing_sample_of_a_v1_group_is_an_error_and_its_siblings_are_not(rollout):
    errors = [ConnectionError("engine is gone")]
    cfg = rollout.config(group=3)
    server = rollout.server(script=lambda turn, prompt: Reply(error=errors.pop()) if errors else Reply(text="seven"))
    worker = worker_v1(cfg, client(cfg, server))
    assert list((await run_v1(worker, batch=batch_v1(1))).values()) == ["failure"]
    assert sorted(view.status for view in rollout.trajectories()) == ["completed", "completed", "error"]

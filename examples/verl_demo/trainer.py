"""The rollout half of verl's two trainers: batches as they build them, sent to their own agent loop managers."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_demo.questions import Question

WAIT_SECONDS = 300

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The questions of one step; the groups of the `doomed` ones will lose a trajectory to a cancellation."""

    questions: Sequence[Question]
    step: int
    validate: bool = False
    doomed: Sequence[Question] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came back to the trainer: one reward per trajectory, and the groups that verl gave up."""

    rewards: tuple[float, ...]
    lost_groups: int


def columns(questions: Sequence[Question]) -> dict[str, list[Any]]:
    """The rows that verl's dataset would give for these questions."""
    return {
        "raw_prompt": [question.messages() for question in questions],
        "agent_name": ["tool_agent"] * len(questions),
        "data_source": ["word_problems"] * len(questions),
        "index": [question.index for question in questions],
        "extra_info": [{"index": question.index, "split": question.split} for question in questions],
        "reward_model": [{"style": "rule", "ground_truth": question.answer} for question in questions],
        "uid": [str(uuid.uuid4()) for _ in questions],
    }


def as_objects(values: list[Any]) -> Any:
    import numpy as np

    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


class TrainerV1:
    """verl's default: prompts go to AgentLoopManagerTQ, trajectories come back through the TransferQueue."""

    def __init__(self, config: Any, client: Any, rewards: Any) -> None:
        import transfer_queue
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

        self.queue = transfer_queue
        self.queue.init(config.transfer_queue)
        self.manager = AgentLoopManagerTQ.create(config, client, None, rewards)

    def rollout(self, work: Work, progress: Progress) -> StepResult:
        batch, uids = self._batch(work)
        partition = "val" if work.validate else "train"
        tags = [{"is_prompt": True, "status": "pending", "global_steps": work.step} for _ in uids]
        self.queue.kv_batch_put(keys=uids, partition_id=partition, tags=tags)
        self.manager.generate_sequences(batch)
        return self._collect(partition, uids, progress)

    def _batch(self, work: Work) -> tuple[Any, list[str]]:
        from verl.utils import tensordict_utils

        data = columns(work.questions)
        batch = tensordict_utils.get_tensordict({name: as_objects(values) for name, values in data.items()})
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", work.step)
        if work.validate:
            tensordict_utils.assign_non_tensor_data(batch, "validate", val=True)
        return batch, data["uid"]

    def _collect(self, partition: str, uids: list[str], progress: Progress) -> StepResult:
        tags = self._wait(partition, uids, progress)
        finished = [uid for uid in uids if tags[uid]["status"] == "finished"]
        keys = [key for key in tags if "_" in key and key.split("_")[0] in finished]
        scores: list[float] = []
        if keys:
            data = self.queue.kv_batch_get(keys=keys, partition_id=partition, select_fields=["rm_scores"])
            scores = [float(row.sum()) for row in data["rm_scores"].unbind()]
        self.queue.kv_clear(partition_id=partition, keys=[key for key in tags if key.split("_")[0] in uids])
        return StepResult(rewards=tuple(scores), lost_groups=len(uids) - len(finished))

    def _wait(self, partition: str, uids: list[str], progress: Progress) -> dict[str, dict[str, Any]]:
        """Poll as verl's replay buffer does: a prompt's own key carries the status of its whole group."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            tags = self.queue.kv_list(partition).get(partition, {})
            done = [uid for uid in uids if tags.get(uid, {}).get("status") in ("finished", "failure")]
            if len(done) == len(uids):
                return tags
            progress(f"{len(done)} of {len(uids)} groups done")
            time.sleep(0.1)
        raise TimeoutError(f"the rollout workers did not finish within {WAIT_SECONDS} s")

    def close(self) -> None:
        self.queue.close()


class TrainerV0:
    """verl's older trainer: AgentLoopManager takes n rows per prompt and returns when all of them are done."""

    def __init__(self, config: Any, client: Any, rewards: Any) -> None:
        from verl.experimental.agent_loop import AgentLoopManager

        self.group_size = config.actor_rollout_ref.rollout.n
        self.manager = AgentLoopManager.create(config, client, None, rewards)

    def rollout(self, work: Work, progress: Progress) -> StepResult:
        """One call for the batch; a group with a cancelled trajectory has its own, as verl fails the whole call."""
        progress(f"{len(work.questions)} groups at work")
        together = [question for question in work.questions if question not in work.doomed]
        calls = [*([question] for question in work.doomed), *([together] if together else [])]
        results = [self._generate(questions, work) for questions in calls]
        rewards = tuple(reward for result in results for reward in result or ())
        return StepResult(rewards=rewards, lost_groups=sum(result is None for result in results))

    def _generate(self, questions: Sequence[Question], work: Work) -> list[float] | None:
        from ray.exceptions import TaskCancelledError
        from verl.protocol import DataProto

        rows = {name: as_objects(values) for name, values in columns(questions).items()}
        batch = DataProto(non_tensor_batch=rows, meta_info={"global_steps": work.step, "validate": work.validate})
        try:
            output = self.manager.generate_sequences(
                batch.repeat(1 if work.validate else self.group_size, interleave=True)
            )
        except TaskCancelledError:
            return None
        return output.batch["rm_scores"].sum(dim=1).tolist()

    def close(self) -> None:
        """Nothing of its own to close."""


TRAINERS: dict[str, type[TrainerV1 | TrainerV0]] = {"v1": TrainerV1, "v0": TrainerV0}

"""One run of the demo from the first process to the last: start everything, train, validate, clean up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_demo import settings
from verl_demo.cluster import connect, ray_cluster, sandbox, start_policy, start_rewards
from verl_demo.questions import Question, load_questions
from verl_demo.trainer import TRAINERS, StepResult


class Progress:
    """Lines on the terminal with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.last = ""

    def __call__(self, text: str) -> None:
        if text != self.last:
            print(f"[{time.monotonic() - self.start:5.1f} s] {text}", flush=True)
            self.last = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, and where."""

    trainer: str
    policy: str
    groups: int
    steps: int
    work: Path
    environment: Mapping[str, str]

    @property
    def model(self) -> Path:
        """The model directory; its name is the name of the model in the traces."""
        return self.work / ("random-qwen2" if self.policy == "hf" else "scripted-policy")

    @property
    def trajectories(self) -> int:
        return self.steps * self.groups * settings.GROUP_SIZE + len(load_questions("test"))


def run(plan: Plan, progress: Progress) -> list[StepResult]:
    """Train and validate; all processes are gone when this returns or raises."""
    with sandbox() as url:
        progress(f"the sandbox server is up at {url}; starting Ray")
        with ray_cluster(plan.work / "ray", plan.environment):
            progress("Ray is up; writing the tokenizer and the model configuration")
            server = _prepare(plan, url)
            progress("importing verl, here and in the policy server (the slowest part of the demo)")
            config = _configure(plan)
            progress("starting the load balancer, the reward worker and the agent loop workers")
            client, rewards = connect(config, server), start_rewards(config)
            trainer = TRAINERS[plan.trainer](config, client, rewards)
            try:
                return list(_train(trainer, server, plan, progress))
            finally:
                trainer.close()


def _prepare(plan: Plan, sandbox_url: str) -> Any:
    from omegaconf import OmegaConf

    from verl_demo.tokenizer import write_model_dir

    write_model_dir(plan.model, weights=plan.policy == "hf")
    OmegaConf.save(settings.tool_config(sandbox_url), plan.work / "tools.yaml")
    return start_policy(plan.policy, plan.model)


def _configure(plan: Plan) -> Any:
    import verl.experimental.agent_loop  # noqa: F401 - the import that takes long, under the progress line that says so

    return settings.compose(settings.overrides(plan.model, plan.work / "tools.yaml"))


def _train(trainer: Any, server: Any, plan: Plan, progress: Progress) -> Iterator[StepResult]:
    import ray

    for step in range(1, plan.steps + 1):
        progress(f"step {step}: {plan.groups} questions x {settings.GROUP_SIZE} samples, policy version {step - 1}")
        yield _say(trainer.rollout(_questions_of(step, plan.groups), step, False, progress), progress)
        ray.get(server.update_weights.remote(step))
    progress(f"validation: {len(load_questions('test'))} questions, policy version {plan.steps}")
    yield _say(trainer.rollout(load_questions("test"), plan.steps, True, progress), progress)


def _questions_of(step: int, groups: int) -> Sequence[Question]:
    """The training questions of a step, counted from 1; after the last question comes the first again."""
    questions = load_questions("train")
    first = (step - 1) * groups
    return [questions[(first + offset) % len(questions)] for offset in range(groups)]


def _say(result: StepResult, progress: Progress) -> StepResult:
    mean = sum(result.rewards) / len(result.rewards) if result.rewards else float("nan")
    lost = f"; {result.lost_groups} group lost: one of its trajectories was cancelled" if result.lost_groups else ""
    progress(f"  {len(result.rewards)} trajectories reached the trainer, mean reward {mean:.2f}{lost}")
    return result

"""One run of the demo from the first process to the last: start everything, train, validate, clean up."""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_demo import settings
from verl_demo.cluster import connect, ray_cluster, sandbox, start_policy, start_rewards
from verl_demo.questions import load_questions
from verl_demo.script import is_doomed
from verl_demo.trainer import TRAINERS, StepResult, Work

SILENCE_SECONDS = 15


class Progress:
    """Lines on the terminal with the seconds since the start, and a sign of life while one thing takes long."""

    def __init__(self) -> None:
        self.start = self.said = time.monotonic()
        self.last = ""
        self.stopped = threading.Event()
        threading.Thread(target=self._live, daemon=True).start()

    def __call__(self, text: str) -> None:
        if text != self.last:
            self.last = text
            self._print(text)

    def stop(self) -> None:
        self.stopped.set()

    def _print(self, text: str) -> None:
        self.said = time.monotonic()
        print(f"[{self.said - self.start:5.1f} s] {text}", flush=True)

    def _live(self) -> None:
        while not self.stopped.wait(1):
            if time.monotonic() - self.said > SILENCE_SECONDS:
                self._print("  ... still at it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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


def run(job: Job, progress: Progress) -> list[StepResult]:
    """Train and validate; all processes are gone when this returns or raises."""
    with sandbox() as url:
        progress(f"the sandbox server is up at {url}; starting Ray")
        with ray_cluster(job.work / "ray", job.environment):
            progress("Ray is up; writing the tokenizer and the model configuration")
            server = _prepare(job, url)
            progress("importing verl, here and in the policy server (the slowest part of the demo)")
            config = _configure(job)
            progress("starting the load balancer, the reward worker and the agent loop workers")
            client, rewards = connect(config, server), start_rewards(config)
            trainer = TRAINERS[job.trainer](config, client, rewards)
            try:
                return list(_train(trainer, server, job, progress))
            finally:
                trainer.close()


def _prepare(job: Job, sandbox_url: str) -> Any:
    from omegaconf import OmegaConf

    from verl_demo.tokenizer import write_model_dir

    write_model_dir(job.model, weights=job.policy == "hf")
    OmegaConf.save(settings.tool_config(sandbox_url), job.work / "tools.yaml")
    return start_policy(job.policy, job.model)


def _configure(job: Job) -> Any:
    import verl.experimental.agent_loop  # noqa: F401 - the import that takes long, under the progress line that says so

    return settings.compose(settings.overrides(job.model, job.work / "tools.yaml"))


def _train(trainer: Any, server: Any, job: Job, progress: Progress) -> Iterator[StepResult]:
    import ray

    for step in range(1, job.steps + 1):
        progress(f"step {step}: {job.groups} questions x {settings.GROUP_SIZE} samples, policy version {step - 1}")
        yield _rollout(trainer, _training(step, job.groups), progress)
        ray.get(server.update_weights.remote(step))
    questions = load_questions("test")
    progress(f"validation: {len(questions)} questions, policy version {job.steps}")
    yield _rollout(trainer, Work(questions=questions, step=job.steps, validate=True), progress)


def _training(step: int, groups: int) -> Work:
    """The work of a step, counted from 1; after the last training question comes the first again."""
    known = load_questions("train")
    places = [divmod((step - 1) * groups + offset, len(known)) for offset in range(groups)]
    doomed = [known[index] for earlier_passes, index in places if is_doomed(known[index], earlier_passes)]
    return Work(questions=[known[index] for _, index in places], step=step, doomed=doomed)


def _rollout(trainer: Any, work: Work, progress: Progress) -> StepResult:
    result: StepResult = trainer.rollout(work, progress)
    mean = sum(result.rewards) / len(result.rewards) if result.rewards else float("nan")
    lost = ", 1 group lost: one of its trajectories was cancelled" if work.doomed else ""
    progress(f"  {len(result.rewards)} trajectories reached the trainer, mean reward {mean:.2f}{lost}")
    if result.lost_groups != len(work.doomed):
        raise RuntimeError(f"{result.lost_groups} groups failed at step {work.step}; expected were {len(work.doomed)}")
    return result

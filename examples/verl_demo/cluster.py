"""The processes of the demo: a local Ray cluster, the sandbox server and the actors, all gone when it ends."""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_demo import settings


@contextlib.contextmanager
def sandbox() -> Iterator[str]:
    """The sandbox server in a process of its own; gives its address."""
    command = [sys.executable, str(settings.FOLDER / "sandbox.py")]
    # Ctrl-C reaches the whole foreground group; the server ends by itself when its input is closed.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError("the sandbox server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextlib.contextmanager
def ray_cluster(log_dir: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A Ray cluster of this process only, quiet on the terminal; its logs stand in `log_dir`."""
    import ray

    path = os.pathsep.join(filter(None, [str(settings.FOLDER.parent), os.environ.get("PYTHONPATH")]))
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    try:
        _start_ray(log_dir, {**quiet, **environment, "PYTHONPATH": path})
        yield
    finally:
        ray.shutdown()


def _start_ray(log_dir: Path, environment: Mapping[str, str], attempts: int = 3) -> None:
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": dict(environment)},
            _temp_dir=str(log_dir),
        )
    except Exception as error:
        # Ray gives itself 30 s, which a machine with much else to do can exceed; nothing sets that limit.
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        _start_ray(log_dir, environment, attempts - 1)


def start_policy(kind: str, model_dir: Path) -> Any:
    """The policy's server actor; it needs no verl here, so it can start while this process imports verl."""
    import ray

    from verl_demo.policy import SERVERS

    actor = ray.remote(SERVERS[kind]).options(num_cpus=0, max_concurrency=256)
    return actor.remote(
        str(model_dir),
        group_size=settings.GROUP_SIZE,
        prompt_length=settings.PROMPT_LENGTH,
        response_length=settings.RESPONSE_LENGTH,
    )


def connect(config: Any, server: Any) -> Any:
    """verl's own client of the policy's server, through verl's own load balancer actor."""
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    return LLMServerClient(config, load_balancer_handle=get_router_handle(servers={"policy-0": server}))


def start_rewards(config: Any) -> Any:
    """verl's reward loop workers, which call the reward function of `reward.py`."""
    from verl.experimental.reward_loop import RewardLoopManager

    return RewardLoopManager(config=config).reward_loop_worker_handles


def worker_errors(log_dir: Path, limit: int = 20) -> list[str]:
    """The last lines of the workers' logs that speak of an error."""
    lines: list[str] = []
    for log in sorted(log_dir.glob("session_latest/logs/worker-*.err")):
        lines += [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return list(dict.fromkeys(lines))[-limit:]

"""Two steps of verl's default trainer on a Ray cluster of this machine; one of the two workers is killed between them.

Run as a script: ``verl_ray.py <directory>``. Traces go where the environment says; the last line that it prints is JSON
about what ran.
"""

import json
import os
import sys
import time
from pathlib import Path

from verl_loop import CALCULATOR, ScriptedServer, batch_v1, config, model_dir

GROUP, PROMPTS = 4, 4


def wait_until_done(queue, uids, seconds=180.0):
    """The trainer's replay buffer polls the same: a prompt's own key carries the status of its group."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tags = queue.kv_list("train").get("train", {})
        statuses = [tags.get(uid, {}).get("status") for uid in uids]
        if all(status in ("finished", "failure") for status in statuses):
            return statuses
        time.sleep(0.02)
    raise TimeoutError(f"groups are {statuses} after {seconds} s")


def step(queue, manager, number):
    """One training step through the manager; returns its groups and their statuses."""
    batch = batch_v1(PROMPTS, step=number)
    uids = [str(uid) for uid in batch["uid"]]
    tag = {"is_prompt": True, "status": "pending", "global_steps": number}
    queue.kv_batch_put(keys=uids, partition_id="train", tags=[tag] * PROMPTS)
    manager.generate_sequences(batch)
    return {"step": number, "uids": uids, "statuses": wait_until_done(queue, uids)}


def main(directory):
    """Run the two steps."""
    import ray
    import transfer_queue
    from verl.trainer.ppo.v1 import agent_loop_tq
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    model = model_dir(Path(directory) / "tiny", vocabulary=6000)
    cfg = config(model, tools=CALCULATOR, backend="otlp_file", group=GROUP, workers=2)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    transfer_queue.init(cfg.transfer_queue)
    server = ray.remote(ScriptedServer).options(num_cpus=0, max_concurrency=64).remote(model)
    client = LLMServerClient(cfg, load_balancer_handle=get_router_handle(servers={"server-0": server}))
    manager = agent_loop_tq.AgentLoopManagerTQ.create(cfg, client)
    first = step(transfer_queue, manager, 1)
    time.sleep(1.5)
    victim, survivor = manager.agent_loop_workers
    ray.kill(victim)
    manager.agent_loop_workers = [survivor]
    second = step(transfer_queue, manager, 2)
    # A normal end, at once: nothing waits for the last trajectories' spans.
    transfer_queue.close()
    ray.shutdown()
    print(json.dumps({"driver": os.getpid(), "steps": [first, second]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""The real verl 0.9.1 in one process and without Ray: configuration, clients, workers, batches, a step of each trainer.

Real: AgentLoopWorker, AgentLoopWorkerTQ, both managers, ToolAgentLoop, the hermes parser, LLMServerClient and its fully
asynchronous subclass, the load balancer, RewardLoopWorker, hydra's configuration. Not real: the inference server
(`ScriptedServer`), TransferQueue (`DictQueue`), and Ray's calls (`Local`). A step of trainer v0::

    cfg = config(model_dir(path), tools={"calculator": "verl_tools.Calculator"}, backend="otel")
    worker = worker_v0(cfg, client(cfg, ScriptedServer(path, turns=4)))
    output = asyncio.run(run_v0(worker, batch_v0(4, group=2, step=1)))

of trainer v1: ``worker_v1`` and ``batch_v1`` with ``run_v1``. Nothing of verl is imported before a function needs it.
"""

import asyncio
import contextlib
import copy
import functools
import os
import random
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from verl_model import load_tokenizer, model_dir
from verl_server import Reply, ScriptedServer, ServerCall, tool_call

__all__ = [
    "CALCULATOR",
    "FUNCTIONS",
    "DictQueue",
    "Local",
    "Reply",
    "ScriptedServer",
    "ServerCall",
    "batch_v0",
    "batch_v1",
    "client",
    "config",
    "load_tokenizer",
    "manager_v0",
    "manager_v1",
    "model_dir",
    "new_trace_config",
    "prompts",
    "reward_handles",
    "run_v0",
    "run_v1",
    "tool_call",
    "worker_v0",
    "worker_v1",
    "write_reward",
    "write_tools",
]

CALCULATOR = {"calculator": "verl_tools.Calculator"}
FUNCTIONS = str(Path(__file__).with_name("verl_functions.py"))

_PARAMETERS = {
    "calculator": {"expression": "string"},
    "traced_calculator": {"expression": "string"},
    "amnesia": {"at": "integer", "to": "integer"},
}
_REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = "seven" in solution_str
    parts = {"acc": right, "format": 0.5, "turns": int(extra_info["num_turns"]), "note": "text"}
    return {"score": 1.0 if right else 0.0, **parts}
"""


def write_tools(path: str | Path, tools: Mapping[str, str], **settings: Any) -> str:
    """verl's tools.yaml for tools by name (``{"calculator": "module.Class"}``); `settings` go into their config."""
    from omegaconf import OmegaConf

    entries = []
    for name, class_name in tools.items():
        fields = _PARAMETERS.get(name, {})
        properties = {key: {"type": kind, "description": key} for key, kind in fields.items()}
        parameters = {"type": "object", "properties": properties, "required": list(fields)}
        function = {"name": name, "description": f"The tool {name}.", "parameters": parameters}
        entries.append(
            {
                "class_name": class_name,
                "config": {"type": "native", **settings},
                "tool_schema": {"type": "function", "function": function},
            }
        )
    OmegaConf.save(OmegaConf.create({"tools": entries}), str(path))
    return str(path)


def write_reward(path: str | Path, source: str = _REWARD) -> str:
    """A verl custom reward function; the default gives 1.0 where the response says "seven", and components."""
    Path(path).write_text(source)
    return str(path)


@functools.lru_cache(maxsize=1)
def _trainer_config() -> Any:
    from hydra import compose, initialize_config_module

    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        return compose(config_name="ppo_trainer")


def config(
    model: str,
    *,
    tools: Mapping[str, str] | str | None = None,
    tool_settings: Mapping[str, Any] | None = None,
    function_tools: str | None = None,
    backend: str | None = None,
    token2text: bool = False,
    max_samples: int | None = None,
    project: str = "demo",
    experiment: str = "exp",
    turns: int = 8,
    prompt_length: int = 2048,
    response_length: int = 4096,
    group: int = 1,
    parallel_calls: int = 4,
    logprobs: bool = False,
    reward: str | bool = False,
    workers: int = 1,
    agent: str = "tool_agent",
    partial_rollout: bool | None = None,
    **overrides: Any,
) -> Any:
    """verl's whole trainer configuration, as hydra composes it, for a scripted policy.

    Args:
        model: what `model_dir` made; files that are made here go beside it.
        tools: tools by name, or the path of a tools.yaml; `tool_settings` go into each tool's config.
        function_tools: path of a file of function tools, e.g. `FUNCTIONS`.
        backend, token2text, max_samples, project, experiment: ``actor_rollout_ref.rollout.trace``.
        turns: at most so many assistant turns.
        prompt_length, response_length: in tokens.
        group: trajectories per prompt (``rollout.n``, also for validation).
        logprobs: ask for log-probabilities.
        reward: True for a reward function of ours, or the path of one.
        workers: of the managers.
        agent: the agent loop of rows that name none.
        partial_rollout: ``async_training.partial_rollout``, a key that only fully_async_policy has; None leaves it out.
        **overrides: dotted keys with ``__`` for ``.``: ``trainer__rollout_trace={"backend": "otel"}``.
    """
    from omegaconf import OmegaConf, open_dict

    cfg, beside = copy.deepcopy(_trainer_config()), Path(model).parent
    with open_dict(cfg):
        cfg.actor_rollout_ref.model.path = model
        rollout = cfg.actor_rollout_ref.rollout
        rollout.name, rollout.mode = "vllm", "async"
        rollout.prompt_length, rollout.response_length = prompt_length, response_length
        rollout.calculate_log_probs = logprobs
        rollout.n = rollout.val_kwargs.n = group
        rollout.agent.num_workers, rollout.agent.default_agent_loop = workers, agent
        rollout.multi_turn.enable, rollout.multi_turn.format = True, "hermes"
        rollout.multi_turn.max_assistant_turns = rollout.multi_turn.max_user_turns = turns
        rollout.multi_turn.max_parallel_calls = parallel_calls
        rollout.multi_turn.max_tool_response_length = 100_000
        if tools is not None and not isinstance(tools, str):
            tools = write_tools(beside / f"tools-{uuid.uuid4().hex}.yaml", tools, **(tool_settings or {}))
        rollout.multi_turn.tool_config_path = tools
        rollout.multi_turn.function_tool_path = function_tools
        rollout.trace.backend, rollout.trace.token2text = backend, token2text
        rollout.trace.max_samples_per_step_per_worker = max_samples
        rollout.trace.project_name, rollout.trace.experiment_name = project, experiment
        cfg.trainer.project_name, cfg.trainer.experiment_name = project, experiment
        if reward:
            path = write_reward(beside / "reward.py") if reward is True else reward
            cfg.reward.custom_reward_function.path = path
        cfg.reward.num_workers = 1
        cfg.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
        if partial_rollout is not None:
            cfg.async_training = {"partial_rollout": partial_rollout}
        for key, value in overrides.items():
            OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


class Local:
    """``handle.method.remote(...)`` on an object of this process: a task or a finished future."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return _LocalMethod(getattr(self.target, name))


class _LocalMethod:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        result = self._method(*args, **kwargs)
        if asyncio.iscoroutine(result):
            return asyncio.ensure_future(result)
        future = asyncio.get_running_loop().create_future()
        future.set_result(result)
        return future


def client(cfg: Any, *servers: Any, fully_async: bool = False) -> Any:
    """verl's LLMServerClient, or its fully asynchronous one that resumes aborted generations, over its balancer."""
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    balancer = GlobalRequestLoadBalancer(servers={f"server-{at}": Local(server) for at, server in enumerate(servers)})
    kind = llm_server.FullyAsyncLLMServerClient if fully_async else llm_server.LLMServerClient
    return kind(cfg, load_balancer_handle=Local(balancer))


def reward_handles(cfg: Any) -> list[Any]:
    """verl's RewardLoopWorker in this process; make it inside a running event loop."""
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    return [Local(RewardLoopWorker(cfg))]


def new_trace_config() -> None:
    """Let the next worker read its trace configuration: verl keeps the first of a process."""
    from verl.utils.rollout_trace import RolloutTraceConfig

    RolloutTraceConfig.reset()


def worker_v0(cfg: Any, llm_client: Any, *, reward: bool = False) -> Any:
    """A worker of trainer v0, also of one_step_off and fully_async_policy. Make it inside a running event loop."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    new_trace_config()
    return AgentLoopWorker(cfg, llm_client, None, reward_handles(cfg) if reward else None)


def worker_v1(cfg: Any, llm_client: Any, *, reward: bool = False) -> Any:
    """A worker of trainer v1, the default; its queue is `worker.queue`. Make it inside a running event loop."""
    from verl.trainer.ppo.v1 import agent_loop_tq

    new_trace_config()
    # One queue a process, as TransferQueue: also workers made before write to it.
    if not isinstance(agent_loop_tq.tq, DictQueue):
        agent_loop_tq.tq = DictQueue()
    kind = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = kind(cfg, llm_client, None, reward_handles(cfg) if reward else None)
    worker.queue = agent_loop_tq.tq
    return worker


class DictQueue:
    """The calls of TransferQueue that the workers make, kept in a dict: partition -> key -> (tag, fields)."""

    def __init__(self) -> None:
        self.store: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {}

    def init(self, conf: Any = None) -> None:
        """Nothing to start."""

    async def async_kv_put(self, key: str, partition_id: str, fields: Any = None, tag: Any = None) -> None:
        old_tag, old_fields = self.store.setdefault(partition_id, {}).get(key, ({}, None))
        self.store[partition_id][key] = (old_tag | (tag or {}), old_fields if fields is None else fields)

    async def async_kv_batch_put(self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None) -> None:
        for at, key in enumerate(keys):
            await self.async_kv_put(key, partition_id, fields[at], tags[at])

    def tag(self, key: str, partition: str = "train") -> dict[str, Any]:
        """The tag of a key, empty if there is none."""
        return self.store.get(partition, {}).get(key, ({}, None))[0]

    def rows(self, uids: Sequence[str], partition: str = "train") -> dict[str, Any]:
        """Trajectory key -> fields, of these groups."""
        kept = self.store.get(partition, {})
        return {key: fields for key, (_, fields) in kept.items() if key.rsplit("_", 2)[0] in uids and key not in uids}


def prompts(count: int, tokens: int = 60, seed: int = 0) -> list[list[dict[str, str]]]:
    """`count` user messages "problem 0 ...", each about `tokens` long; the template adds 100 to 250."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefg") for _ in range(3)) for _ in range(max(1, tokens // 2))]
    return [[{"role": "user", "content": f"problem {at} " + " ".join(words)}] for at in range(count)]


def _column(values: Sequence[Any]) -> Any:
    import numpy as np

    column = np.empty(len(values), dtype=object)
    column[:] = list(values)
    return column


def batch_v0(
    count: int,
    *,
    group: int = 1,
    step: int | None = 1,
    validate: bool | None = False,
    prompt_tokens: int = 60,
    messages: Sequence[Any] | None = None,
    uid: bool = True,
    index: bool = True,
    agent: str | None = "tool_agent",
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> Any:
    """A DataProto as trainer v0 makes it: `count` prompts, each repeated `group` times in neighbouring rows.

    Args:
        messages: the prompts themselves, each a list of messages.
        uid, index: with verl's uid per prompt; with ``extra_info.index``.
        agent: the column ``agent_name``; None leaves it out.
        columns: more columns, a value per prompt; repeated too.
    """
    import numpy as np
    from verl.protocol import DataProto

    given = messages if messages is not None else prompts(count, prompt_tokens)
    table: dict[str, Any] = {
        "raw_prompt": _column(given),
        "data_source": _column(["bench"] * count),
        "reward_model": _column([{"style": "rule", "ground_truth": "7"}] * count),
        "extra_info": _column([{"index": at} if index else {} for at in range(count)]),
        **({"uid": _column([str(uuid.uuid4()) for _ in range(count)])} if uid else {}),
        **({"index": np.arange(count)} if index else {}),
        **({} if agent is None else {"agent_name": _column([agent] * count)}),
        **{name: _column(values) for name, values in (columns or {}).items()},
    }
    meta = {"global_steps": step, "validate": validate}
    return DataProto(
        non_tensor_batch={name: np.repeat(column, group) for name, column in table.items()},
        meta_info={key: value for key, value in meta.items() if value is not None},
    )


def batch_v1(
    count: int,
    *,
    step: int = 1,
    validate: bool = False,
    prompt_tokens: int = 60,
    messages: Sequence[Any] | None = None,
    indices: Sequence[Any] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> Any:
    """A TensorDict as trainer v1 makes it: one row a prompt; the worker starts the group, named by ``batch["uid"]``.

    Args:
        indices: ``extra_info.index`` of each prompt; verl has 0 for all where a dataset has none.
    """
    from verl.utils import tensordict_utils

    numbers = list(range(count)) if indices is None else list(indices)
    table = {
        "raw_prompt": _column(messages if messages is not None else prompts(count, prompt_tokens)),
        "agent_name": _column(["tool_agent"] * count),
        "index": _column(numbers),
        "data_source": _column(["bench"] * count),
        "reward_model": _column([{"style": "rule", "ground_truth": "7"}] * count),
        "extra_info": _column([{"index": number, "split": "train"} for number in numbers]),
        "uid": _column([str(uuid.uuid4()) for _ in range(count)]),
        **{name: _column(values) for name, values in (columns or {}).items()},
    }
    batch = tensordict_utils.get_tensordict(table)
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", step)
    if validate:
        tensordict_utils.assign_non_tensor_data(batch, "validate", True)
    return batch


async def run_v0(worker: Any, batch: Any) -> Any:
    """``generate_sequences`` of a worker or a manager of trainer v0; returns its DataProto."""
    return await worker.generate_sequences(batch)


async def run_v1(*workers: Any, batch: Any, manager: Any = None) -> dict[str, str]:
    """A step of trainer v1 to its end; returns each group's status, ``finished`` or ``failure``, by uid.

    Without a manager the first worker gets the whole batch.
    """
    uids = [str(uid) for uid in batch["uid"]]
    validate = bool(batch["validate"]) if "validate" in batch else False
    partition = "val" if validate else "train"
    if manager is None:
        await workers[0].generate_sequences(batch)
    else:
        with _ray_get() as calls:
            manager.generate_sequences(batch)
        await asyncio.gather(*calls)
    while tasks := [task for worker in workers for task in worker.background_tasks]:
        await asyncio.gather(*tasks)
    return {uid: workers[0].queue.tag(uid, partition).get("status", "missing") for uid in uids}


@contextlib.contextmanager
def _ray_get() -> Any:
    """In place of the ``ray.get`` with which AgentLoopManagerTQ waits for the dispatch: the tasks it waits for."""
    from verl.trainer.ppo.v1 import agent_loop_tq

    class Waiting:
        calls: list[Any] = []

        def get(self, tasks: list[Any]) -> None:
            self.calls = tasks

    real, agent_loop_tq.ray = agent_loop_tq.ray, Waiting()
    tasks: list[Any] = []
    try:
        yield tasks
        tasks.extend(agent_loop_tq.ray.calls)
    finally:
        agent_loop_tq.ray = real


def _manager(kind: type, cfg: Any, workers: Sequence[Any]) -> Any:
    # ``create`` would start the workers as Ray actors.
    manager = kind(cfg, None)
    manager.agent_loop_workers = [Local(worker) for worker in workers]
    return manager


def manager_v0(cfg: Any, *workers: Any) -> Any:
    """verl's AgentLoopManager over workers of this process: it sets priorities and splits the batch."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager

    return _manager(AgentLoopManager, cfg, workers)


def manager_v1(cfg: Any, *workers: Any) -> Any:
    """verl's AgentLoopManagerTQ over workers of this process; give it to `run_v1`."""
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

    return _manager(AgentLoopManagerTQ, cfg, workers)

"""The verl configuration of the demo: what a training script would set on verl's command line."""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PROMPT_LENGTH = 1024
RESPONSE_LENGTH = 640
GROUP_SIZE = 8
WORKERS = 2
RUN_TIMEOUT = 1


def tool_config(sandbox_url: str) -> dict[str, Any]:
    """What verl's `tool_config_path` file holds; the function tool comes from its own file."""
    return {
        "tools": [
            _tool("CalculatorTool", "calculator", "Evaluate an arithmetic expression.", "expression", {}),
            _tool(
                "CodeInterpreterTool",
                "code_interpreter",
                "Run a Python program and return what it prints.",
                "code",
                {"sandbox_url": sandbox_url, "run_timeout": RUN_TIMEOUT, "request_timeout": 30},
            ),
        ]
    }


def _tool(cls: str, name: str, description: str, argument: str, config: dict[str, Any]) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": f"The {argument}."}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {
        "class_name": f"verl_demo.tools.{cls}",
        "config": {"type": "native", **config},
        "tool_schema": {"type": "function", "function": function},
    }


def overrides(model_dir: Path, tools: Path) -> list[str]:
    """The command line arguments of `python -m verl.trainer.main_ppo` for this run."""
    rollout = "actor_rollout_ref.rollout"
    return [
        f"actor_rollout_ref.model.path={model_dir}",
        f"{rollout}.name=vllm",
        f"{rollout}.mode=async",
        f"{rollout}.n={GROUP_SIZE}",
        f"{rollout}.prompt_length={PROMPT_LENGTH}",
        f"{rollout}.response_length={RESPONSE_LENGTH}",
        f"{rollout}.agent.num_workers={WORKERS}",
        f"{rollout}.agent.default_agent_loop=tool_agent",
        f"{rollout}.multi_turn.enable=true",
        f"{rollout}.multi_turn.format=hermes",
        f"{rollout}.multi_turn.tool_config_path={tools}",
        f"{rollout}.multi_turn.function_tool_path={FOLDER / 'unit_tool.py'}",
        f"{rollout}.multi_turn.max_parallel_calls=2",
        f"{rollout}.trace.backend=otel",
        f"{rollout}.trace.token2text=true",
        f"reward.custom_reward_function.path={FOLDER / 'reward.py'}",
        "reward.num_workers=1",
        "trainer.project_name=otel-rollout-demo",
        "trainer.experiment_name=word-problems",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]


def compose(arguments: list[str]) -> Any:
    """verl's own default configuration with these arguments."""
    import hydra

    with hydra.initialize_config_module(config_module="verl.trainer.config", version_base=None):
        return hydra.compose(config_name="ppo_trainer", overrides=arguments)

"""The rollouts that are measured: verl's AgentLoopWorker with its ToolAgentLoop, a scripted policy and a real tool."""

from pathlib import Path
from typing import Any, Final

import verl_loop

GENERATED: Final = 450
TOOL: Final = 50
PROMPT: Final = 750
"""With the template and the tool it becomes a prompt of about 1,200."""
ROOM: Final = 700
"""Tokens of a turn at the most: generated, tool and template."""
PROJECT: Final = "benchmark"

PLAIN_TOOL: Final = "verl_tools.Calculator"
DECORATED_TOOL: Final = "verl_tools.TracedCalculator"


class Workload:
    """A worker of trainer v0 and the batches that it is given. Make it inside a running event loop.

    Args:
        folder: where the tokenizer lies and files are made.
        turns: assistant turns of a trajectory: a tool call in each but the last.
        tool: class of the calculator.
        backend: ``actor_rollout_ref.rollout.trace.backend``.
    """

    def __init__(self, folder: Path, *, turns: int, tool: str, backend: str | None) -> None:
        model = verl_loop.model_dir(folder / "model")
        cfg = verl_loop.config(
            model,
            tools={"calculator": tool},
            tool_settings={"response_tokens": TOOL},
            backend=backend,
            project=PROJECT,
            experiment=PROJECT,
            turns=turns + 1,
            prompt_length=PROMPT + 600,
            response_length=turns * ROOM,
        )
        self.turns = turns
        self.server = verl_loop.ScriptedServer(model, turns=turns, gen_tokens=GENERATED, record=False)
        self.worker = verl_loop.worker_v0(cfg, verl_loop.client(cfg, self.server))
        self.tokens = 0

    @property
    def ops(self) -> int:
        """Ops of a trajectory: the run of the loop; each turn's generation and parsing; each tool call."""
        return 3 * self.turns

    async def batch(self, number: int, count: int, latency: float = 0.0) -> Any:
        """Generate `count` trajectories at once, every answer of the policy `latency` seconds late."""
        self.server.latency = latency
        made = await self.worker.generate_sequences(
            verl_loop.batch_v0(count, step=max(number, 0), prompt_tokens=PROMPT)
        )
        self.tokens = int(made.batch["attention_mask"].sum()) // count
        return made

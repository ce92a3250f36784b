"""Two verl tools as a user writes them, without any tracing: a calculator and a ReTool-style code interpreter."""

import asyncio
from typing import Any

import aiohttp
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from verl_demo.arithmetic import evaluate, number

Result = tuple[ToolResponse, float, dict[str, Any]]


class CalculatorTool(BaseTool):
    """Evaluates an arithmetic expression; a division by zero or a missing argument raises."""

    async def execute(self, _instance_id: str, parameters: dict[str, Any], **_more: Any) -> Result:
        return ToolResponse(text=number(evaluate(parameters["expression"]))), 0.0, {}


class CodeInterpreterTool(BaseTool):
    """Sends a Python program to the sandbox server and returns what it printed.

    A program that fails costs a tool reward of -0.1, one that takes too long raises TimeoutError, and one that the
    sandbox forbids ends the whole trajectory: its task is cancelled.
    """

    async def execute(self, _instance_id: str, parameters: dict[str, Any], **_more: Any) -> Result:
        reply = await self._run(parameters["code"])
        status = reply["status"]
        if status == "forbidden":
            await self._give_up_trajectory(reply["stderr"])
        if status == "timeout":
            raise TimeoutError(f"the program took more than {self.config['run_timeout']} s of processor time")
        failed = status != "ok"
        text = reply["stderr"] if failed else reply["stdout"]
        return ToolResponse(text=text.strip() or "(no output)"), -0.1 if failed else 0.0, {"sandbox_status": status}

    async def _run(self, program: str) -> dict[str, Any]:
        body = {"code": program, "run_timeout": self.config["run_timeout"]}
        timeout = aiohttp.ClientTimeout(total=self.config["request_timeout"])
        url = f"{self.config['sandbox_url']}/run_code"
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as response:
            return await response.json()

    async def _give_up_trajectory(self, reason: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel(reason)
        await asyncio.sleep(0)

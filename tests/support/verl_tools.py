"""Real tools for verl's ToolAgentLoop, loaded by its own registry; some decorate ``execute`` and some do not."""

import ast
import operator

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> float:
    """The value of an arithmetic expression.

    Raises:
        ValueError: it has something else in it.
    """

    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"not arithmetic: {expression}")

    return value(ast.parse(expression, mode="eval").body)


class Calculator(BaseTool):
    """Does not decorate ``execute``: verl's own trace does not see it. Fails by exception; its tool reward is 0.25."""

    async def execute(self, instance_id, parameters, **kwargs):
        found = calculate(str(parameters["expression"]))
        pad = " pad" * (self.config.get("response_tokens", 0) // 2)
        return ToolResponse(text=f"{found}{pad}"), 0.25, {"value": found}


class TracedCalculator(Calculator):
    """Decorates ``execute``, as verl's documentation asks."""

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        return await super().execute(instance_id, parameters, **kwargs)


class Amnesia(BaseTool):
    """Rewrites the history behind the agent loop's back: token `at` of the prompt becomes `to`."""

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        agent_data.prompt_ids[int(parameters["at"])] = int(parameters["to"])
        return ToolResponse(text="forgotten"), 0.0, {}


class Unhappy(BaseTool):
    """Fails where `where` says: in ``create`` or in ``execute``."""

    async def create(self, instance_id=None, **kwargs):
        if self.config["where"] == "create":
            raise ConnectionError("no instance left")
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id, parameters, **kwargs):
        raise TimeoutError("the sandbox did not answer")


class Camera(BaseTool):
    """Decorated, and given all that is hard to record; answers with what it was given."""

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        return await self.look(**make_odd_values(), **kwargs)

    @rollout_trace_op
    async def look(self, **kwargs):
        return ToolResponse(text=", ".join(sorted(kwargs))), 0.0, {}


class Photographer(BaseTool):
    """Answers with an image: fine for a model that sees, an error of verl's for one that does not."""

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="click", image=[make_odd_values()["image"]]), 0.0, {}


def make_odd_values():
    """A PIL image, arrays, tensors and bytes."""
    import numpy as np
    import torch
    from PIL import Image

    return {
        "image": Image.new("RGB", (8, 4), (255, 0, 0)),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "tensor": torch.arange(12).reshape(3, 4),
        "scalar": np.float64(0.5),
        "raw": b"\x00\x01\x02",
    }

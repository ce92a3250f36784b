"""Arithmetic on plain numbers: the part of Python that the calculator and the script agree on."""

import ast
import operator
from collections.abc import Callable
from typing import Any

OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(expression: str) -> float:
    """The value of `expression`; raises ZeroDivisionError, SyntaxError or ValueError as Python would."""
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def number(value: float) -> str:
    """A number as a person writes it: `12`, `1.2`, never `12.0` or `7.000000000000001`."""
    return f"{round(value, 9):.10g}"

"""The demo's reward, a verl custom reward function: 1 for the right number, 0.1 for an answer in the right form."""

import re
from typing import Any

ANSWER = re.compile(r"^Answer: (-?\d+(?:\.\d+)?)\s*$", re.MULTILINE)


def compute_score(solution_str: str, ground_truth: str, **_more: Any) -> dict[str, float]:
    """`score` is the reward; `acc` (the number is right) and `format` (there is one) are its parts."""
    found = ANSWER.findall(solution_str)
    correct = bool(found) and float(found[-1]) == float(ground_truth)
    return {"score": 1.0 if correct else 0.1 if found else 0.0, "acc": float(correct), "format": float(bool(found))}

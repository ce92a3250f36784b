"""The word problems of the demo, read from `questions.jsonl`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("questions.jsonl")
INSTRUCTION = "Solve the problem. You may use the tools. End with one line: Answer: <number>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One problem: the right way to compute it (`expression`) and a plausible wrong one (`mistake`)."""

    index: int
    split: str
    question: str
    answer: str
    expression: str
    mistake: str
    convert: Mapping[str, Any] | None = None
    then: str | None = None

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": self.question}]


def load_questions(split: str | None = None) -> list[Question]:
    """All problems in file order, or those of one split (`train`, `test`)."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    questions = [Question(**json.loads(line)) for line in lines if line.strip()]
    return [question for question in questions if split in (None, question.split)]

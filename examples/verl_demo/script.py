"""What the scripted policy says: for each question and sample a fixed list of turns, right, wrong or broken."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_demo.arithmetic import evaluate, number
from verl_demo.questions import Question

TRUNCATED = "truncated"
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The turns of one trajectory; `rambling` ones never stop by themselves."""

    behaviour: str
    turns: tuple[str, ...]
    rambling: bool = False


def call(name: str, arguments: Any) -> str:
    """One Hermes tool call; `arguments` should be an object, and the script sometimes gives something else."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def calculator(expression: str) -> str:
    return call("calculator", {"expression": expression})


def code(program: str) -> str:
    return call("code_interpreter", {"code": program})


def answer(value: str) -> str:
    return f"So the result is {value}.\nAnswer: {value}"


def right(question: Question) -> str:
    return answer(question.answer)


def wrong(question: Question) -> str:
    return answer(number(evaluate(question.mistake)))


def with_calculator(question: Question) -> tuple[str, ...]:
    return (f"I compute {question.expression} with the calculator.\n{calculator(question.expression)}", right(question))


def with_code(question: Question) -> tuple[str, ...]:
    program = f"result = {question.expression}\nprint(result)"
    return (f"A short program settles this.\n{code(program)}", right(question))


def with_units(question: Question) -> tuple[str, ...]:
    if question.convert is None or question.then is None:
        both = calculator(question.expression) + "\n" + code(f"print({question.expression})")
        return (f"I ask two tools at once and compare.\n{both}", right(question))
    first = f"First the units.\n{call('convert_units', dict(question.convert))}"
    return (first, f"Now the rest.\n{calculator(question.then)}", right(question))


def by_heart(question: Question) -> tuple[str, ...]:
    return (f"This is {question.expression}, I can do it in my head. {right(question)}",)


def by_heart_wrong(question: Question) -> tuple[str, ...]:
    return (f"This is {question.mistake}, I can do it in my head. {wrong(question)}",)


def wrong_plan(question: Question) -> tuple[str, ...]:
    return (f"I compute {question.mistake} with the calculator.\n{calculator(question.mistake)}", wrong(question))


def division_by_zero(question: Question) -> tuple[str, ...]:
    failing = calculator(f"({question.expression})/0")
    return (
        f"I check the calculator first.\n{failing}",
        f"That failed. Once more.\n{calculator(question.expression)}",
        right(question),
    )


def unknown_tool(question: Question) -> tuple[str, ...]:
    search = call("web_search", {"query": question.question})
    return (
        f"Somebody must have answered this before.\n{search}",
        f"No search here.\n{calculator(question.expression)}",
        right(question),
    )


def bad_arguments(question: Question) -> tuple[str, ...]:
    # The Hermes parser drops a call whose JSON does not parse; what reaches the tool is JSON of the wrong kind.
    broken = call("calculator", "{expression: " + question.expression)
    return (
        f"I use the calculator.\n{broken}",
        f"My arguments were not JSON.\n{calculator(question.expression)}",
        right(question),
    )


def broken_call(question: Question) -> tuple[str, ...]:
    unfinished = calculator(question.expression).replace('"}}', "")
    return (f"I use the calculator.\n{unfinished}",)


def program_fails(question: Question) -> tuple[str, ...]:
    failing = code(f"result = {question.expression}\nprint(reslt)")
    return (
        f"A short program settles this.\n{failing}",
        f"A typing error.\n{code(f'print({question.expression})')}",
        right(question),
    )


def endless_program(question: Question) -> tuple[str, ...]:
    endless = code(f"n = 0.5\nwhile n != {question.expression}:\n    n += 1\nprint(n)")
    return (
        f"I try all numbers.\n{endless}",
        f"That took too long.\n{calculator(question.expression)}",
        right(question),
    )


def forbidden_program(question: Question) -> tuple[str, ...]:
    program = "import subprocess\nprint(subprocess.run(['cat', 'reward.py'], capture_output=True))"
    return (f"Perhaps the reward function can be read.\n{code(program)}", right(question))


def rambling(question: Question) -> tuple[str, ...]:
    doubt = f"Is it {question.expression}? I should look at the problem again: {question.question} Hmm, wait. "
    return (doubt * 60,)


Behaviour = Callable[[Question], tuple[str, ...]]
TROUBLE: tuple[Behaviour, ...] = (division_by_zero, unknown_tool, bad_arguments, endless_program)
MORE_TROUBLE: tuple[Behaviour, ...] = (program_fails, endless_program, broken_call, division_by_zero, unknown_tool)


def plan(question: Question, sample: int, version: int, earlier_passes: int = 0) -> Plan:
    """The plan of sample number `sample` of a group of 8; a later policy version makes fewer mistakes."""
    if not earlier_passes and (question.index, sample) == (0, 5):
        return Plan(behaviour=TRUNCATED, turns=rambling(question), rambling=True)
    if not earlier_passes and (question.index, sample) == (1, 6):
        return Plan(behaviour=CANCELLED, turns=forbidden_program(question))
    chosen = _choose(question.index, sample, version)
    return Plan(behaviour=chosen.__name__, turns=chosen(question))


def _choose(index: int, sample: int, version: int) -> Behaviour:
    if sample == 6:
        return TROUBLE[index % len(TROUBLE)]
    if sample == 7:
        return MORE_TROUBLE[index % len(MORE_TROUBLE)]
    improved = version > 0 and index % 2 == 0
    fourth: Behaviour = with_code if improved else by_heart_wrong
    return (with_calculator, with_code, with_units, by_heart, fourth, wrong_plan)[sample % 6]


def is_doomed(question: Question, earlier_passes: int, group_size: int = 8) -> bool:
    """Whether one trajectory of this question's group gets cancelled."""
    plans = (plan(question, sample, 0, earlier_passes) for sample in range(group_size))
    return any(each.behaviour == CANCELLED for each in plans)

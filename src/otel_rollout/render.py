"""Trajectories for the terminal: a table of many, a tree of one."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from otel_rollout import semconv
from otel_rollout.trace_view import UNFINISHED, SpanView, Summary, TrajectoryView, TurnView

FOLD_CHARS: Final = 600
FOLD_LINES: Final = 8
IDS_SHOWN: Final = 24

_STATUS_STYLES: Final = {
    semconv.STATUS_COMPLETED: "green",
    semconv.STATUS_TRUNCATED: "yellow",
    semconv.STATUS_CANCELLED: "magenta",
    semconv.STATUS_ABORTED: "magenta",
    semconv.STATUS_REJECTED: "yellow",
    semconv.STATUS_ERROR: "bold red",
    UNFINISHED: "dim",
}
_ROLE_STYLES: Final = {"system": "dim cyan", "user": "cyan", "assistant": "green", "tool": "yellow"}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def trajectory_table(
    trajectories: "Iterable[TrajectoryView | Summary]", *, title: str | None = None, narrow: bool = False
) -> Table:
    """One row a trajectory: identity, size, outcome and the start of its trace id.

    Args:
        trajectories: views, or the summaries that were kept of them, in the order to show.
        title: line above the table.
        narrow: one space between columns instead of two, so that it fits in 80 columns.
    """
    padding = 0 if narrow else (0, 1, 0, 0)
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False
    )
    for name in ("step", "sample", "n"):
        table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis", max_width=12)
    table.add_column("val", justify="center", no_wrap=True)
    for name in ("turns", "tools", "errors", "tokens", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("trace", style="dim", no_wrap=True)
    for trajectory in trajectories:
        table.add_row(*_row(trajectory.summary if isinstance(trajectory, TrajectoryView) else trajectory))
    return table


def _row(line: Summary) -> Iterator[Text]:
    yield _cell(line.step)
    yield _cell(line.sample_index)
    yield _cell(line.rollout_n)
    yield Text("✓" if line.validate else "", style="cyan")
    yield _cell(line.turns)
    yield _cell(line.tool_calls)
    yield Text(str(line.tool_errors), style="red" if line.tool_errors else "dim")
    yield _cell(line.response_tokens)
    yield Text(number(line.reward), style=_reward_style(line.reward))
    yield Text(printable(line.status), style=_STATUS_STYLES.get(line.status, ""))
    yield Text(seconds(line.duration_s))
    yield Text(line.trace_id[:8])


def trajectory_tree(trajectory: TrajectoryView, *, full: bool = False, show_tokens: bool = False) -> Tree:
    """One trajectory as it went: rewards, then each turn with what was said, and each tool call with its result.

    Args:
        trajectory: the trajectory.
        full: do not fold long texts.
        show_tokens: also the token ids of each turn, rebuilt from its deltas.
    """
    return _TreeBuilder(trajectory, full=full, show_tokens=show_tokens).build()


class _TreeBuilder:
    def __init__(self, trajectory: TrajectoryView, *, full: bool, show_tokens: bool) -> None:
        self._trajectory = trajectory
        self._full = full
        self._show_tokens = show_tokens
        self._turns = trajectory.turns
        self._tools = _tools_by_turn(trajectory.tools, self._turns)
        self._texts_in_turns = any(turn.input_messages or turn.output_messages for turn in self._turns)

    def build(self) -> Tree:
        tree = Tree(_head(self._trajectory), guide_style="dim")
        tree.add(_identity(self._trajectory))
        self._outcome(tree)
        if not self._texts_in_turns and self._trajectory.messages:
            self._messages(tree.add(Text("conversation", style="bold")), self._trajectory.messages, hide_calls=False)
        self._tool_calls(tree, self._tools.get(-1, ()))
        for position, turn in enumerate(self._turns):
            self._turn(tree.add(_turn_head(turn)), turn, self._tools.get(position, ()))
        _other_ops(tree, self._trajectory.spans)
        return tree

    def _outcome(self, tree: Tree) -> None:
        if self._trajectory.rewards:
            named = (f"{printable(name)} {number(value)}" for name, value in self._trajectory.rewards.items())
            tree.add(Text("rewards  ", style="bold").append(" · ".join(named), style="not bold"))
        root = self._trajectory.root
        if root is None:
            tree.add(Text("no root span: still running, killed, or its last spans were lost", style="yellow"))
            return
        reason = root.attributes.get(semconv.REJECTION_REASON)
        if reason:
            tree.add(self._folded(Text("rejected  ", style="yellow"), str(reason)))
        if root.status == "ERROR":
            tree.add(self._folded(Text("error  ", style="bold red"), _failure(root), "red"))
        for event in root.events:
            if event.name == semconv.MISMATCH_EVENT:
                position = event.attributes.get(semconv.MISMATCH_POSITION)
                said = f"a prompt does not extend what was seen before: first difference at token {position}"
                tree.add(Text("token mismatch  ", style="bold yellow").append(said, style="not bold"))

    def _turn(self, node: Tree, turn: TurnView, tools: Sequence[SpanView]) -> None:
        if self._show_tokens:
            _token_lines(node, turn, full=self._full)
        answered = [message for message in turn.input_messages if not _is_tool_answer(message, self._trajectory.tools)]
        self._messages(node, answered, hide_calls=False)
        self._messages(node, turn.output_messages, hide_calls=bool(tools))
        for segment in turn.segments:
            node.add(_turn_line(f"segment {segment.attributes[semconv.SEGMENT]}", segment))
        if turn.span.error_type:
            node.add(self._folded(Text("error  ", style="bold red"), _failure(turn.span), "red"))
        self._tool_calls(node, tools)

    def _messages(self, node: Tree, messages: Sequence[Mapping[str, Any]], *, hide_calls: bool) -> None:
        for message in messages:
            role = str(message.get("role") or "?")
            label = Text(f"{printable(role)}  ", style=f"bold {_ROLE_STYLES.get(role, '')}".strip())
            for part in _parts(message, hide_calls=hide_calls):
                node.add(self._folded(label, part))

    def _tool_calls(self, node: Tree, tools: Sequence[SpanView]) -> None:
        for tool in tools:
            failed = tool.error_type is not None
            name = tool.attributes.get(semconv.TOOL_NAME) or tool.name.removeprefix("execute_tool ")
            head = Text("tool  ", style="bold red" if failed else "bold yellow")
            head.append(printable(str(name)), style="red" if failed else "default")
            head.append(f"  {seconds(tool.duration_s)} s", style="not bold dim")
            reward = tool.attributes.get(semconv.TOOL_REWARD)
            if reward is not None:
                head.append(f" · tool reward {number(reward)}", style="not bold dim")
            branch = node.add(head)
            arguments = tool.attributes.get(semconv.TOOL_CALL_ARGUMENTS)
            if arguments not in (None, ""):
                branch.add(self._folded(Text("arguments  ", style="dim"), _value(arguments)))
            result = tool.attributes.get(semconv.TOOL_CALL_RESULT)
            if result is not None:
                branch.add(self._folded(Text("result  ", style="dim"), _value(result), "red" if failed else ""))
            if failed:
                branch.add(self._folded(Text("error  ", style="bold red"), _failure(tool), "red"))

    def _folded(self, label: Text, content: str, style: str = "") -> Text:
        return Text.assemble(label, fold(content, full=self._full, style=style))


def fold(content: str, *, full: bool = False, style: str = "") -> Text:
    """A text safe to print, cut at `FOLD_CHARS` characters and `FOLD_LINES` lines with a count of what is left out."""
    lines = content.rstrip("\n").split("\n")
    kept = content.rstrip("\n") if full else "\n".join(lines[:FOLD_LINES])[:FOLD_CHARS]
    text = Text(printable(kept), style=style)
    left_out = len(content.rstrip("\n")) - len(kept)
    if left_out > 0:
        text.append(f" … +{left_out:,} characters (--full)", style="dim italic not bold")
    return text


def printable(text: str) -> str:
    """The text without control characters: what a model generates must not drive the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def number(value: Any) -> str:
    """A reward or score in at most four digits after the point; empty for None."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    digits = f"{value:.4f}".rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits


def seconds(duration: float) -> str:
    """A duration with as many digits as it deserves."""
    return f"{duration:.3f}" if duration < 1 else f"{duration:.1f}"


def _cell(value: Any) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(f"{value:,}" if isinstance(value, int) and value > 9_999 else printable(str(value)))  # noqa: PLR2004


def _reward_style(reward: float | None) -> str:
    return "" if reward is None else ("green" if reward > 0 else "red")


def _head(trajectory: TrajectoryView) -> Text:
    line = trajectory.summary
    name = trajectory.root.name if trajectory.root is not None else "trajectory"
    head = Text(printable(name), style="bold")
    head.append("  ").append(printable(line.status), style=_STATUS_STYLES.get(line.status, ""))
    if line.reward is not None:
        head.append("  reward ", style="not bold").append(number(line.reward), style=_reward_style(line.reward))
    calls = f"{_count(line.turns, 'turn')} · {_count(line.tool_calls, 'tool call')}"
    if line.tool_errors:
        calls += f" ({_count(line.tool_errors, 'error')})"
    tokens = "" if line.response_tokens is None else f" · {_count(line.response_tokens, 'token')}"
    return head.append(f"  {calls}{tokens} · {seconds(line.duration_s)} s", style="not bold dim")


def _identity(trajectory: TrajectoryView) -> Text:
    named = {
        "project": trajectory.project_name,
        "experiment": trajectory.experiment_name,
        "step": trajectory.step,
        "sample": trajectory.sample_index,
        "n": trajectory.rollout_n,
        "group": trajectory.group_id,
        "trajectory": trajectory.trajectory_id,
        "trace": trajectory.trace_id,
    }
    known = [f"{key} {printable(str(value))}" for key, value in named.items() if value is not None]
    return Text(" · ".join(["validation", *known] if trajectory.validate else known), style="dim")


def _turn_head(turn: TurnView) -> Text:
    head = _turn_line(f"turn {turn.number}", turn.span)
    if turn.rebased:
        head.append(" · rebased", style="yellow")
    return head


def _turn_line(label: str, span: SpanView) -> Text:
    attributes = span.attributes
    facts = [f"{seconds(span.duration_s)} s"]
    sent, generated = attributes.get(semconv.INPUT_TOKENS), attributes.get(semconv.OUTPUT_TOKENS)
    if sent is not None or generated is not None:
        facts.append(f"{_or_unknown(sent)} → {_or_unknown(generated)} tokens")
    cached = attributes.get(semconv.CACHE_READ_TOKENS)
    if cached:
        facts.append(f"{cached} cached")
    reasons = attributes.get(semconv.FINISH_REASONS)
    if reasons:
        facts.append(", ".join(map(str, reasons)) if isinstance(reasons, list) else str(reasons))
    version = attributes.get(semconv.POLICY_VERSION)
    if version is not None:
        facts.append(f"policy {version}")
    preemptions = attributes.get(semconv.PREEMPTIONS)
    if preemptions:
        facts.append(_count(preemptions, "preemption"))
    head = Text(label, style="bold red" if span.error_type else "bold")
    head.append(f"  {printable(span.name)}", style="not bold")
    return head.append(f"  {printable(' · '.join(facts))}", style="not bold dim")


def _token_lines(node: Tree, turn: TurnView, *, full: bool) -> None:
    if turn.token_error is not None:
        node.add(Text(f"tokens  {turn.token_error}", style="red"))
        return
    if turn.prompt_ids is None or turn.completion_ids is None:
        node.add(Text("tokens  not recorded", style="dim"))
        return
    new = f" ({turn.prompt_delta_length} new)"
    node.add(_id_line(f"prompt {len(turn.prompt_ids)} ids{new}  ", turn.prompt_ids, full=full))
    node.add(_id_line(f"completion {len(turn.completion_ids)} ids  ", turn.completion_ids, full=full))
    node.add(Text(f"mask  {sum(turn.mask)} of {len(turn.mask)} new tokens are trained on", style="dim"))


def _id_line(label: str, ids: Sequence[int], *, full: bool) -> Text:
    shown = ids if full else ids[-IDS_SHOWN:]
    line = Text(label, style="dim")
    if len(shown) < len(ids):
        line.append(f"… {len(ids) - len(shown)} before, ", style="italic")
    return line.append(" ".join(map(str, shown)), style="not dim")


def _tools_by_turn(tools: Sequence[SpanView], turns: Sequence[TurnView]) -> dict[int, list[SpanView]]:
    """Each tool call under the turn that asked for it: the last that had started; -1 before the first."""
    placed: dict[int, list[SpanView]] = {}
    for tool in tools:
        asked = max((at for at, turn in enumerate(turns) if turn.span.start_ns <= tool.start_ns), default=-1)
        placed.setdefault(asked, []).append(tool)
    return placed


def _is_tool_answer(message: Mapping[str, Any], tools: Sequence[SpanView]) -> bool:
    """Whether the message only repeats what the spans of the tools show."""
    return bool(tools) and message.get("role") == "tool"


def _parts(message: Mapping[str, Any], *, hide_calls: bool) -> Iterator[str]:
    parts = message.get("parts")
    if not isinstance(parts, list):
        content = message.get("content")
        yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        return
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "reasoning"):
            content = part.get("content")
            yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        elif kind == "tool_call":
            if not hide_calls:
                yield f"→ {part.get('name')} {_value(part.get('arguments'))}"
        elif kind == "tool_call_response":
            yield f"← {_value(part.get('response'))}"
        else:
            yield json.dumps(part, ensure_ascii=False)


def _other_ops(tree: Tree, spans: Sequence[SpanView]) -> None:
    shown = (semconv.KIND_AGENT, semconv.KIND_LLM, semconv.KIND_TOOL, semconv.KIND_EVALUATOR)
    ops = [span for span in spans if span.kind not in shown]
    if not ops:
        return
    line = Text("other ops  ", style="dim")
    for position, span in enumerate(ops[:_OPS_SHOWN]):
        failed = f" {span.error_type}" if span.error_type else ""
        line.append(", " if position else "")
        line.append(f"{printable(span.name)} {seconds(span.duration_s)} s{failed}", style="red" if failed else "")
    tree.add(line.append(f" … +{len(ops) - _OPS_SHOWN}" if len(ops) > _OPS_SHOWN else ""))


_OPS_SHOWN: Final = 12


def _failure(span: SpanView) -> str:
    return ": ".join(text for text in (span.error_type or "error", span.status_message) if text)


def _value(value: Any) -> str:
    """A JSON string is shown as its text, other JSON as it is."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False, default=str)
    if value[:1] == '"':
        try:
            return str(json.loads(value))
        except ValueError:
            return value
    return value


def _count(count: Any, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _or_unknown(value: Any) -> str:
    return "?" if value is None else f"{value:,}"

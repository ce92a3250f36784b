"""The command line: `otel-rollout show` prints trajectories, `otel-rollout doctor` says what is wrong and its fix."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.console import Console

    from otel_rollout.trace_view import Summary, TrajectoryView

DEFAULT_LIMIT: Final = 100
PIPED_WIDTH: Final = 160
ROOMY_WIDTH: Final = 96

# What to sort by, and whether the largest comes first.
SORTS: Final[dict[str, tuple[Callable[["Summary"], Any], bool]]] = {
    "step": (lambda line: (line.step, str(line.sample_index).zfill(12), line.rollout_n), False),
    "start": (lambda line: line.start_ns, False),
    "reward": (lambda line: line.reward, True),
    "seconds": (lambda line: line.duration_s, True),
    "turns": (lambda line: line.turns, True),
    "tools": (lambda line: line.tool_calls, True),
    "errors": (lambda line: line.tool_errors, True),
    "tokens": (lambda line: line.response_tokens, True),
}


def _version() -> str:
    from otel_rollout.doctor import installed_version

    return installed_version("otel-rollout") or "not installed (running from its source)"


def _print_version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        click.echo(f"otel-rollout {_version()}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Say the version."
)
def main() -> None:
    """OpenTelemetry traces of agentic-RL rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filter:
    step: int | None
    sample_index: str | None
    rollout_n: int | None
    status: str | None
    validate: bool | None
    group: str | None
    trajectory: str | None

    def __call__(self, line: "Summary") -> bool:
        asked = (
            (self.step, line.step),
            (self.sample_index, None if line.sample_index is None else str(line.sample_index)),
            (self.rollout_n, line.rollout_n),
            (self.status, line.status),
            (self.validate, line.validate),
            (self.group, line.group_id),
        )
        return all(want is None or want == have for want, have in asked) and self._named(line)

    def _named(self, line: "Summary") -> bool:
        if self.trajectory is None:
            return True
        return line.trace_id.startswith(self.trajectory.lower()) or (line.trajectory_id or "").startswith(
            self.trajectory
        )


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Only this trainer step.")
@click.option("--sample-index", help="Only this sample.")
@click.option("--rollout-n", type=int, help="Only this serial number within its group.")
@click.option(
    "--status", help="Only this status: completed, truncated, cancelled, aborted, rejected, error, unfinished."
)
@click.option("--validate/--train", default=None, help="Only validation, or only training trajectories.")
@click.option("--group", help="Only this GRPO group (its group id).")
@click.option("--trajectory", help="Only this trajectory: the start of its trace id or trajectory id.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="step", show_default=True, help="Order of the table.")
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Rows to show; 0 for all.  [default: {DEFAULT_LIMIT}; all with --json]"
)
@click.option("--tokens", "show_tokens", is_flag=True, help="Show the token ids of each turn in the tree.")
@click.option("--full", is_flag=True, help="Do not fold long texts.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object a line for each trajectory; a single one with its turns."
)
def show(
    path: Path,
    *,
    sort: str,
    reverse: bool,
    limit: int | None,
    show_tokens: bool,
    full: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    r"""List the trajectories of an OTLP JSON-lines file or directory; a single match is printed as a tree.

    \b
    otel-rollout show otel-rollout/ --step 12 --sort reward
    otel-rollout show otel-rollout/ --trajectory 4bf92f35 --tokens
    """
    lines, total, single = _matches(path, _Filter(**asked))
    if not lines:
        raise click.ClickException(_nothing(path, total))
    if single is not None and as_json:
        click.echo(json.dumps(detail(single, with_tokens=show_tokens), ensure_ascii=False, default=str))
        return
    if single is not None:
        from otel_rollout.render import trajectory_tree

        _console().print(trajectory_tree(single, full=full, show_tokens=show_tokens))
        return
    ordered = _ordered(lines, sort, reverse=reverse)
    wanted = limit if limit is not None else (0 if as_json else DEFAULT_LIMIT)
    kept = ordered[:wanted] if wanted else ordered
    if as_json:
        for line in kept:
            click.echo(json.dumps(asdict(line), ensure_ascii=False))
        return
    _print_table(kept, ordered, path)


def _matches(path: Path, wanted: Callable[["Summary"], bool]) -> tuple[list["Summary"], int, "TrajectoryView | None"]:
    """Summaries of the matches, the number of trajectories in all, and the view of a match that is the only one."""
    from otel_rollout.trace_view import TraceFileError, read_trajectories

    lines: list[Summary] = []
    single: TrajectoryView | None = None
    total = 0
    try:
        for trajectory in read_trajectories(path, on_problem=lambda text: click.echo(f"Warning: {text}", err=True)):
            total += 1
            line = trajectory.summary
            if wanted(line):
                single = None if lines else trajectory
                lines.append(line)
    except TraceFileError as error:
        raise click.ClickException(str(error)) from error
    return lines, total, single


def _nothing(path: Path, total: int) -> str:
    if not total:
        return (
            f"{path} holds spans, but none of them belongs to a trajectory. Was the rollout inside rollout_trace_attr?"
        )
    return f"none of the {total:,} trajectories of {path} matches. Run `otel-rollout show {path}` to see them."


def _ordered(lines: list["Summary"], sort: str, *, reverse: bool) -> list["Summary"]:
    key, largest_first = SORTS[sort]
    known = [line for line in lines if _comparable(key(line))]
    unknown = [line for line in lines if not _comparable(key(line))]
    return [*sorted(known, key=key, reverse=largest_first != reverse), *unknown]


def _comparable(key: Any) -> bool:
    return None not in key if isinstance(key, tuple) else key is not None


def _print_table(kept: list["Summary"], lines: list["Summary"], path: Path) -> None:
    from rich.text import Text

    from otel_rollout.render import trajectory_table

    console = _console()
    console.print(trajectory_table(kept, narrow=console.width < ROOMY_WIDTH))
    console.print()
    console.print(Text(" · ".join(_totals(kept, lines)), style="bold"))
    console.print(Text(f"One of them: otel-rollout show {path} --trajectory {kept[0].trace_id[:8]}", style="dim"))


def _totals(kept: list["Summary"], lines: list["Summary"]) -> Iterator[str]:
    from collections import Counter

    from otel_rollout.render import number

    count = f"{len(lines):,} trajectories"
    yield count if len(kept) == len(lines) else f"{len(kept):,} of {count} (--limit 0 for all)"
    groups = {line.group_id for line in lines if line.group_id is not None}
    if groups:
        yield f"{len(groups):,} groups"
    rewards = [line.reward for line in lines if line.reward is not None]
    if rewards:
        yield f"mean reward {number(sum(rewards) / len(rewards))}"
    for status, times in Counter(line.status for line in lines).most_common():
        yield f"{times:,} {status}"


def detail(trajectory: "TrajectoryView", *, with_tokens: bool) -> dict[str, Any]:
    """A trajectory as JSON-able values: its summary, rewards, conversation, turns and tool calls."""
    turns = [
        {
            "number": turn.number,
            "name": turn.span.name,
            "span_id": turn.span.span_id,
            "seconds": turn.span.duration_s,
            "finish_reason": turn.finish_reason,
            "policy_version": turn.policy_version,
            "rebased": turn.rebased,
            "input_messages": turn.input_messages,
            "output_messages": turn.output_messages,
            "token_error": str(turn.token_error) if turn.token_error else None,
            "error": turn.span.error_type,
        }
        | (
            {"prompt_ids": turn.prompt_ids, "completion_ids": turn.completion_ids, "mask": turn.mask}
            if with_tokens
            else {}
        )
        for turn in trajectory.turns
    ]
    tools = [
        {
            "name": tool.name,
            "span_id": tool.span_id,
            "seconds": tool.duration_s,
            "error": tool.error_type,
            "attributes": tool.attributes,
        }
        for tool in trajectory.tools
    ]
    return {
        **asdict(trajectory.summary),
        "rewards": trajectory.rewards,
        "turns": turns,
        "tools": tools,
        "messages": trajectory.messages,
    }


@main.command()
@click.option(
    "--exporter", "exporters", help="Check these exporters instead of OTEL_TRACES_EXPORTER, e.g. otlp,otlp_file."
)
@click.option("--send/--no-send", default=True, help="Send a real test span through each exporter.  [default: send]")
@click.option(
    "--verl/--no-verl", default=None, help="Import verl and look at the hooks.  [default: if verl is installed]"
)
@click.option(
    "--timeout", type=click.FloatRange(min=2.0), default=5.0, show_default=True, help="Seconds for each test span."
)
@click.option("--json", "as_json", is_flag=True, help="The findings as one JSON object.")
def doctor(exporters: str | None, send: bool, verl: bool | None, timeout: float, as_json: bool) -> None:
    """Say what is switched on, what is wrong, and the fix. Exit code 1 if something is wrong."""
    from otel_rollout.doctor import diagnose

    environ = dict(os.environ)
    if exporters is not None:
        environ["OTEL_TRACES_EXPORTER"] = exporters
    # Importing verl takes a while; shown on a terminal only.
    with contextlib.nullcontext() if as_json else _console(stderr=True).status("Looking at exporters and verl ..."):
        findings = diagnose(environ, send=send, verl=verl, timeout_s=timeout)
    wrong = [finding for finding in findings if finding.level == "error"]
    if as_json:
        click.echo(
            json.dumps({"ok": not wrong, "findings": [asdict(finding) for finding in findings]}, ensure_ascii=False)
        )
    else:
        _print_findings(findings)
    if wrong:
        sys.exit(1)


def _print_findings(findings: list[Any]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = _console()
    marks = {"ok": ("✓", "green"), "info": ("·", "dim"), "warning": ("!", "bold yellow"), "error": ("✗", "bold red")}
    topics = dict.fromkeys(finding.topic for finding in findings)
    for topic in topics:
        console.print(Text(topic, style="bold"))
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=1)
        grid.add_column(overflow="fold")
        for finding in findings:
            if finding.topic == topic:
                mark, style = marks[finding.level]
                said = Text(finding.message, style="red" if finding.level == "error" else "")
                if finding.fix:
                    said.append("\nfix: ", style="bold cyan").append(finding.fix, style="default not bold")
                grid.add_row(Text(mark, style=style), said)
        console.print(Padding(grid, (0, 0, 1, 2)))
    console.print(_verdict(findings))


def _verdict(findings: list[Any]) -> Any:
    from rich.text import Text

    wrong = sum(finding.level == "error" for finding in findings)
    odd = sum(finding.level == "warning" for finding in findings)
    if wrong:
        return Text(f"{wrong} thing{'s' if wrong > 1 else ''} wrong, {odd} to look at.", style="bold red")
    return Text("All is well." if not odd else f"Nothing is wrong; {odd} to look at.", style="bold green")


def _console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console

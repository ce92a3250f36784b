import copy
import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from otel_rollout import semconv, tokens
from otel_rollout.cli import main
from otel_rollout.otlp_json import encode_lines

QUESTION = "Mia has 3 apples and buys 4 more. How many has she?"


def said(role, text, *calls):
    parts = [{"type": "text", "content": text}] if text else []
    parts += [{"type": "tool_call", "name": name, "arguments": arguments} for name, arguments in calls]
    return {"role": role, "parts": parts}


def write_trajectory(tracer, *, status, reward, tool_error=None, long_text="", finished=True):
    kind = semconv.SPAN_KIND
    root = tracer.start_span("invoke_agent tool_agent", Context(), attributes={kind: semconv.KIND_AGENT})
    here = trace.set_span_in_context(root)
    turns = [
        ([1, 2, 3], [4, 5], [said("user", QUESTION)], said("assistant", "I add.", ("calc", {"expression": "3+4"})), 1),
        ([1, 2, 3, 4, 5, 6], [7], [said("tool", "7")], said("assistant", f"She has 7.{long_text}"), 2),
    ]
    seen = []
    for prompt, completion, inputs, output, number in turns:
        attributes = {
            kind: semconv.KIND_LLM,
            semconv.TURN: number,
            semconv.INPUT_TOKENS: len(prompt),
            semconv.OUTPUT_TOKENS: len(completion),
            semconv.FINISH_REASONS: ["stop"],
            semconv.POLICY_VERSION: 12,
            semconv.INPUT_MESSAGES: json.dumps(inputs),
            semconv.OUTPUT_MESSAGES: json.dumps([output]),
            semconv.DELTA_PROMPT: tokens.encode_ids(prompt[len(seen) :]),
            semconv.DELTA_COMPLETION: tokens.encode_ids(completion),
            semconv.DELTA_PREFIX_LENGTH: len(seen),
            semconv.DELTA_PREFIX_HASH: tokens.prefix_hash(seen),
        }
        tracer.start_span("chat policy", here, attributes=attributes).end()
        seen = prompt + completion
        if number == 1:
            tool = tracer.start_span(
                "execute_tool calc", here, attributes={kind: semconv.KIND_TOOL, semconv.TOOL_NAME: "calc"}
            )
            tool.set_attribute(semconv.TOOL_CALL_ARGUMENTS, '{"expression": "3+4"}')
            tool.set_attribute(semconv.TOOL_CALL_RESULT, '"the result is 7"' if not tool_error else '"failed"')
            if tool_error:
                tool.set_attribute(semconv.ERROR_TYPE, tool_error)
                tool.set_status(Status(StatusCode.ERROR, "the sandbox is gone"))
            tool.end()
    if finished:
        root.set_attributes(
            {semconv.STATUS: status, semconv.TURNS: 2, semconv.TOOL_CALLS: 1, semconv.RESPONSE_TOKENS: 3}
        )
        root.set_attributes({semconv.TOOL_ERRORS: int(bool(tool_error)), semconv.REWARD: reward})
        root.set_attribute("rollout.rewards.format", 0.5)
        root.end()


@pytest.fixture
def traces(tmp_path):
    """Five trajectories: two groups of training at steps 1 and 2, one of validation, one unfinished."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))

    def tracer(**identity):
        found = copy.copy(provider.get_tracer(semconv.SCOPE))
        found.resource = Resource({f"rollout.{key}": value for key, value in identity.items()})
        return found

    plan = [
        ({"step": 1, "sample_index": 3, "rollout_n": 0, "group_id": "a"}, {"status": "completed", "reward": 1.0}),
        ({"step": 1, "sample_index": 3, "rollout_n": 1, "group_id": "a"}, {"status": "truncated", "reward": 0.0}),
        (
            {"step": 2, "sample_index": 10, "rollout_n": 0, "group_id": "b"},
            {"status": "error", "reward": -1.0, "tool_error": "Timeout"},
        ),
        (
            {"step": 2, "sample_index": "a-uuid-of-36-chars", "rollout_n": 0, "validate": True},
            {"status": "completed", "reward": 0.25},
        ),
        (
            {"step": 2, "sample_index": 11, "rollout_n": 0, "group_id": "b"},
            {"status": "", "reward": 0, "finished": False},
        ),
    ]
    for number, (identity, outcome) in enumerate(plan):
        long_text = "".join(f"\nline {line}" for line in range(40)) if number == 1 else "\x1b[31m[bold]red"
        write_trajectory(tracer(trajectory_id=f"traj-{number}", **identity), long_text=long_text, **outcome)
    (tmp_path / "traces.jsonl").write_bytes(b"".join(encode_lines(memory.get_finished_spans())))
    return tmp_path


@pytest.fixture
def run(traces, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments, path=None):
        return CliRunner().invoke(main, ["show", str(path or traces), *arguments])

    return run


def rows(result):
    """The words of each row; the header is the first."""
    assert result.exit_code == 0, result.output
    words = [line.split() for line in result.stdout.splitlines()]
    return [line for line in words if line and re.fullmatch("trace|[0-9a-f]{8}", line[-1]) and len(line) > 9]


def test_several_are_a_table_in_order_of_step_and_sample(run):
    result = run()
    head, *lines = rows(result)
    assert head == [
        "step",
        "sample",
        "n",
        "val",
        "turns",
        "tools",
        "errors",
        "tokens",
        "reward",
        "status",
        "seconds",
        "trace",
    ]
    assert [line[:3] for line in lines[:4]] == [["1", "3", "0"], ["1", "3", "1"], ["2", "10", "0"], ["2", "11", "0"]]
    assert lines[0][3:9] == ["2", "1", "0", "3", "1", "completed"]
    assert "✓" in lines[4]
    assert "unfinished" in lines[3]
    assert (
        "5 trajectories · 2 groups · mean reward 0.0625 · 2 completed · 1 truncated · 1 error · 1 unfinished"
        in result.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--step", "1"], ["1", "1"]),
        (["--train"], ["1", "1", "2", "2"]),
        (["--status", "completed"], ["1", "2"]),
        (["--group", "b"], ["2", "2"]),
        (["--rollout-n", "0", "--step", "2"], ["2", "2", "2"]),
        (["--trajectory", "traj-"], ["1", "1", "2", "2", "2"]),
    ],
)
def test_filters(run, arguments, steps):
    assert [line[0] for line in rows(run(*arguments))[1:]] == steps


def test_sort_and_limit(run):
    result = run("--sort", "reward", "--limit", "2")
    assert [line[-4] for line in rows(result)[1:]] == ["1", "0.25"]
    assert "2 of 5 trajectories (--limit 0 for all)" in result.stdout
    worst = rows(run("--sort", "reward", "--reverse"))[1:]
    assert [line[-4] for line in worst[:4]] == ["-1", "0", "0.25", "1"]
    assert worst[4][-3] == "unfinished"  # no reward: last either way


@pytest.mark.parametrize(
    "arguments", [["--validate"], ["--sample-index", "a-uuid-of-36-chars"], ["--trajectory", "traj-3"]]
)
def test_a_single_match_is_a_tree(run, arguments):
    out = run(*arguments).stdout
    assert "invoke_agent tool_agent  completed  reward 0.25  2 turns · 1 tool call · 3 tokens" in out
    assert "validation · step 2 · sample a-uuid-of-36-chars · n 0 · trajectory traj-3" in out
    assert "rewards  format 0.5" in out
    assert "turn 1  chat policy" in out
    assert "3 → 2 tokens · stop · policy 12" in out
    assert f"user  {QUESTION}" in out
    assert "assistant  I add." in out
    assert 'arguments  {"expression": "3+4"}' in out
    assert "result  the result is 7" in out


def test_what_a_model_wrote_does_not_drive_the_terminal(run):
    out = run("--trajectory", "traj-0").stdout
    assert "She has 7.\N{REPLACEMENT CHARACTER}[31m[bold]red" in out
    assert "\x1b" not in out


def test_tool_errors_are_told_and_an_unfinished_one_says_so(run):
    failed = run("--trajectory", "traj-2").stdout
    assert "error  Timeout: the sandbox is gone" in failed
    assert "1 tool call (1 error)" in failed
    assert "no root span" in run("--sample-index", "11").stdout


def test_long_texts_are_folded_unless_full(run):
    folded = run("--trajectory", "traj-1").stdout
    assert "line 6" in folded
    assert "line 7" not in folded
    assert "(--full)" in folded
    assert "line 39" in run("--trajectory", "traj-1", "--full").stdout


def test_tokens_are_rebuilt_on_request(run):
    assert "ids" not in run("--trajectory", "traj-1").stdout
    out = run("--trajectory", "traj-1", "--tokens").stdout
    assert "prompt 6 ids (1 new)  1 2 3 4 5 6" in out
    assert "completion 1 ids  7" in out
    assert "mask  1 of 2 new tokens are trained on" in out


def test_json_is_a_line_each_and_a_single_one_has_its_turns(run):
    many = [json.loads(line) for line in run("--json").stdout.splitlines()]
    assert len(many) == 5
    assert (many[0]["step"], many[0]["reward"], many[0]["status"]) == (1, 1.0, "completed")
    (single,) = [json.loads(line) for line in run("--trajectory", "traj-2", "--json", "--tokens").stdout.splitlines()]
    assert [turn["prompt_ids"] for turn in single["turns"]] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert single["tools"][0]["error"] == "Timeout"
    assert single["rewards"] == {"format": 0.5}


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_every_width_works(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert run().exit_code == run("--trajectory", "traj-1", "--tokens", "--full").exit_code == 0
    assert all(len(line) <= int(columns) for line in run("--trajectory", "traj-1").stdout.splitlines())
    if columns != "40":
        assert all(word in run().stdout for word in ("truncated", "completed", "seconds"))


def test_no_match_and_no_trajectory_say_what_to_do(run, traces):
    result = run("--step", "99")
    assert result.exit_code == 1
    assert "none of the 5 trajectories" in result.stderr
    (traces / "other.jsonl").write_text(
        '{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"00","spanId":"1","name":"x"}]}]}]}\n'
    )
    lone = run(path=traces / "other.jsonl")
    assert lone.exit_code == 1
    assert "none of them belongs to a trajectory" in lone.stderr


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nowhere.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "is empty"),
        ("text.jsonl", "a,b\n1,2\n", "no OTLP JSON lines"),
    ],
)
def test_a_bad_path_is_one_clear_error(run, traces, name, content, words):
    if content is not None:
        (traces / name).write_text(content)
    result = run(path=traces / name)
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_torn_line_is_a_warning_beside_the_table(run, traces):
    with (traces / "traces.jsonl").open("a") as stream:
        stream.write('{"resourceSpans":[{"res')
    result = run()
    assert len(rows(result)) == 6
    assert result.stderr.startswith("Warning: ")
    assert "not complete" in result.stderr


def test_version_and_help():
    assert CliRunner().invoke(main, ["--version"]).output.startswith("otel-rollout ")
    assert "doctor" in CliRunner().invoke(main, ["-h"]).output
    assert "--trajectory" in CliRunner().invoke(main, ["show", "--help"]).output


def test_piped_it_is_plain_and_wide(traces):
    environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-c", "from otel_rollout.cli import main; main()", "show", str(traces)],
        capture_output=True,
        text=True,
        env=environ,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "a-uuid-of-3…" in done.stdout
    assert done.stderr == ""

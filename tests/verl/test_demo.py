"""The demo, run as a user runs it: real verl with real Ray actors, its picture, its traces, its end."""

import contextlib
import gzip
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_rollout.trace_view import TrajectoryView, read_trajectories

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN = EXAMPLES / "verl_demo" / "run.py"
sys.path.append(str(EXAMPLES))

from verl_demo import run as demo_run  # noqa: E402
from verl_demo.questions import Question, load_questions  # noqa: E402
from verl_demo.script import Plan, plan  # noqa: E402
from verl_demo.tokenizer import build_tokenizer  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow]
QUESTIONS = {question.index: question for question in load_questions()}
# What the tool call of a behaviour that goes wrong is recorded as.
ERRORS = {
    "division_by_zero": ("calculator", "ZeroDivisionError"),
    "unknown_tool": ("web_search", "unknown_tool"),
    "bad_arguments": ("calculator", "TypeError"),
    "endless_program": ("code_interpreter", "TimeoutError"),
    "cancelled": ("code_interpreter", "CancelledError"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    policy: str
    output: str
    received: list[bytes]  # at the OTLP endpoint, where it had one
    traces: Path
    trajectories: list[TrajectoryView]


def environment() -> dict[str, str]:
    """The caller's, without tracing of its own and with a terminal of known width."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**kept, "COLUMNS": "160"}


def processes_of(traces: Path) -> list[int]:
    """The processes that were told to write their traces there."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"OTEL_ROLLOUT_FILE={traces}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            continue  # gone, or another user's
    return found


@contextlib.contextmanager
def otlp_endpoint() -> Iterator[tuple[str, list[bytes]]]:
    """A server that keeps the bodies of what it is sent to its path for traces."""
    received: list[bytes] = []

    class Request(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                received.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Request) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


@pytest.fixture(scope="module", params=[("v1", "scripted"), ("v0", "hf")], ids="-".join)
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    trainer, policy = request.param
    out = tmp_path_factory.mktemp(f"demo-{trainer}")
    command = [sys.executable, RUN, "--trainer", trainer, "--policy", policy, "--out", out]
    with otlp_endpoint() as (address, received):
        there = {"OTEL_EXPORTER_OTLP_ENDPOINT": address} if trainer == "v0" else {}
        done = subprocess.run(command, capture_output=True, text=True, env={**environment(), **there}, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    traces = out / "traces"
    views = list(read_trajectories(traces))
    return Demo(policy=policy, output=done.stdout, received=received, traces=traces, trajectories=views)


def passed_over(trajectory: TrajectoryView) -> str:
    """What the policy said, all turns in one text."""
    tokenizer = build_tokenizer()
    return "".join(tokenizer.decode(turn.completion_ids) for turn in trajectory.turns)


def final_answer(trajectory: TrajectoryView) -> str | None:
    said = [part["content"] for message in trajectory.messages for part in message["parts"] if part["type"] == "text"]
    found = re.findall(r"^Answer: (\S+?)(?:<\|im_end\|>)?$", said[-1], re.MULTILINE)
    return found[-1] if found else None


def deserved(question: Question, scripted: Plan) -> float | None:
    if scripted.behaviour == "cancelled":
        return None
    last = scripted.turns[-1]
    return 1.0 if last.endswith(f"Answer: {question.answer}") else 0.1 if "Answer: " in last else 0.0


def groups(demo: Demo) -> dict[tuple[int, int, bool], list[TrajectoryView]]:
    found: dict[tuple[int, int, bool], list[TrajectoryView]] = {}
    for trajectory in demo.trajectories:
        found.setdefault((trajectory.step, trajectory.sample_index, trajectory.validate), []).append(trajectory)
    return found


def test_every_sample_of_two_steps_and_the_validation_is_recorded_once(demo: Demo) -> None:
    identities = Counter((each.step, each.sample_index, each.rollout_n, each.validate) for each in demo.trajectories)
    training = {(step, 4 * (step - 1) + place, n, False) for step in (1, 2) for place in range(4) for n in range(8)}
    validation = {(2, index, 0, True) for index in range(16, 20)}
    assert identities == Counter(training | validation)


def test_a_group_has_one_id_of_its_own(demo: Demo) -> None:
    ids = [{each.group_id for each in members} for members in groups(demo).values()]
    assert all(len(members) == 1 and None not in members for members in ids)
    assert len(set.union(*ids)) == 12


def test_one_is_truncated_one_is_cancelled_and_the_others_complete(demo: Demo) -> None:
    assert Counter(each.status for each in demo.trajectories) == {"completed": 66, "truncated": 1, "cancelled": 1}
    odd = {each.status: each for each in demo.trajectories if each.status != "completed"}
    assert (odd["truncated"].step, odd["truncated"].sample_index) == (1, 0)
    assert (odd["cancelled"].step, odd["cancelled"].sample_index) == (1, 1)
    assert odd["truncated"].turns[-1].finish_reason == "length"
    assert len(odd["truncated"].turns[-1].completion_ids) == 640
    assert odd["cancelled"].reward is None


def test_the_group_of_the_cancelled_one_is_lost_to_the_trainer_but_not_to_the_traces(demo: Demo) -> None:
    assert "24 trajectories reached the trainer" in demo.output
    siblings = [each for each in groups(demo)[1, 1, False] if each.status != "cancelled"]
    assert [each.status for each in siblings] == ["completed"] * 7
    assert all(each.reward is not None for each in siblings)


def test_each_reward_is_what_the_answer_deserves(demo: Demo) -> None:
    for trajectory in demo.trajectories:
        if trajectory.status == "cancelled":
            continue
        question = QUESTIONS[trajectory.sample_index]
        answer = final_answer(trajectory)
        right = answer is not None and float(answer) == pytest.approx(eval(question.expression))
        expected = 1.0 if right else 0.1 if answer is not None else 0.0
        assert trajectory.reward == expected, passed_over(trajectory)
        assert trajectory.rewards == {"reward": expected, "acc": float(right), "format": float(answer is not None)}


def test_the_rewards_of_a_group_are_those_of_the_script(demo: Demo) -> None:
    for (step, index, validate), members in groups(demo).items():
        question = QUESTIONS[index]
        plans = [plan(question, sample, 2 if validate else step - 1) for sample in range(len(members))]
        assert Counter(each.reward for each in members) == Counter(deserved(question, each) for each in plans)


def test_the_tool_calls_that_fail_are_those_of_the_script(demo: Demo) -> None:
    expected: Counter[tuple[str, str]] = Counter()
    for (step, index, validate), members in groups(demo).items():
        for sample in range(len(members)):
            behaviour = plan(QUESTIONS[index], sample, 2 if validate else step - 1).behaviour
            expected.update([ERRORS[behaviour]] if behaviour in ERRORS else [])
    tools = [tool for each in demo.trajectories for tool in each.tools]
    failed = Counter((tool.attributes["gen_ai.tool.name"], tool.error_type) for tool in tools if tool.error_type)
    assert failed == expected
    assert set(failed) == set(ERRORS.values())
    assert {tool.attributes["gen_ai.tool.name"] for tool in tools if not tool.error_type} == {
        "calculator",
        "code_interpreter",
        "convert_units",
    }


def test_the_tokens_of_each_turn_are_what_was_said(demo: Demo) -> None:
    tokenizer = build_tokenizer()
    for trajectory in demo.trajectories:
        question = QUESTIONS[trajectory.sample_index]
        said = [tokenizer.decode(turn.completion_ids, skip_special_tokens=True) for turn in trajectory.turns]
        version = 2 if trajectory.validate else trajectory.step - 1
        scripts = [plan(question, sample, version).turns for sample in range(8)]
        assert any(follows(said, script, demo.policy) for script in scripts), said
        first = tokenizer.decode(trajectory.turns[0].prompt_ids)
        assert question.question in first
        assert "convert_units" in first
        for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            seen = before.prompt_ids + before.completion_ids
            assert turn.prompt_ids[: len(seen)] == seen
            assert "<tool_response>" in tokenizer.decode(turn.prompt_ids[len(seen) :])


def follows(said: list[str], script: tuple[str, ...], policy: str) -> bool:
    """Whether these turns are the first ones of the script; a random model's tokens may stand before each."""
    if len(said) > len(script):
        return False
    if policy == "hf":
        return all(text.endswith(wanted) or len(text) > 1000 for text, wanted in zip(said, script, strict=False))
    return all(text == wanted or wanted.startswith(text) for text, wanted in zip(said, script, strict=False))


def test_policy_versions_follow_the_steps_and_the_prefix_cache_is_seen(demo: Demo) -> None:
    for trajectory in demo.trajectories:
        assert {turn.policy_version for turn in trajectory.turns} == {2 if trajectory.validate else trajectory.step - 1}
        for turn in trajectory.turns[1:]:
            assert turn.span.attributes["gen_ai.usage.cache_read.input_tokens"] > 500
    preempted = [turn.span.attributes["rollout.preemptions"] for each in demo.trajectories for turn in each.turns]
    assert 0 < sum(preempted) < len(preempted)


def test_the_table_shows_what_the_traces_hold(demo: Demo) -> None:
    lines = demo.output.splitlines()
    header = next(line.split() for line in lines if line.startswith("step "))
    wanted = ["step", "sample", "n", "turns", "tools", "errors", "tokens", "reward", "status", "seconds"]
    assert [name for name in header if name in wanted] == wanted
    for trajectory in demo.trajectories:
        line = trajectory.summary
        row = next(text.split() for text in lines if text.endswith(line.trace_id[:8]))
        cells = [cell for cell in row if cell != "✓"]
        identity = (line.step, line.sample_index, line.rollout_n)
        counts = (line.turns, line.tool_calls, line.tool_errors, line.response_tokens)
        assert cells[:7] == [str(cell) for cell in (*identity, *counts)]
        assert line.status in cells
        assert line.response_tokens > 0
    assert "68 trajectories (66 completed, 1 truncated, 1 cancelled)" in demo.output


def test_the_picture_ends_with_a_trajectory_its_texts_and_the_way_back(demo: Demo) -> None:
    shown = demo.output.partition("trajectories (")[2]
    assert re.search(r"├── user  [A-Z].*\?", shown)
    assert re.search(r"assistant  [^├]*Answer: \d", shown)
    assert re.search(r"error  \w+Error|error  unknown_tool", shown)
    assert f"otel-rollout show {demo.traces}" in demo.output
    found = subprocess.run(
        [Path(sys.executable).with_name("otel-rollout"), "show", demo.traces, "--status", "truncated"],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert "I should look at the problem again" in found.stdout, found.stderr


def test_with_an_otlp_endpoint_every_span_goes_there_too(demo: Demo) -> None:
    requests = [ExportTraceServiceRequest.FromString(body) for body in demo.received]
    scopes = [scope for request in requests for resource in request.resource_spans for scope in resource.scope_spans]
    sent = Counter(span.span_id.hex() for scope in scopes for span in scope.spans)
    written = {span.span_id for each in demo.trajectories for span in each.spans}
    if demo.policy == "scripted":
        assert not sent  # that run had no endpoint
    else:
        assert written <= set(sent)
        assert set(sent.values()) == {1}


def test_it_says_that_the_policy_is_no_model(demo: Demo) -> None:
    said = {"scripted": "a script (prepared texts, no model)", "hf": "random weights"}
    assert said[demo.policy] in demo.output.splitlines()[0]


def test_no_process_is_left(demo: Demo) -> None:
    assert processes_of(demo.traces) == []


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    command = [sys.executable, RUN, "--out", tmp_path]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        for line in process.stdout:
            if "importing verl" in line:
                break
        assert len(processes_of(tmp_path / "traces")) > 1
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "nothing is left running" in errors
    deadline = time.monotonic() + 20
    while processes_of(tmp_path / "traces") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(tmp_path / "traces") == []


def test_no_trace_is_a_failure_in_plain_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = demo_run.Job(trainer="v1", policy="scripted", groups=1, steps=1, work=tmp_path, environment={})
    assert demo_run.picture(tmp_path / "traces", nothing) == 1
    assert "no trace was found" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--groups", "0"], ["--groups", "17"], ["--steps", "0"], ["--trainer", "v2"]])
def test_wrong_arguments_are_refused_at_once(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, RUN, *arguments], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.returncode == 2
    assert arguments[0] in done.stderr
    assert "Traceback" not in done.stderr


def test_earlier_traces_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "traces-host-1.jsonl").write_text("{}\n")
    done = subprocess.run(
        [sys.executable, RUN, "--out", tmp_path],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "earlier run" in done.stderr

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import verl_ray

from otel_rollout import semconv
from otel_rollout.otlp_json import decode_line
from otel_rollout.trace_view import SpanView, read_trajectories

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """What ran on a Ray cluster, and the files that were written."""
    directory = tmp_path_factory.mktemp("ray")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "RAY_"))}
    environment = clean | {"OTEL_ROLLOUT_FILE": str(directory / "traces"), "OTEL_ROLLOUT_RERAISE": "1"}
    done = subprocess.run(
        [sys.executable, verl_ray.__file__, str(directory)],
        env=environment, cwd=directory, capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), directory / "traces"


@pytest.fixture(scope="module")
def trajectories(cluster):
    return list(read_trajectories(cluster[1], on_problem=pytest.fail))


def steps(path):
    lines = [line for file in path.glob("*.jsonl") for line in file.read_bytes().splitlines()]
    spans = [SpanView.from_otlp(*parts) for line in lines for parts in decode_line(line)]
    return {span.attributes[semconv.STEP]: span for span in spans if span.name == semconv.STEP_SPAN}


def test_nothing_is_lost_when_a_worker_is_killed_a_second_later_and_at_a_normal_end(cluster, trajectories):
    ran, _ = cluster
    assert [step["statuses"] for step in ran["steps"]] == [["finished"] * verl_ray.PROMPTS] * 2
    expected = {
        (step["step"], uid, sample, n)
        for step in ran["steps"]
        for sample, uid in enumerate(step["uids"])
        for n in range(verl_ray.GROUP)
    }
    assert {(view.step, view.group_id, view.sample_index, view.rollout_n) for view in trajectories} == expected
    assert len(trajectories) == len(expected) == 32
    for view in trajectories:
        assert view.status == "completed"
        assert view.root.parent_id is None
        assert Counter(span.name for span in view.spans) == {
            "invoke_agent tool_agent": 1,
            "ToolAgentLoop.run": 1,
            "chat tiny": 3,
            "HermesToolParser.extract_tool_calls": 3,
            "execute_tool calculator": 2,
        }
        assert [turn.token_error for turn in view.turns] == [None] * 3
        assert view.turns[-1].prompt_ids[: len(view.turns[0].prompt_ids)] == view.turns[0].prompt_ids


def test_both_workers_and_the_driver_wrote_a_file_of_their_own(cluster, trajectories):
    ran, path = cluster
    by_process = Counter(view.resource["process.pid"] for view in trajectories)
    assert ran["driver"] not in by_process
    # Two workers share the first step; the second is the survivor's.
    assert sorted(by_process.values()) == [8, 24]
    files = {int(file.stem.rsplit("-", 1)[-1]) for file in path.glob("*.jsonl")}
    assert files == {ran["driver"], *by_process}


def test_each_trajectory_links_to_the_driver_s_span_of_its_step(cluster, trajectories):
    found = steps(cluster[1])
    assert {step: span.attributes[semconv.STEP_TRAJECTORIES] for step, span in found.items()} == {1: 16, 2: 16}
    for view in trajectories:
        (link,) = view.root.links
        assert (link.trace_id, link.span_id) == (found[view.step].trace_id, found[view.step].span_id)
        assert view.trace_id != link.trace_id

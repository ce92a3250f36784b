"""sampling.py: whole groups are kept or dropped, alike everywhere, and no random state is touched."""

import os
import random
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.context import Context, set_value
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from otel_rollout import configure, rollout_trace_attr, rollout_trace_op, sampling, semconv
from otel_rollout.sampling import RolloutGroupSampler, announce_cutoff, cutoff_for, group_hash, per_step


@pytest.fixture(autouse=True)
def fresh_steps(monkeypatch):
    monkeypatch.setattr(sampling, "_announced", sampling._Steps())


def keeps(sampler, group, step=1, validate=False, trace_id=1):
    identity = {semconv.GROUP_ID: group, semconv.STEP: step, semconv.VALIDATE: validate}
    context = set_value(semconv.CONTEXT_IDENTITY, identity, Context())
    return sampler.should_sample(context, trace_id, "invoke_agent x").decision is Decision.RECORD_AND_SAMPLE


GROUPS = [f"e/{step}/{index}" for step in range(4) for index in range(500)]


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.9])
def test_the_share_is_kept_and_two_samplers_agree_in_any_order(share):
    one, other = RolloutGroupSampler(str(share)), RolloutGroupSampler(share)
    shuffled = random.Random(3).sample(GROUPS, len(GROUPS))
    first = {group: keeps(one, group) for group in GROUPS}
    second = {group: keeps(other, group, trace_id=at) for at, group in enumerate(shuffled)}
    assert first == second
    assert abs(sum(first.values()) / len(GROUPS) - share) < 0.03


@pytest.mark.parametrize(
    ("argument", "kept"), [("1", True), ("1.0", True), (1, True), (None, True), ("0", False), (0, False)]
)
def test_all_and_none(argument, kept):
    assert {keeps(RolloutGroupSampler(argument), group) for group in GROUPS[:200]} == {kept}


def test_a_larger_share_keeps_what_a_smaller_one_kept():
    small, large = RolloutGroupSampler("0.1"), RolloutGroupSampler("0.3")
    assert all(keeps(large, group) for group in GROUPS if keeps(small, group))


def test_the_hash_is_the_same_in_every_process():
    script = "from otel_rollout.sampling import group_hash; print(group_hash('e/1/7'))"
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{group_hash('e/1/7')}\n"}
    assert 0 <= group_hash("e/1/7") < 2**64


@pytest.mark.parametrize("count", [0, 1, 4, 99, 100, 1000])
def test_n_per_step_is_exact_with_an_announced_cutoff(count):
    groups = GROUPS[:100]
    announce_cutoff(1, cutoff_for(count, groups * 8))
    workers = [RolloutGroupSampler(f"{count}/step") for _ in range(4)]
    kept = [{group for group in groups[at::2] if keeps(worker, group)} for at, worker in enumerate(workers[:2])]
    again = [
        {group for group in reversed(groups[at::2]) if keeps(worker, group)} for at, worker in enumerate(workers[2:])
    ]
    assert kept == again
    assert len(kept[0] | kept[1]) == min(count, 100)


def test_n_per_step_without_a_cutoff_keeps_the_first_n_and_all_of_each():
    sampler = RolloutGroupSampler("2/step")
    found = [(group, keeps(sampler, group)) for group in ["a", "b", "a", "c", "b", "c", "a"]]
    assert found == [("a", True), ("b", True), ("a", True), ("c", False), ("b", True), ("c", False), ("a", True)]


def test_steps_and_training_and_validation_are_counted_apart():
    sampler = RolloutGroupSampler("1/step")
    assert keeps(sampler, "a", step=1)
    assert not keeps(sampler, "b", step=1)
    assert keeps(sampler, "b", step=2)
    assert keeps(sampler, "c", step=1, validate=True)
    assert not keeps(sampler, "d", step=1, validate=True)
    announce_cutoff(3, 0)
    assert not keeps(sampler, "e", step=3)
    assert keeps(sampler, "e", step=3, validate=True)


def test_steps_long_past_are_forgotten():
    sampler = RolloutGroupSampler("1/step")
    for step in range(500):
        keeps(sampler, "a", step=step)
        announce_cutoff(step, 0, validate=True)
    assert len(sampling._announced._first) <= 16
    assert len(sampling._announced._cutoffs) <= 16


@pytest.mark.parametrize(
    ("argument", "count"), [("4/step", 4), (" 12 / step ", 12), ("0.5", None), (None, None), (1, None)]
)
def test_the_argument(argument, count):
    assert per_step(argument) == count


@pytest.mark.parametrize("argument", ["", "two", "-0.1", "1.5", "nan", "4/epoch", "-4/step", "/step", "0.5/step"])
def test_an_argument_that_is_not_understood_keeps_all_and_says_so(argument, caplog):
    sampler = RolloutGroupSampler(argument)
    assert all(keeps(sampler, group) for group in GROUPS[:50])
    (record,) = caplog.records
    assert repr(argument) in record.getMessage()
    assert "4/step" in record.getMessage()


def test_no_random_state_is_touched():
    before = random.getstate()
    sampler = RolloutGroupSampler("0.5")
    for group in GROUPS:
        keeps(sampler, group)
    configure(tracer_provider=TracerProvider(sampler=sampler, shutdown_on_exit=False))
    sampled = random.getstate()
    assert before == sampled


@pytest.mark.parametrize("sampled", [True, False])
def test_below_the_root_the_parent_decides(sampled):
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    parent = trace.set_span_in_context(
        NonRecordingSpan(SpanContext(1, 2, is_remote=False, trace_flags=flags)), Context()
    )
    for argument in ("0", "1"):
        decision = RolloutGroupSampler(argument).should_sample(parent, 1, "op").decision
        assert decision is (Decision.RECORD_AND_SAMPLE if sampled else Decision.DROP)


def test_spans_of_no_group_go_by_their_trace_or_are_kept_under_n_per_step():
    share, count = RolloutGroupSampler("0.5"), RolloutGroupSampler("1/step")
    decisions = [share.should_sample(Context(), number, "http").decision for number in range(400)]
    assert 140 < decisions.count(Decision.RECORD_AND_SAMPLE) < 260
    assert {count.should_sample(Context(), number, "http").decision for number in range(50)} == {
        Decision.RECORD_AND_SAMPLE
    }


def test_the_session_id_stands_for_the_group_where_the_context_is_lost():
    sampler = RolloutGroupSampler("0.5")
    for group in GROUPS[:100]:
        decision = sampler.should_sample(Context(), 1, "x", attributes={"session.id": group}).decision
        assert (decision is Decision.RECORD_AND_SAMPLE) is keeps(sampler, group)


def test_the_description():
    assert RolloutGroupSampler("4/step").get_description() == "RolloutGroupSampler{4/step}"


def test_whole_groups_through_the_public_names():
    memory, provider = (
        InMemorySpanExporter(),
        TracerProvider(sampler=RolloutGroupSampler("0.3"), shutdown_on_exit=False),
    )
    provider.add_span_processor(SimpleSpanProcessor(memory))
    configure("p", "e", tracer_provider=provider)

    @rollout_trace_op
    def op():
        return trace.get_current_span().is_recording()

    recording = {}
    for index in range(100):
        for number in range(4):
            with rollout_trace_attr(sample_index=index, step=1, rollout_n=number) as trajectory:
                assert trajectory.active
                assert op() is trajectory.recording
                trajectory.reward(1)
                recording.setdefault(index, set()).add(trajectory.recording)
    assert all(len(decided) == 1 for decided in recording.values())
    kept = {index for index, decided in recording.items() if decided == {True}}
    assert 15 <= len(kept) <= 45
    groups = [span.resource.attributes["rollout.sample_index"] for span in memory.get_finished_spans()]
    assert sorted(groups) == sorted([*kept] * 12)


SDK = """
from opentelemetry import trace
from opentelemetry.sdk._configuration import _OTelSDKConfigurator
_OTelSDKConfigurator().configure()
from otel_rollout import flush, rollout_trace_attr
print(type(trace.get_tracer_provider().sampler).__name__, trace.get_tracer_provider().sampler.get_description())
print(*[index for index in range(40) for n in range(2)
        if rollout_trace_attr(sample_index=index, step=1, rollout_n=n).__enter__().recording])
"""

OWN = """
from opentelemetry import trace
from otel_rollout import configure, rollout_trace_attr
configure(exporters=[])
print(type(trace.get_tracer_provider().sampler).__name__, trace.get_tracer_provider().sampler.get_description())
print(*[index for index in range(40) for n in range(2)
        if rollout_trace_attr(sample_index=index, step=1, rollout_n=n).__enter__().recording])
"""


def test_the_sdk_finds_it_by_its_entry_point_and_decides_like_configure():
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith("OTEL_")},
        "OTEL_TRACES_SAMPLER": "rollout_group",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
    }
    found = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environ, timeout=60, check=True
        ).stdout
        for script in (SDK, OWN)
    ]
    assert found[0] == found[1]
    name, kept = found[0].splitlines()
    assert name == "RolloutGroupSampler RolloutGroupSampler{0.25}"
    indexes = [int(index) for index in kept.split()]
    assert indexes == [index for index in sorted(set(indexes)) for _ in range(2)]
    assert 2 <= len(set(indexes)) <= 20

"""metrics.py: names, units, buckets and labels of CONVENTIONS.md, with exemplars, also of what is sampled out."""

import random

import pytest
from opentelemetry import metrics as metrics_api
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from otel_rollout import configure, current_trajectory, metrics, pipeline, rollout_trace_attr, rollout_trace_op

SECONDS = tuple(0.01 * 2**k for k in range(14))
AGENT = tuple(0.1 * 2**k for k in range(16))
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = tuple(4**k for k in range(14))
TRAJECTORY = {"rollout.framework", "gen_ai.agent.name", "rollout.validate"}

INSTRUMENTS = {
    "gen_ai.invoke_agent.duration": ("s", AGENT, TRAJECTORY),
    "gen_ai.invoke_agent.inference_calls": ("{inference_call}", COUNTS, TRAJECTORY),
    "gen_ai.invoke_agent.tool_calls": ("{tool_call}", COUNTS, TRAJECTORY),
    "gen_ai.client.inference.duration": ("s", SECONDS, TRAJECTORY | {"gen_ai.request.model"}),
    "gen_ai.execute_tool.duration": ("s", SECONDS, TRAJECTORY | {"gen_ai.tool.name"}),
    "gen_ai.client.inference.usage.input_tokens": ("{token}", None, TRAJECTORY | {"gen_ai.request.model"}),
    "gen_ai.client.inference.usage.output_tokens": ("{token}", None, TRAJECTORY | {"gen_ai.request.model"}),
    "rollout.trajectories": ("{trajectory}", None, TRAJECTORY | {"rollout.status"}),
    "rollout.trajectories.active": ("{trajectory}", None, TRAJECTORY),
    "rollout.trajectory.turns": ("{turn}", COUNTS, TRAJECTORY),
    "rollout.trajectory.tokens": ("{token}", TOKENS, TRAJECTORY),
    "rollout.reward": (
        "1",
        (-1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10),
        TRAJECTORY | {"rollout.reward_name"},
    ),
    "rollout.policy.lag": ("{version}", (0, 1, 2, 4, 8, 16, 32), TRAJECTORY),
    "rollout.token_mismatches": ("{mismatch}", None, TRAJECTORY | {"gen_ai.request.model"}),
    "rollout.time": ("s", AGENT, TRAJECTORY | {"rollout.phase"}),
}


class Meter:
    def __init__(self, sampler=None):
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.tracers = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        configure("p", "e", tracer_provider=self.tracers, meter_provider=self.provider, framework="verl")

    def read(self):
        """Metrics by name; the last reading."""
        data = self.reader.get_metrics_data()
        resources = [] if data is None else data.resource_metrics
        return {m.name: m for resource in resources for scope in resource.scope_metrics for m in scope.metrics}

    def points(self, name, *keys):
        return {tuple(point.attributes.get(key) for key in keys): point for point in self.read()[name].data.data_points}


@pytest.fixture
def meter(request):
    made = Meter(getattr(request, "param", None))
    yield made
    pipeline.shutdown()
    made.provider.shutdown()


@rollout_trace_op(kind="llm")
def generate(prompt_ids, model="qwen"):
    return {"token_ids": [7, 8, 9]}


@rollout_trace_op(kind="tool", name="search")
def search(query):
    if query == "bad":
        raise OSError("down")
    return query


@rollout_trace_op(kind="evaluator", name="format")
def check():
    return 0.25


def rollout(**given):
    with rollout_trace_attr(sample_index=5, step=9, rollout_n=1, name="math", **given) as trajectory:
        generate([1, 2])
        search("a")
        with pytest.raises(OSError, match="down"):
            search("bad")
        generate([1, 2, 7, 8, 9, 4])
        generate([5, 5])
        check()
        trajectory.reward(1)
        trajectory.tally.saw_policy(7)
    return trajectory


def test_names_units_buckets_and_labels(meter):
    rollout()
    found = meter.read()
    assert set(found) == set(INSTRUMENTS)
    for name, (unit, bounds, labels) in INSTRUMENTS.items():
        metric = found[name]
        assert metric.unit == unit, name
        for point in metric.data.data_points:
            if bounds is not None:
                assert point.explicit_bounds == pytest.approx(bounds), name
            assert set(point.attributes) - {"error.type"} == labels, name


def test_no_label_tells_one_step_sample_or_trajectory_from_another(meter):
    for index in range(20):
        with rollout_trace_attr(sample_index=index, step=index, rollout_n=index, group_id=f"g{index}", extra=index):
            generate([index])
            search(str(index))
    for metric in meter.read().values():
        keys = [tuple(sorted(point.attributes.items())) for point in metric.data.data_points]
        assert len(keys) <= 3, (metric.name, keys)


def test_values(meter):
    rollout()
    read = meter.points
    common = {"rollout.framework": "verl", "gen_ai.agent.name": "math", "rollout.validate": False}
    (active,) = read("rollout.trajectories.active").values()
    assert (active.value, dict(active.attributes)) == (0, common)
    assert read("rollout.trajectories", "rollout.status")["completed",].value == 1
    assert read("gen_ai.invoke_agent.inference_calls")[()].sum == 3
    assert read("gen_ai.invoke_agent.tool_calls")[()].sum == 2
    assert read("rollout.trajectory.turns")[()].sum == 3
    assert read("rollout.trajectory.tokens")[()].sum == 5
    tools = read("gen_ai.execute_tool.duration", "gen_ai.tool.name", "error.type")
    assert {key: point.count for key, point in tools.items()} == {("search", None): 1, ("search", "OSError"): 1}
    assert read("gen_ai.client.inference.usage.input_tokens", "gen_ai.request.model")["qwen",].value == 2 + 6 + 2
    assert read("gen_ai.client.inference.usage.output_tokens", "gen_ai.request.model")["qwen",].value == 9
    assert read("gen_ai.client.inference.duration", "gen_ai.request.model", "error.type")["qwen", None].count == 3
    rewards = read("rollout.reward", "rollout.reward_name")
    assert {key: point.sum for key, point in rewards.items()} == {("reward",): 1.0, ("format",): 0.25}
    assert read("rollout.policy.lag")[()].sum == 2
    assert read("rollout.token_mismatches")[()].value == 1
    phases = read("rollout.time", "rollout.phase")
    assert set(phases) == {("generate",), ("tool",), ("reward",), ("other",)}
    assert sum(point.sum for point in phases.values()) == pytest.approx(
        read("gen_ai.invoke_agent.duration")[()].sum, rel=1e-6
    )


def test_active_counts_while_trajectories_run(meter):
    with rollout_trace_attr(), rollout_trace_attr():
        assert sum(point.value for point in meter.read()["rollout.trajectories.active"].data.data_points) == 2
    assert sum(point.value for point in meter.read()["rollout.trajectories.active"].data.data_points) == 0


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        (lambda: None, "completed", None),
        (lambda: current_trajectory().reject("x"), "rejected", None),
        (lambda: (_ for _ in ()).throw(ValueError()), "error", "ValueError"),
    ],
)
def test_statuses(meter, end, status, error):
    try:
        with rollout_trace_attr(validate=True):
            end()
    except ValueError:
        pass
    assert set(meter.points("rollout.trajectories", "rollout.status", "rollout.validate")) == {(status, True)}
    assert set(meter.points("gen_ai.invoke_agent.duration", "error.type")) == {(error,)}


def test_exemplars_point_to_the_trajectory(meter):
    seen = []
    with rollout_trace_attr() as trajectory:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        generate([1])
        search("a")
        trajectory.reward(1)
    found = meter.read()
    for name in (
        "gen_ai.invoke_agent.duration",
        "gen_ai.client.inference.duration",
        "gen_ai.execute_tool.duration",
        "rollout.reward",
        "rollout.trajectory.turns",
        "rollout.time",
    ):
        exemplars = [exemplar for point in found[name].data.data_points for exemplar in point.exemplars]
        assert exemplars, name
        assert {exemplar.trace_id for exemplar in exemplars} == set(seen), name


@pytest.mark.parametrize("meter", [ALWAYS_OFF], indirect=True)
def test_what_is_sampled_out_is_measured_too(meter):
    trajectory = rollout()
    assert (trajectory.active, trajectory.recording) == (True, False)
    found = meter.read()
    assert set(found) == set(INSTRUMENTS)
    assert meter.points("rollout.trajectories", "rollout.status")["completed",].value == 1
    assert meter.points("rollout.trajectory.turns")[()].sum == 3
    assert meter.points("rollout.reward", "rollout.reward_name")["format",].sum == 0.25
    assert not [
        exemplar for metric in found.values() for point in metric.data.data_points for exemplar in point.exemplars
    ]


def test_nothing_is_measured_under_trace_false(meter):
    with rollout_trace_attr(trace=False) as trajectory:
        generate([1])
        search("a")
        trajectory.reward(1)
    assert meter.read() == {}


def test_ops_outside_any_trajectory_are_measured_without_its_labels(meter):
    generate([1])
    search("a")
    assert set(meter.points("gen_ai.execute_tool.duration", "gen_ai.tool.name", "gen_ai.agent.name")) == {
        ("search", None)
    }
    assert set(meter.points("gen_ai.client.inference.duration", "gen_ai.request.model")) == {("qwen",)}


def test_a_negative_reward_is_measured(meter, caplog):
    for value in (-1.0, -0.5, 1.0):
        with rollout_trace_attr() as trajectory:
            trajectory.reward(value)
    (point,) = meter.read()["rollout.reward"].data.data_points
    assert (point.count, point.sum, point.min) == (3, -0.5, -1.0)
    assert not caplog.records


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_spoils_no_sum_and_says_nothing_in_the_middle_of_a_rollout(meter, value, caplog):
    for reward in (1.0, value, value):
        with rollout_trace_attr() as trajectory:
            trajectory.reward(reward)
    (point,) = meter.read()["rollout.reward"].data.data_points
    assert (point.count, point.sum) == (1, 1.0)
    assert len(caplog.records) <= 1


def test_a_late_reward_is_measured(meter):
    with rollout_trace_attr() as trajectory:
        pass
    trajectory.reward(0.5, name="judge")
    trajectory.reward(0.75, name="judge")
    assert meter.points("rollout.reward", "rollout.reward_name")["judge",].count == 2


def test_the_global_meter_provider_is_used_where_the_host_has_one(monkeypatch):
    api = metrics_api._internal
    monkeypatch.setattr(api, "_PROXY_METER_PROVIDER", api._ProxyMeterProvider())
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics.bind(None)
    tracers = TracerProvider(shutdown_on_exit=False)
    configure(tracer_provider=tracers)
    with rollout_trace_attr():
        pass
    metrics_api.set_meter_provider(provider)
    try:
        with rollout_trace_attr():
            pass
        names = {m.name for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics}
        assert "rollout.trajectories" in names
    finally:
        provider.shutdown()
        metrics.bind(None)


def test_the_hosts_random_numbers_stay_what_they_were(meter):
    random.seed(7)
    before = random.getstate()
    for _ in range(30):
        rollout()
    meter.read()
    assert random.getstate() == before

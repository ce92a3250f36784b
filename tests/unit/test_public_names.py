"""The public names, and the names that other programs rely on."""

import importlib
import inspect
import re
from importlib.metadata import entry_points

import pytest

import otel_rollout
from otel_rollout import semconv


def test_the_package_exports_these_names_and_nothing_else():
    assert otel_rollout.__all__ == [
        "Trajectory",
        "__version__",
        "configure",
        "current_trajectory",
        "flush",
        "rollout_trace_attr",
        "rollout_trace_op",
    ]
    assert all(hasattr(otel_rollout, name) for name in otel_rollout.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", otel_rollout.__version__)


@pytest.mark.parametrize("name", [name for name in otel_rollout.__all__ if name != "__version__"])
def test_every_public_name_has_a_docstring_and_types(name):
    thing = getattr(otel_rollout, name)
    assert inspect.getdoc(thing)
    members = (
        [thing.__init__, *(m for n, m in vars(thing).items() if not n.startswith("_") and callable(m))]
        if inspect.isclass(thing)
        else [thing]
    )
    for member in members:
        signature = inspect.signature(member)
        parameters = [p for p in signature.parameters.values() if p.name != "self"]
        assert all(p.annotation is not p.empty for p in parameters), member
        assert signature.return_annotation is not signature.empty, member


def test_what_a_user_may_do_with_a_trajectory():
    public = {name for name in vars(otel_rollout.Trajectory) if not name.startswith("_")}
    assert {"reward", "reject", "set", "id", "active", "recording"} <= public


@pytest.mark.parametrize(
    ("group", "name", "target"),
    [
        ("verl.plugins", "otel_rollout", "otel_rollout.frameworks.verl"),
        ("opentelemetry_instrumentor", "verl", "otel_rollout.frameworks.verl_instrumentor:VerlInstrumentor"),
        ("opentelemetry_traces_exporter", "otlp_file", "otel_rollout.otlp_file:OTLPFileSpanExporter"),
        ("opentelemetry_traces_sampler", "rollout_group", "otel_rollout.sampling:RolloutGroupSampler"),
        ("opentelemetry_environment_variables", "otel_rollout", "otel_rollout.environment_variables"),
        ("console_scripts", "otel-rollout", "otel_rollout.cli:main"),
    ],
)
def test_the_entry_points(group, name, target):
    (point,) = [
        point for point in entry_points(group=group) if point.name == name and point.value.startswith("otel_rollout")
    ]
    assert point.value == target
    module, _, attribute = target.partition(":")
    assert not attribute or hasattr(importlib.import_module(module), attribute)


NAMES = {name: value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str)}
KEYS = {
    value for name, value in NAMES.items()
    if "." in value and not value.endswith(".") and not name.startswith(("METRIC_", "CONTEXT_")) and "/" not in value
}  # fmt: skip


def test_no_attribute_is_a_dotted_prefix_of_another():
    clashes = [(short, long) for short in KEYS for long in KEYS if long.startswith(f"{short}.")]
    events = {semconv.MISMATCH_EVENT, semconv.EVALUATION_EVENT}
    assert [pair for pair in clashes if pair[0] not in events] == []


def test_no_two_names_are_the_same_thing():
    assert len(KEYS) > 60
    twice = {value for value in KEYS if [*NAMES.values()].count(value) > 1}
    assert twice <= {value for name, value in NAMES.items() if name.startswith("METRIC_")}, twice


def test_names_are_standard_or_ours():
    roots = {value.split(".")[0] for value in KEYS}
    assert roots == {"code", "error", "gen_ai", "input", "openinference", "output", "rollout", "server", "session"}

import json
from importlib.metadata import entry_points

import pytest

import otel_rollout

ENTRY_POINTS = {
    ("console_scripts", "otel-rollout"),
    ("verl.plugins", "otel_rollout"),
    ("opentelemetry_instrumentor", "verl"),
    ("opentelemetry_traces_exporter", "otlp_file"),
    ("opentelemetry_traces_sampler", "rollout_group"),
    ("opentelemetry_environment_variables", "otel_rollout"),
}
NEEDS_AN_EXTRA = {("opentelemetry_instrumentor", "verl")}
LIST_ENTRY_POINTS = """
import json
from importlib.metadata import distribution
print(json.dumps([(entry.group, entry.name) for entry in distribution("otel-rollout").entry_points]))
"""
LOAD_ENTRY_POINT = """
from importlib.metadata import entry_points
(entry,) = entry_points(group={!r}, name={!r})
print(entry.load())
"""


def test_the_console_script_runs(installed):
    assert otel_rollout.__version__ in installed.run("otel-rollout", "--version")
    help_text = installed.run("otel-rollout", "--help")
    assert "Usage" in help_text
    assert "Traceback" not in help_text


def test_it_runs_as_installed(installed):
    code = "import otel_rollout as o; print(o.__version__, o.__file__)"
    version, file = installed.python(code).split()
    assert version == otel_rollout.__version__
    assert file.startswith(str(installed.folder))


def test_nothing_heavy_is_installed(installed):
    names = {package["name"].lower() for package in json.loads(installed.run("pip", "list", "--format=json"))}
    assert "otel-rollout" in names
    assert not names & {"verl", "torch", "numpy", "ray", "transformers", "grpcio", "mlflow", "pydantic"}


def test_all_entry_points_are_there(installed):
    assert {tuple(entry) for entry in json.loads(installed.python(LIST_ENTRY_POINTS))} == ENTRY_POINTS


@pytest.mark.parametrize(("group", "name"), sorted(ENTRY_POINTS - NEEDS_AN_EXTRA))
def test_an_entry_point_loads_without_any_extra(installed, group, name):
    assert installed.python(LOAD_ENTRY_POINT.format(group, name)).strip()


@pytest.mark.parametrize(("group", "name"), sorted(NEEDS_AN_EXTRA))
def test_the_others_load_with_their_extra(group, name):
    (entry,) = entry_points(group=group, name=name)
    assert entry.load()

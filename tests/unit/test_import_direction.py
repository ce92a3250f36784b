"""The import direction of DESIGN.md section 4, read from the sources."""

import ast
import sys
from pathlib import Path

import pytest

import otel_rollout

ROOT = Path(otel_rollout.__file__).parent

# A module imports modules of the lines above its own, at its top or inside functions.
LAYERS = [
    {"_version", "semconv", "guard", "ids", "idle", "environment_variables", "exporters"},
    {"content", "tokens", "otlp_json"},
    {"messages", "settings", "late", "metrics", "failure", "sampling", "otlp_file", "trace_view"},
    {"binding", "tally", "processor", "render", "doctor"},
    {"identity"},
    {"trajectory", "light_span"},
    {"call", "recorders"},
    {"generation", "streams"},
    {"op"},
    {"pipeline", "cli"},
    {"__init__"},
]
NEEDS_SDK = {"processor", "sampling", "otlp_file", "light_span"}
CORE = sorted(set.union(*LAYERS))


def name_of(path):
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")


MODULES = {name_of(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
FRAMEWORKS = sorted(name for name in MODULES if name.startswith("frameworks."))


def imports(tree, *, top_only=False):
    """Absolute names imported by a module, apart from those for type checkers."""
    checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
        if id(node) in checking:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(tree):
    """Modules of ours that a module imports; `__init__` for a public name."""
    found = set()
    for name in imports(tree):
        if name.partition(".")[0] == "otel_rollout":
            parts = name.split(".")[1:]
            while parts and ".".join(parts) not in MODULES and ".".join([*parts, "__init__"]) not in MODULES:
                parts.pop()
            module = ".".join(parts)
            found.add(module if module in MODULES else ".".join([*parts, "__init__"]))
    return found


def test_every_module_has_its_place():
    assert set(CORE) == {name for name in MODULES if not name.startswith("frameworks.")}


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_downwards_only(module):
    (at,) = [at for at, layer in enumerate(LAYERS) if module in layer]
    assert own(MODULES[module]) <= set().union(*LAYERS[:at])


def test_only_the_front_door_imports_the_pipeline():
    assert {name for name, tree in MODULES.items() if "pipeline" in own(tree)} <= {"__init__", "cli"}


def test_only_readers_import_the_reader():
    assert {name for name, tree in MODULES.items() if "trace_view" in own(tree)} <= {"cli", "render", "doctor"}


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_adapters_of_frameworks_know_nothing_of_pipelines_readers_and_each_other(module):
    found = own(MODULES[module])
    assert not found & {"pipeline", "processor", "cli", "doctor", "render", "trace_view", "otlp_file", "otlp_json"}
    framework = module.split(".")[1].removesuffix("_instrumentor")
    others = {name for name in found if name.startswith("frameworks.")}
    assert all(name.split(".")[1] == framework for name in others)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_what_is_imported_at_the_top_is_light(module):
    allowed = {"opentelemetry", "otel_rollout", "wrapt", *sys.stdlib_module_names}
    for name in imports(MODULES[module], top_only=True):
        if module in ("cli", "doctor", "render") and name.partition(".")[0] in ("click", "rich"):
            continue
        assert name.partition(".")[0] in allowed, name
        assert not name.startswith("opentelemetry.sdk") or module in NEEDS_SDK, name
        assert not name.startswith("opentelemetry.exporter"), name

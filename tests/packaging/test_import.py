import json
import statistics

import otel_rollout

PUBLIC = {
    "Trajectory",
    "__version__",
    "configure",
    "current_trajectory",
    "flush",
    "rollout_trace_attr",
    "rollout_trace_op",
}
HEAVY = (
    "click",
    "mlflow",
    "numpy",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "ray",
    "requests",
    "rich",
    "torch",
    "verl",
)
LOADED = "import json, sys; import {}; print(json.dumps(sorted(sys.modules)))"
TIMED = "import time; began = time.process_time(); import {}; print(time.process_time() - began)"


def seconds(installed, modules):
    return float(installed.python(TIMED.format(modules)))


def test_the_public_names_are_these():
    assert set(otel_rollout.__all__) == PUBLIC
    assert all(hasattr(otel_rollout, name) for name in PUBLIC)
    assert PUBLIC - {"__version__"} <= set(dir(otel_rollout))


def test_importing_it_imports_nothing_heavy(installed):
    loaded = json.loads(installed.python(LOADED.format("otel_rollout")))
    assert "otel_rollout" in loaded
    assert [name for name in loaded if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)] == []


def test_the_plugin_imports_nothing_heavy_without_verl(installed):
    loaded = json.loads(installed.python(LOADED.format("otel_rollout.frameworks.verl")))
    assert [name for name in loaded if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)] == []


def test_importing_it_takes_little_longer_than_the_api_of_opentelemetry(installed):
    reference = "asyncio, inspect, json, opentelemetry.trace"
    seconds(installed, f"{reference}, otel_rollout")  # compiled and in the page cache
    pairs = [(seconds(installed, reference), seconds(installed, f"{reference}, otel_rollout")) for _ in range(5)]
    without, with_it = (statistics.median(times) for times in zip(*pairs, strict=True))
    # 0.15 s is the promise; the time of the CPU, because others may use the machine too.
    assert with_it < max(0.15, 2.5 * without)

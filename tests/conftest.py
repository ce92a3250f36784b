"""Every test starts with a clean OpenTelemetry environment and leaves no binding behind."""

import os

import pytest
from opentelemetry import metrics, trace
from opentelemetry.util._once import Once

from otel_rollout import binding, guard, pipeline

_FOREIGN = ("OTEL_", "MLFLOW_", "WANDB_")


@pytest.fixture(autouse=True)
def clean_telemetry(monkeypatch):
    """No OTEL_* variable of the machine, no provider of an earlier test; internal errors are raised."""
    for name in [name for name in os.environ if name.startswith(_FOREIGN) and name != "OTEL_ROLLOUT_TEST_TOTALS"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(guard.RERAISE, "1")
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", None)
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER_SET_ONCE", Once())
    guard._said.clear()
    guard.failures.clear()
    binding.unbind()
    binding.configure_on_first_use(pipeline.configure)
    yield
    pipeline.flush(10)
    pipeline.shutdown()
    binding.unbind()


@pytest.fixture
def spans(clean_telemetry):
    """An InMemorySpanExporter behind the provider given to `configure`; call `otel_rollout.flush()` before reading."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    pipeline.configure(tracer_provider=provider)
    yield exporter
    pipeline.shutdown()
    provider.shutdown()

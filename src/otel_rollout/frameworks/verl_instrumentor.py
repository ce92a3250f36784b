"""``opentelemetry-instrument`` finds verl here: the hooks of the plugin, switched on without verl's configuration."""

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor


class VerlInstrumentor(BaseInstrumentor):
    """Traces verl's rollouts with the providers that ``opentelemetry-instrument`` set up; verl is not imported."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """The versions of verl that the hooks fit."""
        return ("verl >= 0.9, < 0.10",)

    def _instrument(self, **kwargs: Any) -> None:
        from otel_rollout import configure
        from otel_rollout.frameworks.verl import install
        from otel_rollout.frameworks.verl.switch import switch

        install()
        switch.requested = True
        if kwargs.get("tracer_provider") is not None or kwargs.get("meter_provider") is not None:
            configure(tracer_provider=kwargs.get("tracer_provider"), meter_provider=kwargs.get("meter_provider"))

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ARG002  the base class's signature
        from otel_rollout.frameworks.verl.switch import switch

        # The hooks stay in place and do nothing: methods that Ray shipped cannot be called back.
        switch.requested = switch.active = False

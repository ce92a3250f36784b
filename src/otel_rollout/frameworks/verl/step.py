"""The driver's side of a step: its span, which groups are sampled, and how both reach the workers."""

import functools
import inspect
import json
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_rollout import semconv
from otel_rollout.binding import current_binding
from otel_rollout.frameworks.verl.switch import trace_config, turn_on_from
from otel_rollout.guard import guard
from otel_rollout.identity import group_name, whole_number

HINT: Final = "otel_rollout_step"
"""Key under which the driver sends its step to the workers: a JSON text in the batch."""

_remote: ContextVar[Context | None] = ContextVar("otel_rollout_verl_step", default=None)
_carrier: Final = TraceContextTextMapPropagator()


def remote_context() -> Context | None:
    """A context whose span is the trainer's step, where the driver sent one."""
    return _remote.get()


def receive(hint: Any, meta: dict[str, Any]) -> None:
    """On a worker: take what the driver says of the step."""
    if not isinstance(hint, str):
        return
    said = json.loads(hint)
    if "traceparent" in said:
        _remote.set(_carrier.extract(said, context=Context()))
    if said.get("cutoff") is not None:
        from otel_rollout.sampling import announce_cutoff

        announce_cutoff(meta.get("global_steps"), int(said["cutoff"]), validate=bool(meta.get("validate", False)))


def _start(manager: Any, number: Any, validate: bool, groups: list[str], rows: int) -> tuple[Any, str] | None:
    if not turn_on_from(manager.config):
        return None
    binding = current_binding()
    if binding is None:
        return None
    attributes: dict[str, Any] = {
        semconv.SPAN_KIND: semconv.KIND_CHAIN,
        semconv.VALIDATE: validate,
        semconv.STEP_GROUPS: len(set(groups)) or rows,
        semconv.STEP_TRAJECTORIES: rows,
    }
    if isinstance(number, int) and number >= 0:
        attributes[semconv.STEP] = number
    span = binding.tracer.start_span(semconv.STEP_SPAN, context=Context(), attributes=attributes)
    said: dict[str, Any] = {}
    _carrier.inject(said, trace.set_span_in_context(span))
    said["cutoff"] = _cutoff(groups)
    return span, json.dumps(said)


def _cutoff(groups: list[str]) -> int | None:
    if os.environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() != "rollout_group" or not groups:
        return None
    from otel_rollout.sampling import cutoff_for, per_step

    try:
        count = per_step(os.environ.get("OTEL_TRACES_SAMPLER_ARG"))
    except ValueError:
        return None
    return None if count is None else cutoff_for(count, groups)


def wrap_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AgentLoopManager.generate_sequences`` (trainer v0) inside a span of its own."""
    inner = getattr(original, "__wrapped__", None)
    if inspect.iscoroutinefunction(inner):
        # verl's auto_await looks at the frame that calls it to know whether it is awaited: ours must not stand between.
        from verl.utils.ray_utils import auto_await

        return cast("Callable[..., Any]", auto_await(_in_step(inner)))
    return _in_step(original) if inspect.iscoroutinefunction(original) else original


def _in_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def generate_sequences(self: Any, prompts: Any) -> Any:
        started = None
        with guard("open the trainer's step"):
            columns, meta = prompts.non_tensor_batch, prompts.meta_info
            groups = _group_ids(self.config, columns, meta)
            started = _start(self, meta.get("global_steps"), bool(meta.get("validate", False)), groups, len(prompts))
            if started is not None:
                meta[HINT] = started[1]
        try:
            return await original(self, prompts)
        finally:
            _finish(started, prompts)

    return generate_sequences


def _group_ids(config: Any, columns: Any, meta: dict[str, Any]) -> list[str]:
    if "uid" in columns:
        return [str(uid) for uid in columns["uid"]]
    experiment, number = trace_config(config)["experiment_name"], meta.get("global_steps", -1)
    step = number if number >= 0 else None
    return [group_name(experiment, step, whole_number(index)) for index in columns.get("index", ())]


def _finish(started: Any, prompts: Any) -> None:
    if started is None:
        return
    with guard("close the trainer's step"):
        prompts.meta_info.pop(HINT, None)
        started[0].end()


def wrap_manager_tq(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AgentLoopManagerTQ.generate_sequences`` (trainer v1, the default): the step's span covers its dispatch."""

    def generate_sequences(self: Any, prompts: Any) -> Any:
        started = None
        with guard("open the trainer's step"):
            groups = [str(uid) for uid in prompts["uid"]]
            validate = bool(prompts["validate"]) if "validate" in prompts else False
            rollout = self.config.actor_rollout_ref.rollout
            rows = len(groups) * int(rollout.val_kwargs.n if validate else rollout.n)
            started = _start(self, int(prompts["global_steps"]), validate, groups, rows)
            if started is not None:
                from tensordict import NonTensorData

                prompts[HINT] = NonTensorData(started[1])
        try:
            return original(self, prompts)
        finally:
            if started is not None:
                with guard("close the trainer's step"):
                    prompts.pop(HINT, None)
                    started[0].end()

    return generate_sequences

"""Applies the hooks to verl's modules as they are imported, and says what is missing."""

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from wrapt import register_post_import_hook

from otel_rollout.frameworks.verl import decorators, step, tools, turns, worker
from otel_rollout.frameworks.verl.switch import switch, verl_version
from otel_rollout.guard import guard, warn_once

SUPPORTED: Final = "0.9.1 to 0.9.x"
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_METHODS: Final[dict[str, dict[str, Wrap]]] = {
    "verl.experimental.agent_loop.agent_loop": {
        "AgentLoopWorker.__init__": worker.wrap_init,
        "AgentLoopWorker.generate_sequences": worker.wrap_generate_sequences,
        "AgentLoopWorker._run_agent_loop": worker.wrap_run_agent_loop,
        "AgentLoopWorker._compute_score": worker.wrap_compute_score,
        "AgentLoopManager.generate_sequences": step.wrap_manager,
    },
    "verl.experimental.agent_loop.tool_agent_loop": {
        "ToolAgentLoop._handle_generating_state": turns.wrap_generating_state,
        "ToolAgentLoop._call_tool": tools.wrap_call_tool,
    },
    "verl.tools.function_tool": {"FunctionTool.call": tools.note_errors},
    "verl.trainer.ppo.v1.agent_loop_tq": {"AgentLoopManagerTQ.generate_sequences": step.wrap_manager_tq},
}
_DECORATORS: Final = "verl.utils.rollout_trace"

_installed = False
_applied: Final[list[str]] = []
_missing: Final[list[str]] = []


def install() -> None:
    """Hook verl in this process: now where it is imported already, else when it is. Safe to call again."""
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    register_post_import_hook(_hook_decorators, _DECORATORS)
    for name in _METHODS:
        register_post_import_hook(_hook_methods, name)


def _hook_decorators(module: ModuleType) -> None:
    with guard("hook verl's decorators"):
        lacking = [
            name
            for name in ("rollout_trace_op", "rollout_trace_attr", "RolloutTraceConfig")
            if not hasattr(module, name)
        ]
        if lacking:
            _say_missing(f"{_DECORATORS}.{name}" for name in lacking)
            return
        decorators.replace(module)
        _applied.append(_DECORATORS)
        for name in [name for name in sys.modules if name.startswith("verl.")]:
            decorators.redecorate(sys.modules[name], module)


def _hook_methods(module: ModuleType) -> None:
    for path, wrap in _METHODS[module.__name__].items():
        with guard(f"hook {path}"):
            owner_name, _, attribute = path.partition(".")
            owner = getattr(module, owner_name, None)
            original = None if owner is None else owner.__dict__.get(attribute)
            if owner is None or original is None:
                _say_missing([f"{module.__name__}.{path}"])
                continue
            # functools.wraps keeps module and qualname: Ray ships it by reference, and each worker uses its own hook.
            setattr(owner, attribute, functools.wraps(original)(wrap(original)))
            _applied.append(f"{module.__name__}.{path}")


def _say_missing(paths: Any) -> None:
    for path in paths:
        _missing.append(path)
        warn_once(
            f"verl:{path}",
            "verl %s has no %s: what it does is not traced (otel-rollout works with verl %s); rollouts go on",
            verl_version(), path, SUPPORTED,
        )  # fmt: skip


def status(*, load: bool = False) -> dict[str, Any]:
    """What is hooked in this process, for ``otel-rollout doctor``.

    Args:
        load: import the modules of verl that are hooked, to see whether every hook fits (slow: verl imports torch).

    Returns:
        ``active`` (rollouts are traced now), ``installed``, ``applied`` and ``missing`` hooks, ``verl_version``.
    """
    if load:
        for name in (_DECORATORS, *_METHODS):
            try:
                importlib.import_module(name)
            except ImportError as error:
                _missing.append(f"{name} ({error})")
    return {
        "active": switch.active,
        "installed": _installed,
        "applied": list(_applied),
        "missing": list(_missing),
        "verl_version": verl_version(),
    }

"""`rollout_trace_op`: one span around one function, whatever kind of function it is."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

from otel_rollout import streams
from otel_rollout.call import Op
from otel_rollout.generation import Generation
from otel_rollout.recorders import Agent, Chain, Evaluator, Recorder, Tool

F = TypeVar("F", bound=Callable[..., Any])
_KINDS: Final[dict[str, Recorder]] = {
    "chain": Chain(),
    "tool": Tool(),
    "llm": Generation(),
    "agent": Agent(),
    "evaluator": Evaluator(),
}


def instrument(
    function: F,
    recorder: Recorder,
    *,
    name: str | None = None,
    off: Callable[..., Any] | None = None,
    gate: Callable[[], bool] | None = None,
) -> F:
    """Wrap a function, method, classmethod or staticmethod so that `recorder` describes its calls.

    Raises:
        TypeError: `function` is a class or cannot be called.
    """
    if isinstance(function, classmethod | staticmethod):
        kind = type(function)
        return kind(instrument(function.__func__, recorder, name=name, off=off, gate=gate))
    if inspect.isclass(function) or not callable(function):
        raise TypeError(
            f"rollout_trace_op decorates functions and methods, not {function!r}: decorate the methods to be traced"
        )
    op = Op(function, recorder, name, off, gate)
    if inspect.isasyncgenfunction(function):
        wrapper = streams.async_generator(op)
    elif inspect.isgeneratorfunction(function):
        wrapper = streams.generator(op)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(op)
    else:
        wrapper = _plain(op)
    return functools.wraps(function)(wrapper)  # type: ignore[return-value]


def _plain(op: Op) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        call = op.begin(args, kwargs)
        if call is None:
            return op.off(*args, **kwargs)
        call.enter()
        try:
            result = op.function(*args, **kwargs)
        except BaseException as error:
            call.fail(error)
            raise
        call.succeed(result)
        return result

    return traced


def _coroutine(op: Op) -> Callable[..., Any]:
    async def traced(*args: Any, **kwargs: Any) -> Any:
        call = op.begin(args, kwargs)
        if call is None:
            return await op.off(*args, **kwargs)
        call.enter()
        try:
            result = await op.function(*args, **kwargs)
        except BaseException as error:
            call.fail(error)
            raise
        call.succeed(result)
        return result

    return traced


@overload
def rollout_trace_op(func: F, /) -> F: ...
@overload
def rollout_trace_op(func: None = None, /, *, name: str | None = None, kind: str = "chain") -> Callable[[F], F]: ...
def rollout_trace_op(func: Any = None, /, *, name: str | None = None, kind: str = "chain") -> Any:
    """Record each call of a function as a span of the trajectory that it runs in (a plain span outside any).

    Use bare or with arguments, on functions, methods, classmethods and staticmethods; sync, async, generator, async
    generator. The function's result, exceptions and cancellation reach the caller unchanged.

    Args:
        func: the function, when used bare.
        name: instead of the function's name: the span's, or the tool's, agent's or reward's for those kinds.
        kind: ``chain`` (any step, the default), ``tool``, ``llm``, ``agent`` or ``evaluator`` (a reward function).

    Raises:
        ValueError: an unknown kind.
        TypeError: the decorated object is a class or cannot be called.
    """
    recorder = _KINDS.get(str(kind).lower())
    if recorder is None:
        raise ValueError(f"rollout_trace_op(kind={kind!r}): unknown kind; use one of {', '.join(_KINDS)}")

    def decorate(function: F) -> F:
        return instrument(function, recorder, name=name)

    return decorate if func is None else decorate(func)

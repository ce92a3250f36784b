"""Every tool call of ToolAgentLoop, whatever its class, with the failures that the loop swallows."""

import functools
import inspect
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from otel_rollout import semconv
from otel_rollout.call import Call
from otel_rollout.content import text, to_json
from otel_rollout.failure import error_type, record_error
from otel_rollout.frameworks.verl.switch import switch
from otel_rollout.guard import guard
from otel_rollout.op import instrument
from otel_rollout.recorders import Tool, is_number

UNKNOWN_TOOL: Final = "unknown_tool"
INVALID_ARGUMENTS: Final = "invalid_json"
TOOL_ERROR: Final = "tool_error"
_SWALLOWED: Final = "Error executing tool "
_error: ContextVar[list[BaseException] | None] = ContextVar("otel_rollout_verl_tool_error", default=None)


class VerlTool(Tool):
    """``ToolAgentLoop._call_tool``: name, arguments, response, tool reward, and ``error.type`` where it failed."""

    background = True

    def begin(self, call: Call, args: tuple[Any, ...]) -> bool:
        """Look at the call before the loop does: is the tool known, are the arguments JSON?"""
        loop, asked, data = args[0], call.arguments["tool_call"], call.arguments.get("agent_data")
        known = getattr(data, "_active_tools", loop.tools)
        call.notes = (asked, known.get(asked.name), [])
        super().begin(call, args)
        identity = getattr(asked, "tool_call_id", None)
        if identity is not None:
            call.attributes[semconv.TOOL_CALL_ID] = identity
        tool = known.get(asked.name)
        if tool is not None:
            _watch(type(tool))
        _error.set(call.notes[2])
        return True

    def tool_name(self, call: Call) -> str:
        """The name that the model asked for; one that it made up is content."""
        if call.notes[1] is None and not call.binding.settings.content:
            return UNKNOWN_TOOL
        return text(str(call.notes[0].name), 128)

    def tool_label(self, call: Call) -> str:
        """The tool's name, or one name for all that do not exist."""
        return super().tool_label(call) if call.notes[1] is not None else UNKNOWN_TOOL

    def tool_arguments(self, call: Call) -> str:
        """The arguments as the model wrote them."""
        return text(str(call.notes[0].arguments))

    def failure(self, call: Call, result: Any) -> str | None:
        """What went wrong where ToolAgentLoop made a message of it."""
        asked, tool, errors = call.notes
        if tool is None:
            return UNKNOWN_TOOL
        if not _is_json(asked.arguments):
            return INVALID_ARGUMENTS
        said = getattr(result[0], "text", None) or ""
        if said.startswith(f"{_SWALLOWED}'{asked.name}': "):
            return error_type(errors[0]) if errors else TOOL_ERROR
        return None

    def end(self, call: Call, result: Any) -> None:
        """Write response, reward and failure."""
        response, reward, _ = result
        if call.binding.settings.content:
            call.span.set_attribute(
                semconv.TOOL_CALL_RESULT, _response_text(response, images=call.binding.settings.images)
            )
        if is_number(reward):
            call.span.set_attribute(semconv.TOOL_REWARD, float(reward))
        failed = self.failure(call, result)
        if failed is None:
            return
        errors = call.notes[2]
        if errors and failed == error_type(errors[0]):
            record_error(call.span, errors[0], message=call.binding.settings.content)
        else:
            from opentelemetry.trace import StatusCode

            call.span.set_attribute(semconv.ERROR_TYPE, failed)
            said = getattr(response, "text", None) if call.binding.settings.content else None
            call.span.set_status(StatusCode.ERROR, text(said or failed, 1024))


def _is_json(arguments: Any) -> bool:
    try:
        json.loads(arguments)
    except (TypeError, ValueError):
        return False
    return True


def _response_text(response: Any, *, images: bool) -> str:
    media = {name: value for name in ("image", "video") if (value := getattr(response, name, None)) is not None}
    if not media:
        return text(getattr(response, "text", None) or "")
    return to_json({"text": getattr(response, "text", None), **media}, images=images)


def wrap_call_tool(original: Callable[..., Any]) -> Callable[..., Any]:
    """``ToolAgentLoop._call_tool`` as an op."""
    return instrument(original, VerlTool(), gate=lambda: switch.active)


def remember(error: BaseException) -> None:
    """Keep what a tool raised for the call around it. A function of its own, so that a watched tool can be pickled."""
    errors = _error.get()
    if errors is not None:
        errors.append(error)


def note_errors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remember what a tool raises for the call around it: ToolAgentLoop keeps only its text."""

    @functools.wraps(original)
    async def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return await original(*args, **kwargs)
        except Exception as error:
            remember(error)
            raise

    noted.notes_errors = True  # type: ignore[attr-defined]
    return noted


@guard("watch a tool")
def _watch(kind: type) -> None:
    for name in ("create", "execute"):
        method = inspect.getattr_static(kind, name, None)
        if inspect.iscoroutinefunction(method) and not hasattr(method, "notes_errors"):
            setattr(kind, name, note_errors(method))

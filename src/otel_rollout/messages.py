"""Turns chat messages, as frameworks hold them, into the JSON schema of OpenTelemetry's GenAI conventions."""

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from otel_rollout.content import (
    DEFAULT_LIMIT,
    LEAST_LIMIT,
    MAX_NODES,
    Records,
    Whole,
    encode_clean,
    image_png,
    image_summary,
    is_a,
    plain,
    room_left,
    text,
    to_json,
)

MESSAGES_LIMIT: Final = 1024 * 1024
MAX_MESSAGES: Final = 1024
MAX_PARTS: Final = 256
PARSED_ARGUMENTS: Final = 64 * 1024  # characters; parsing more would be felt on the event loop
HASHED_DATA: Final = 2_000_000

_MESSAGE_NODES: Final = 12
_PART_NODES: Final = 8
_NAME: Final = 64
_UNREADABLE: Final = "… [cut: the messages could not be read]"
_MODALITIES: Final = ("image", "video", "audio")
_KEY: Final = 256
_PLAIN_KEYS: Final = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_KEPT: Final = ("name", "finish_reason")


def genai_messages(messages: Any, *, limit: int = MESSAGES_LIMIT, images: bool = False) -> list[dict[str, Any]]:
    """Return messages as ``[{"role": …, "parts": [{"type": "text", "content": …}, …]}]``, as plain copies.

    Never raises an ``Exception``: what is no message becomes one that holds it as text.

    Args:
        messages: OpenAI-style dicts, pydantic messages or other objects with ``role``, ``content``, ``tool_calls``,
            ``reasoning_content`` and ``tool_call_id``; a list, tuple or numpy array of them, a single one, or a
            string (one user message). Messages that already have ``parts`` stay as they are.
        limit: bytes of the JSON text of the result. The longest texts are cut first; of too many messages the middle
            ones are left out. What is cut says so.
        images: record the content of images (base64), not only size and hash.
    """
    shown = plain(_records(messages, limit, images), limit=limit, images=images)
    return shown if type(shown) is list else [_marker(_UNREADABLE)]


def messages_json(messages: Any, *, limit: int = MESSAGES_LIMIT, images: bool = False) -> str:
    """Return `genai_messages` as a JSON list of at most ``max(limit, LEAST_LIMIT)`` bytes."""
    quick = _quick_json(messages, limit)
    if quick is not None:
        return quick
    shown = to_json(_records(messages, limit, images), limit=limit, images=images)
    return shown if shown[0] == "[" else f"[{to_json(_marker(_UNREADABLE))}]"


def _quick_json(messages: Any, limit: int) -> str | None:
    """The JSON of what nearly all messages are, small dicts of plain text, without the walk; None for others."""
    if type(messages) is not list or len(messages) > MAX_PARTS:
        return None
    room, shown = limit // 6, []
    for message in messages:
        if type(message) is not dict or not message.keys() <= _PLAIN_KEYS:
            return None
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if type(role) is not str or type(content) is not str or (calls is not None and type(calls) is not list):
            return None
        room -= len(content) + 2 * _NAME
        if room < 0 or not content or len(role) > _NAME:
            return None
        if role in ("tool", "function"):
            identity = message.get("tool_call_id")
            if identity is not None and (type(identity) is not str or len(identity) > _KEY):
                return None
            parts = [_identified({"type": "tool_call_response"}, identity, response=content)]
        else:
            parts = [{"type": "text", "content": content}, *(_tool_call(call) for call in calls or ())]
            room = room_left(parts[1:], room, 5) if calls else room
        shown.append({"role": role, "parts": parts})
    return None if room < 0 else encode_clean(shown)


def assistant_message(
    content: str, tool_calls: Sequence[Any] = (), *, finish_reason: str | None = None
) -> dict[str, Any]:
    """Return what a policy answered as a message with parts.

    Args:
        content: the text without its tool calls.
        tool_calls: ``{"id"?, "name", "arguments"}`` or OpenAI's ``{"id"?, "function": {…}}``, as dicts or objects.
        finish_reason: why the generation stopped, if it is known.
    """
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls, "finish_reason": finish_reason}
    return genai_messages([message])[0]


def tool_definitions_json(schemas: Any, *, limit: int = DEFAULT_LIMIT) -> str:
    """Return OpenAI function schemas, dicts or models, as ``[{"type", "name", "description", "parameters"}]``."""
    shown = [_definition(schema, limit) for schema in _items(schemas)]
    quick = encode_clean(shown) if room_left(shown, limit // 6, 12) >= 0 else None
    return to_json(shown, limit=limit) if quick is None else quick


def _records(messages: Any, limit: int, images: bool) -> Records:
    """All messages, or as many of the first and the last as the limit has room for."""
    try:
        items = _items(messages)
        nodes = max(limit, LEAST_LIMIT) // (_MESSAGE_NODES * max(26, limit // MAX_NODES) + 200)
        most = max(2, min(nodes, MAX_MESSAGES))
        if len(items) > most:
            last = most // 2
            left_out = len(items) - most
            items = [*items[: most - last], _marker(f"… [cut: {left_out} messages]"), *items[-last:]]
        return Records((_message(item, images) for item in items), mark=_marker, nodes=_MESSAGE_NODES)
    except Exception:
        return Records([_as_text("unknown", messages)], mark=_marker, nodes=_MESSAGE_NODES)


def _items(value: Any) -> list[Any]:
    """The messages in whatever holds them; an iterator is left alone and counts as one odd message."""
    if value is None:
        return []
    if type(value) is str or type(value) is dict:
        return [value]
    if is_a(value, "builtins.list"):
        return list.__getitem__(value, slice(None))
    if is_a(value, "numpy.ndarray") and value.ndim and value.dtype.hasobject:
        return _items(value.tolist())
    if is_a(value, "builtins.tuple", "collections.deque") and not hasattr(type(value), "_fields"):
        return list(value)
    return [value]


def _get(value: Any, name: str) -> Any:
    """A dict's item or an object's attribute, None where there is none."""
    try:
        if type(value) is dict or is_a(value, "builtins.dict"):
            return dict.get(value, name)
        return getattr(value, name, None)
    except Exception:
        return None


def _string(value: Any) -> str | None:
    """A string, also one that is an enum's value, else None."""
    cls = type(value)
    if cls is str or value is None or cls is dict or cls is list:
        return value if cls is str else None
    if is_a(value, "enum.Enum"):
        value = _get(value, "value")
    return str.__getitem__(value, slice(None)) if is_a(value, "builtins.str") else None


def _short(value: Any) -> str | None:
    name = _string(value)
    return name if name is None else text(name[: 4 * _NAME], LEAST_LIMIT) if len(name) > _NAME else name


def _marker(what: str) -> dict[str, Any]:
    return {"role": "unknown", "parts": [{"type": "text", "content": what}]}


def _as_text(role: str, value: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": to_json(value)}]}


def _message(message: Any, images: bool) -> dict[str, Any]:
    try:
        string = _string(message)
        if string is not None:
            return {"role": "user", "parts": _parts([{"type": "text", "content": string}])}
        role, parts = _short(_get(message, "role")), _get(message, "parts")
        if role is None and all(_get(message, name) is None for name in ("content", "tool_calls", "parts")):
            return _as_text("unknown", message)
        found = parts if type(parts) in (list, Records) else _all_parts(message, role, images)
        return {"role": role or "unknown", "parts": _parts(found), **_kept(message)}
    except Exception:
        return _as_text("unknown", message)


def _kept(message: Any) -> dict[str, str]:
    kept = {name: _short(_get(message, name)) for name in _KEPT}
    return {name: value for name, value in kept.items() if value is not None}


def _parts(parts: list[Any]) -> Records:
    return Records(parts, mark=lambda what: {"type": "text", "content": what}, nodes=_PART_NODES)


def _all_parts(message: Any, role: str | None, images: bool) -> list[dict[str, Any]]:
    content = _get(message, "content")
    if role in ("tool", "function"):
        return [
            _identified(
                {"type": "tool_call_response"}, _get(message, "tool_call_id"), response=_response(content, images)
            )
        ]
    reasoning = _string(_get(message, "reasoning_content")) or _string(_get(message, "reasoning"))
    parts = [{"type": "reasoning", "content": reasoning}] if reasoning else []
    parts += _content_parts(content, images)
    return parts + _some(_get(message, "tool_calls"), _tool_call)


def _some(items: Any, show: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    found = _items(items)
    shown = [show(item) for item in found[:MAX_PARTS] if item is not None and _string(item) != ""]
    left_out = len(found) - MAX_PARTS
    return shown + ([{"type": "text", "content": f"… [cut: {left_out} parts]"}] if left_out > 0 else [])


def _content_parts(content: Any, images: bool) -> list[dict[str, Any]]:
    return _some(content, lambda part: _part(part, images))


def _response(content: Any, images: bool) -> Any:
    """What a tool answered: its text, or its parts if there is more than text; data of another shape stays as it is."""
    if not is_a(content, "builtins.list", "builtins.tuple"):
        return content
    if not all(_is_part(item) for item in _items(content)[:MAX_PARTS]):
        return content
    parts = _content_parts(content, images)
    only_text = [part["content"] for part in parts if part["type"] == "text"]
    return only_text[0] if len(only_text) == len(parts) == 1 else _parts(parts)


def _is_part(item: Any) -> bool:
    return is_a(item, "builtins.str", "PIL.Image.Image") or _string(_get(item, "type")) is not None


def _identified(part: dict[str, Any], identity: Any, **fields: Any) -> dict[str, Any]:
    return part | ({} if identity is None else {"id": identity}) | fields


def _tool_call(call: Any) -> dict[str, Any]:
    function = _get(call, "function")
    function = call if function is None else function
    identity = _get(call, "id") if _get(call, "id") is not None else _get(call, "tool_call_id")
    name = _string(_get(function, "name")) or "unknown"
    return _identified({"type": "tool_call"}, identity, name=name, arguments=_arguments(_get(function, "arguments")))


def _arguments(given: Any) -> Any:
    """The object that the arguments are or spell, else what the model wrote, so that its bad JSON can be read."""
    string = _string(given)
    if string is None or len(string) > PARSED_ARGUMENTS or not string.lstrip().startswith("{"):
        return given if string is None else string
    try:
        parsed = json.loads(string)
    except (ValueError, RecursionError):
        return string
    return parsed if type(parsed) is dict else string


def _part(part: Any, images: bool) -> dict[str, Any]:
    string = _string(part)
    if string is not None:
        return {"type": "text", "content": string}
    if is_a(part, "PIL.Image.Image"):
        return _image(part, images)
    kind = _string(_get(part, "type"))
    if kind in ("text", "input_text", "output_text", "refusal"):
        content = _string(_get(part, "refusal" if kind == "refusal" else "text"))
        return {"type": "text", "content": to_json(part) if content is None else content}
    if kind in ("thinking", "reasoning") and _string(_get(part, "thinking") or _get(part, "text")) is not None:
        return {"type": "reasoning", "content": _string(_get(part, "thinking") or _get(part, "text"))}
    for modality in _MODALITIES:
        if kind is not None and modality in kind:
            return _medium(part, kind, modality, images)
    return {"type": "text", "content": to_json(part)} if kind is None else _generic(part, kind)


def _generic(part: Any, kind: str) -> dict[str, Any]:
    """A part of a kind that the conventions do not name keeps its fields."""
    fields = plain(part)
    return fields if type(fields) is dict and fields.get("type") == kind else {"type": kind, "content": fields}


def _medium(part: Any, kind: str, modality: str, images: bool) -> dict[str, Any]:
    """An image, video or audio part of any of the spellings in use: ``image``, ``image_url``, ``input_audio`` ..."""
    spellings = (kind, modality, "url", "path", "source")
    held = next((_get(part, name) for name in spellings if _get(part, name) is not None), part)
    if is_a(held, "PIL.Image.Image"):
        return _image(held, images)
    url = _string(held) or _string(_get(held, "url"))
    if url is not None and url[:5] == "data:":
        head = url[5:_NAME].partition(",")[0]
        return _blob(modality, head.partition(";")[0], url[len(head) + 6 :], images)
    if url is not None:
        return {"type": "uri", "modality": modality, "uri": url}
    data = _string(_get(held, "data")) or _string(_get(held, "base64"))
    if data is not None:
        form = _short(_get(held, "format"))
        return _blob(modality, _short(_get(held, "media_type")) or (f"{modality}/{form}" if form else ""), data, images)
    return {"type": kind} if held is part else {"type": "blob", "modality": modality, "summary": held}


def _blob(modality: str, mime_type: str, data: str, images: bool) -> dict[str, Any]:
    """Base64 data by its length and 64 bits of the SHA-256 of its bytes."""
    summary: dict[str, Any] = {"bytes": len(data) * 3 // 4 - data[-2:].count("=")}
    if len(data) <= HASHED_DATA:
        try:
            summary["sha256"] = hashlib.sha256(base64.b64decode(data)).hexdigest()[:16]
        except ValueError:
            summary["error"] = "not base64"
    shown: dict[str, Any] = {"type": "blob", "modality": modality}
    if mime_type:
        shown["mime_type"] = mime_type
    shown["summary"] = summary
    return shown | {"content": Whole(data)} if images else shown


def _image(image: Any, images: bool) -> dict[str, Any]:
    """A PIL image; its hash is left to the walk, which bounds the work over all images."""
    shown: dict[str, Any] = {"type": "blob", "modality": "image"}
    if images:
        return shown | {"mime_type": "image/png", "summary": image_summary(image), "content": Whole(image_png(image))}
    form = _string(_get(image, "format"))
    return shown | {"mime_type": f"image/{form.lower()}" if form else "image/x-pixels", "summary": image}


def _definition(schema: Any, limit: int) -> dict[str, Any]:
    function = _get(schema, "function")
    function = schema if function is None else function
    shown: dict[str, Any] = {"type": "function"}
    for name in ("name", "description", "parameters"):
        value = _get(function, name)
        if value is not None:
            shown[name] = value if is_a(value, "builtins.dict") else _without_none(plain(value, limit=limit))
    return shown if "name" in shown else {"type": "function", "description": to_json(schema, limit=limit)}


def _without_none(value: Any) -> Any:
    """A model's fields that were not set are no part of its schema."""
    if type(value) is list:
        return [_without_none(item) for item in value]
    return (
        {key: _without_none(item) for key, item in value.items() if item is not None} if type(value) is dict else value
    )

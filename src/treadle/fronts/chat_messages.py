"""Reader of chat messages, for every front: converts a client's messages to the turns that a chat template renders.

Agents send back the messages they received, with the extra keys that their libraries put there. An unknown key changes
nothing about the prompt and is ignored. A key that would change the answer if it were honoured (tool calls, images) is
refused by name until it is served, and so is a known key of the wrong type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest, UnsupportedParameter

MAX_MESSAGES = 8192
MAX_PARTS = 8192

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant")
UNSERVED_ROLES = ("tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
REFUSAL_PART = "refusal"
CONTINUE_KEYS = ("prefix", "partial")

NEUTRAL_KEYS: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": ("",),
    "function_call": (),
    "audio": (),
    "images": ([],),
}
"""Keys of a message that are not served yet, with their neutral values (besides null)."""

NEUTRAL_PART_KEYS = ("image_url", "input_audio", "audio_url", "video_url", "file")
"""Keys of a text part that are not served yet: only null."""


def read_turns(messages: Any, param: str = "messages") -> list[dict[str, Any]]:
    """Convert messages to the form of templates: role, text or text parts, and only the optional keys that have a
    value.

    Raises InvalidRequest for a malformed message and UnsupportedParameter for one that needs an unserved feature; both
    name the message and its key.
    """
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequest(f"{param} is {_kind(messages)}: it must be an array of messages", param=param)
    if not messages:
        raise InvalidRequest(f"{param} is empty: give at least one message", param=param)
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"{param} has {len(messages)} messages: give at most {MAX_MESSAGES}", param=param)
    return [_turn(message, f"{param}[{i}]") for i, message in enumerate(messages)]


def asks_to_continue(messages: Sequence[Any]) -> bool:
    """Whether the last message is an assistant's that is marked as the beginning of the answer: `prefix: true`
    (Mistral, DeepSeek) or `partial: true` (Qwen, Kimi)."""
    last = messages[-1]
    return last.get("role") == "assistant" and any(last.get(key) is True for key in CONTINUE_KEYS)


def _turn(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{at} is {_kind(message)}: it must be an object with a role and content", param=at)
    role = _role(message, at)
    _refuse_unserved(message, NEUTRAL_KEYS, at)
    turn: dict[str, Any] = {"role": "system" if role in SYSTEM_ROLES else role, "content": _content(message, role, at)}
    for key in CONTINUE_KEYS:
        _checked(message, key, bool, "true or false", at)
    name = _checked(message, "name", str, "a string", at)
    if name is not None:
        turn["name"] = name
    reasoning = [_checked(message, key, str, "a string", at) for key in ("reasoning_content", "reasoning")]
    if any(reasoning):
        turn["reasoning_content"] = reasoning[0] or reasoning[1]
    return turn


def _role(message: Mapping[str, Any], at: str) -> str:
    param, expected = f"{at}.role", f"it must be one of {', '.join(ROLES)}"
    role = message.get("role")
    if role is None:
        raise InvalidRequest(f"{param} is missing: {expected}", param=param)
    if role in UNSERVED_ROLES:
        raise UnsupportedParameter(f"{param} '{role}' is not supported here yet: tools are not served", param=param)
    if role not in ROLES:
        text = f"'{role[:40]}'" if isinstance(role, str) else _kind(role)
        raise InvalidRequest(f"{param} is {text}: {expected}", param=param)
    return str(role)


def _refuse_unserved(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], at: str) -> None:
    for key, allowed in neutral.items():
        value = given.get(key)
        if value is not None and value not in allowed:
            param = f"{at}.{key}"
            raise UnsupportedParameter(f"{param} is not supported here: leave it out", param=param)


def _content(message: Mapping[str, Any], role: str, at: str) -> str | list[dict[str, str]]:
    """Return a string, or text parts: the template joins those. An assistant's turn may be empty."""
    content, param = message.get("content"), f"{at}.content"
    if isinstance(content, str):
        return content
    if not content and role == "assistant" and (content is None or isinstance(content, (list, tuple))):
        return ""
    if content is None:
        raise InvalidRequest(f"{param} is missing: give a string", param=param)
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(f"{param} is {_kind(content)}: it must be a string or an array of text parts", param=param)
    if not content:
        raise InvalidRequest(f"{param} is empty: give at least one part", param=param)
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{param} has {len(content)} parts: give at most {MAX_PARTS}", param=param)
    return [{"type": "text", "text": _part_text(part, role, f"{param}[{i}]")} for i, part in enumerate(content)]


def _part_text(part: Any, role: str, at: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{at} is {_kind(part)}: it must be an object with a type", param=at)
    kind, param = part.get("type"), f"{at}.type"
    if not isinstance(kind, str):
        raise InvalidRequest(f"{param} is {_kind(kind)}: it must be 'text'", param=param)
    refusal = kind == REFUSAL_PART and role == "assistant"
    if not refusal and kind not in TEXT_PARTS:
        raise UnsupportedParameter(f"{param} '{kind[:40]}' is not supported here: this model reads text", param=param)
    _refuse_unserved(part, dict.fromkeys(NEUTRAL_PART_KEYS, ()), at)
    key = REFUSAL_PART if refusal else "text"
    text = _checked(part, key, str, "a string", at)
    if text is None:
        raise InvalidRequest(f"{at}.{key} is missing: give a string", param=f"{at}.{key}")
    return str(text)


def _checked(given: Mapping[str, Any], key: str, kind: type, expected: str, at: str) -> Any:
    value = given.get(key)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{at}.{key} is {_kind(value)}: it must be {expected}", param=f"{at}.{key}")
    return value


def _kind(value: Any) -> str:
    names: dict[type, str] = {str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value)) or ("null" if value is None else _kind_of_many(value))


def _kind_of_many(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    return "an array" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"

"""Reader of chat messages, for every front: converts a client's messages to the turns that a chat template renders.

Agents send back the messages they received, with the extra keys that their libraries put there. An unknown key changes
nothing about the prompt and is ignored. A key that would change the answer if it were honoured (audio, files) is
refused by name until it is served, and so is a known key of the wrong type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest, UnsupportedParameter
from ..text.images import ImageSource
from ..text.images.prompt import IMAGE, image_part
from .field_checks import checked, kind_of, quoted, require_array, require_type
from .media.parts import URL_PARTS, read_url_part

MAX_MESSAGES = 8192
MAX_PARTS = 8192

SYSTEM_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "function")
ROLES = (*SYSTEM_ROLES, "user", "assistant", *TOOL_ROLES)
MAX_CALLS = 1024
MAY_BE_EMPTY = ("assistant", *TOOL_ROLES)
WITH_IMAGES = ("user", *TOOL_ROLES)
TEXT_PARTS = ("text", "input_text", "output_text")
REFUSAL_PART = "refusal"
CONTINUE_KEYS = ("prefix", "partial")

NEUTRAL_KEYS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "images": ([],),
}
"""Keys of a message that are not served yet, with their neutral values (besides null)."""

NEUTRAL_PART_KEYS = ("image_url", "input_audio", "audio_url", "video_url", "file")
"""Keys of a text part that are not served yet: only null."""


def read_turns(messages: Any, param: str = "messages") -> list[dict[str, Any]]:
    """Convert messages to the form of templates: role, text or parts of text and images, and only the optional keys
    that have a value.

    Raises InvalidRequest for a malformed message and UnsupportedParameter for one that needs an unserved feature; both
    name the message and its key.
    """
    require_array(messages, param, "message", MAX_MESSAGES)
    return [read_turn(message, f"{param}[{i}]") for i, message in enumerate(messages)]


def asks_to_continue(messages: Sequence[Any]) -> bool:
    """Whether the last message is an assistant's that is marked as the beginning of the answer: `prefix: true`
    (Mistral, DeepSeek) or `partial: true` (Qwen, Kimi)."""
    last = messages[-1]
    return last.get("role") == "assistant" and any(last.get(key) is True for key in CONTINUE_KEYS)


def read_turn(message: Any, at: str) -> dict[str, Any]:
    """Convert the message at `at`. Raises as `read_turns` does."""
    require_type(message, Mapping, "an object with a role and content", at)
    role = _role(message, at)
    _refuse_unserved(message, NEUTRAL_KEYS, at)
    turn: dict[str, Any] = {"role": _ROLE_OF.get(role, role), "content": _content(message, role, at)}
    for key in CONTINUE_KEYS:
        checked(message, key, bool, "true or false", at)
    turn |= _named(message, role, at)
    reasoning = [checked(message, key, str, "a string", at) for key in ("reasoning_content", "reasoning")]
    if any(reasoning):
        turn["reasoning_content"] = reasoning[0] or reasoning[1]
    calls = _calls(message, at)
    if calls and role != "assistant":
        raise InvalidRequest(f"{at} has calls: only a message of the assistant may", param=at)
    return {**turn, "tool_calls": calls} if calls else turn


_ROLE_OF = {"developer": "system", "function": "tool"}


def _named(message: Mapping[str, Any], role: str, at: str) -> dict[str, str]:
    """Return the name, and for a result the id of its call: a function's name is the id of its result."""
    keys = ("name", "tool_call_id") if role in TOOL_ROLES else ("name",)
    given = {key: checked(message, key, str, "a string", at) for key in keys}
    found = {key: value for key, value in given.items() if value is not None and (value or key == "name")}
    if role == "function" and "name" in found:
        found.setdefault("tool_call_id", found["name"])
    return found


def _calls(message: Mapping[str, Any], at: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message: of `tool_calls`, or the one of `function_call`."""
    calls = checked(message, "tool_calls", list, "an array of calls", at) or []
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(
            f"{at}.tool_calls has {len(calls)} calls: give at most {MAX_CALLS}", param=f"{at}.tool_calls"
        )
    found = [_call(call, i, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    older = checked(message, "function_call", Mapping, "an object", at)
    if older is None or found:
        return found
    return [{"id": str(older.get("name")), "type": "function", "function": _function(older, f"{at}.function_call")}]


def _call(call: Any, index: int, at: str) -> dict[str, Any]:
    require_type(call, Mapping, "an object with an id and a function", at)
    if call.get("type", "function") != "function":
        raise UnsupportedParameter(f"{at}.type is not supported here: only 'function' is", param=f"{at}.type")
    function = call.get("function")
    require_type(function, Mapping, "an object", f"{at}.function")
    call_id = checked(call, "id", str, "a string", at) or f"call_{index}"
    return {"id": call_id, "type": "function", "function": _function(function, f"{at}.function")}


def _function(function: Mapping[str, Any], at: str) -> dict[str, str]:
    """Return a call's function. Its arguments are a text, as the API has them, or an object, as some clients send."""
    name = checked(function, "name", str, "a string", at)
    if not name:
        raise InvalidRequest(f"{at}.name is missing: give the function's name", param=f"{at}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is not None and not isinstance(arguments, str):
        raise InvalidRequest(
            f"{at}.arguments is {kind_of(arguments)}: it must be JSON as a string", param=f"{at}.arguments"
        )
    return {"name": name, "arguments": arguments or ""}


def _role(message: Mapping[str, Any], at: str) -> str:
    param, expected = f"{at}.role", f"it must be one of {', '.join(ROLES)}"
    role = message.get("role")
    if role is None:
        raise InvalidRequest(f"{param} is missing: {expected}", param=param)
    if role not in ROLES:
        raise InvalidRequest(f"{param} is {quoted(role)}: {expected}", param=param)
    return str(role)


def _refuse_unserved(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], at: str) -> None:
    for key, allowed in neutral.items():
        value = given.get(key)
        if value is not None and value not in allowed:
            param = f"{at}.{key}"
            raise UnsupportedParameter(f"{param} is not supported here: leave it out", param=param)


def _content(message: Mapping[str, Any], role: str, at: str) -> str | list[dict[str, Any]]:
    """Return a string, or parts: the template joins those. An assistant's turn and a result may be empty."""
    content, param = message.get("content"), f"{at}.content"
    if isinstance(content, str):
        return content
    if not content and role in MAY_BE_EMPTY and (content is None or isinstance(content, (list, tuple))):
        return ""
    if content is None:
        raise InvalidRequest(f"{param} is missing: give a string", param=param)
    require_array(content, param, "part", MAX_PARTS, expected="a string or an array of parts")
    return [_part(part, role, f"{param}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, role: str, at: str) -> dict[str, Any]:
    require_type(part, Mapping, "an object with a type", at)
    kind, param = part.get("type"), f"{at}.type"
    require_type(kind, str, "'text'", param)
    if isinstance(part.get(IMAGE), ImageSource):  # read by a dialect of its own
        return image_part(part[IMAGE])
    if kind in URL_PARTS and role in WITH_IMAGES:
        return image_part(read_url_part(part, at))
    return {"type": "text", "text": _part_text(part, kind, role, at)}


def _part_text(part: Mapping[str, Any], kind: str, role: str, at: str) -> str:
    param = f"{at}.type"
    refusal = kind == REFUSAL_PART and role == "assistant"
    if kind in URL_PARTS:
        raise UnsupportedParameter(
            f"{param} '{kind}' is not supported in a message of the {role}: images are in those of the user",
            param=param,
        )
    if not refusal and kind not in TEXT_PARTS:
        raise UnsupportedParameter(f"{param} '{kind[:40]}' is not supported here: send text or images", param=param)
    _refuse_unserved(part, dict.fromkeys(NEUTRAL_PART_KEYS, ()), at)
    key = REFUSAL_PART if refusal else "text"
    text = checked(part, key, str, "a string", at)
    if text is None:
        raise InvalidRequest(f"{at}.{key} is missing: give a string", param=f"{at}.{key}")
    return str(text)

"""Reader of input items: checks them and brings them into the form in which they are stored and listed.

Agents send back the items that they received, with more keys than are known here. Unknown keys are ignored, as in chat
messages. Items of unknown kinds are refused by name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ....errors import InvalidRequest, UnsupportedParameter
from ...chat_messages import MAX_PARTS
from ...field_checks import checked, kind_of, require_array, require_type
from ...media.parts import URL_PARTS, read_url_part
from .opaque import SUMMARY, unwrap

Item = dict[str, Any]

MAX_ITEMS = 8192
ROLES = ("user", "assistant", "system", "developer")
REFERENCE, TRIGGER, MORE_TOOLS = "item_reference", "compaction_trigger", "additional_tools"
SKIPPED = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_list_tools", "tool_search_call", "tool_search_output"),
)
"""Records of tools that another server ran. Their results are in that server's answers; the prompt leaves them out."""
LOCAL_CALLS = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}
"""Calls of tools that models of OpenAI know without a definition, with the key that has their arguments."""
TEXT_TYPES = ("input_text", "output_text", "text")
IMAGE_TYPE = "input_image"
RESULT_ROLE = "tool"
WITH_IMAGES = ("user", RESULT_ROLE)


def new_id(prefix: str) -> str:
    """Return a new id such as "msg_5f…"."""
    return f"{prefix}_{secrets.token_hex(24)}"


def read_input(value: Any, param: str = "input") -> list[Item]:
    """Return the items of `input`: a text is one message of the user. Raises InvalidRequest with the place, and
    UnsupportedParameter for what is not served."""
    if value is None:
        return []
    if isinstance(value, str):
        return [_message({"role": "user", "content": value}, param)]
    require_array(value, param, "item", MAX_ITEMS, expected="a string or an array of items", may_be_empty=True)
    return [read_item(item, f"{param}[{i}]") for i, item in enumerate(value)]


def read_item(item: Any, at: str) -> Item:
    """Return one item. Raises as `read_input` does."""
    require_type(item, Mapping, "an object with a type", at)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else REFERENCE if set(item) <= {"id", "type"} and item else None
    if kind in SKIPPED:
        return {**item, "id": _id(item, "item", at)}
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is not None:
        return reader(item, at)
    place = f"{at}.type"
    if isinstance(kind, str):
        raise UnsupportedParameter(f"{place} '{kind[:40]}' is not supported here: leave the item out", param=place)
    raise InvalidRequest(f"{place} is {kind_of(kind)}: it must name a kind of item, such as 'message'", param=place)


def _id(item: Mapping[str, Any], prefix: str, at: str) -> str:
    return checked(item, "id", str, "a string", at) or new_id(prefix)


def _text(item: Mapping[str, Any], key: str, at: str, *, empty: bool = True) -> str:
    """Return a required string."""
    text = checked(item, key, str, "a string", at)
    if text is None or not (text or empty):
        raise InvalidRequest(f"{at}.{key} is missing: give a string", param=f"{at}.{key}")
    return str(text)


# Messages -------------------------------------------------------------------------------------------------------


def _message(item: Mapping[str, Any], at: str) -> Item:
    role, place = item.get("role"), f"{at}.role"
    if role not in ROLES:
        given = f"'{role[:40]}'" if isinstance(role, str) else "missing" if role is None else kind_of(role)
        raise InvalidRequest(f"{place} is {given}: it must be one of {', '.join(ROLES)}", param=place)
    message: Item = {"id": _id(item, "msg", at), "type": "message", "status": "completed", "role": role}
    message["content"] = _content(item.get("content"), role, f"{at}.content")
    phase = checked(item, "phase", str, "a string", at)
    return message | ({"phase": phase} if phase is not None else {})


def _content(content: Any, role: str, at: str) -> list[Item]:
    """Return the parts of a message of `role`, or of a tool's result."""
    of_assistant = role == "assistant"
    if isinstance(content, str):
        return [_part(content, of_assistant)]
    if content is None:
        raise InvalidRequest(f"{at} is missing: give a string, or an array of parts", param=at)
    expected = "a string or an array of parts"
    require_array(content, at, "part", MAX_PARTS, expected=expected, may_be_empty=of_assistant)
    return [_read_part(part, role, f"{at}[{i}]") for i, part in enumerate(content)]


def _part(text: str, of_assistant: bool) -> Item:
    return {"type": "output_text", "text": text, "annotations": []} if of_assistant else _input_text(text)


def _input_text(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _read_part(part: Any, role: str, at: str) -> Item:
    require_type(part, Mapping, "an object with a type", at)
    kind, place, of_assistant = part.get("type"), f"{at}.type", role == "assistant"
    if kind in TEXT_TYPES:
        return _part(_text(part, "text", at), of_assistant)
    if kind in URL_PARTS:
        return _image(part, role, at)
    if kind == "refusal" and of_assistant:
        return {"type": "refusal", "refusal": _text(part, "refusal", at)}
    if isinstance(kind, str):
        raise UnsupportedParameter(f"{place} '{kind[:40]}' is not supported here: send text or images", param=place)
    raise InvalidRequest(f"{place} is {kind_of(kind)}: it must be 'input_text' or 'output_text'", param=place)


def _image(part: Mapping[str, Any], role: str, at: str) -> Item:
    """Return an image as it is stored and listed: with its URL, and its detail."""
    if role not in WITH_IMAGES:
        raise UnsupportedParameter(
            f"{at}.type '{IMAGE_TYPE}' is not supported in a message of the {role}: images are in those of the user",
            param=f"{at}.type",
        )
    read_url_part(part, at)
    given = part["image_url"]
    url, detail = (given["url"], given.get("detail")) if isinstance(given, Mapping) else (given, None)
    return {"type": IMAGE_TYPE, "image_url": url, "detail": detail or part.get("detail") or "auto"}


# Calls and their results ----------------------------------------------------------------------------------------


def _call(item: Mapping[str, Any], at: str) -> Item:
    arguments = item.get("arguments")
    if isinstance(arguments, Mapping):
        item = {**item, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**_called(item, "fc", at), "arguments": _text(item, "arguments", at)}


def _custom_call(item: Mapping[str, Any], at: str) -> Item:
    return {**_called(item, "ctc", at), "input": _text(item, "input", at)}


def _called(item: Mapping[str, Any], prefix: str, at: str) -> Item:
    namespace = checked(item, "namespace", str, "a string", at)
    return {
        "id": _id(item, prefix, at),
        "type": item["type"],
        "status": checked(item, "status", str, "a string", at) or "completed",
        "call_id": _text(item, "call_id", at, empty=False),
        "name": _text(item, "name", at, empty=False),
        **({"namespace": namespace} if namespace else {}),
    }


def _result(item: Mapping[str, Any], at: str) -> Item:
    output, place = item.get("output"), f"{at}.output"
    if output is None:
        raise InvalidRequest(f"{place} is missing: give a string, or an array of parts", param=place)
    if not isinstance(output, str):
        output = _content(output, RESULT_ROLE, place) if output != [] else []
    result: Item = {"id": _id(item, "fco", at), "type": item["type"], "status": "completed"}
    return {**result, "call_id": _text(item, "call_id", at, empty=False), "output": output}


def _local_call(item: Mapping[str, Any], at: str) -> Item:
    key = LOCAL_CALLS[item["type"]]
    given = checked(item, key, Mapping, "an object", at)
    if given is None:
        raise InvalidRequest(f"{at}.{key} is missing: give an object", param=f"{at}.{key}")
    item_id = _id(item, "lsc", at)
    call_id = checked(item, "call_id", str, "a string", at) or item_id
    return {"status": "completed", **item, "id": item_id, "call_id": call_id, key: dict(given)}


def _local_result(item: Mapping[str, Any], at: str) -> Item:
    """Return the result of a local call, whose `id` is that of its call where it has no `call_id`."""
    item_id = _id(item, "lsco", at)
    call_id = checked(item, "call_id", str, "a string", at) or item_id
    return {"status": "completed", **item, "id": item_id, "call_id": call_id}


# Reasoning, references, compaction ------------------------------------------------------------------------------


def _reasoning(item: Mapping[str, Any], at: str) -> Item:
    found: Item = {"id": _id(item, "rs", at), "type": "reasoning", "summary": _texts(item, "summary", at)}
    if content := _texts(item, "content", at):
        found["content"] = content
    encrypted = checked(item, "encrypted_content", str, "a string", at)
    return found | ({"encrypted_content": encrypted} if encrypted else {})


def _texts(item: Mapping[str, Any], key: str, at: str) -> list[Item]:
    kind = "summary_text" if key == "summary" else "reasoning_text"
    found = []
    for i, part in enumerate(checked(item, key, list, "an array of texts", at) or []):
        place = f"{at}.{key}[{i}]"
        require_type(part, Mapping, "an object with a text", place)
        found.append({"type": kind, "text": _text(part, "text", place)})
    return found


def _reference(item: Mapping[str, Any], at: str) -> Item:
    return {"type": REFERENCE, "id": _text(item, "id", at, empty=False)}


def _compaction(item: Mapping[str, Any], at: str) -> Item:
    encrypted = _text(item, "encrypted_content", at)
    if unwrap(SUMMARY, encrypted) is None:
        raise InvalidRequest(
            f"{at}.encrypted_content was not made by this server, which can't read it: send the conversation itself",
            param=f"{at}.encrypted_content",
        )
    return {"id": _id(item, "cmp", at), "type": "compaction", "encrypted_content": encrypted}


def _trigger(item: Mapping[str, Any], at: str) -> Item:
    return {"id": _id(item, "cmpt", at), "type": TRIGGER}


def _more_tools(item: Mapping[str, Any], at: str) -> Item:
    tools = checked(item, "tools", list, "an array of tools", at) or []
    return {"id": _id(item, "at", at), "type": MORE_TOOLS, "tools": tools}


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "function_call": _call,
    "custom_tool_call": _custom_call,
    "function_call_output": _result,
    "custom_tool_call_output": _result,
    "reasoning": _reasoning,
    REFERENCE: _reference,
    "compaction": _compaction,
    "compaction_summary": _compaction,
    TRIGGER: _trigger,
    MORE_TOOLS: _more_tools,
    **dict.fromkeys(LOCAL_CALLS, _local_call),
    **{f"{kind}_output": _local_result for kind in LOCAL_CALLS},
}

"""Reader of the fields that ask for structured output, in the spellings of OpenAI, vLLM, llama.cpp and Ollama."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import InvalidRequest, UnsupportedParameter
from .answer_options import OutputGrammar
from .field_checks import checked, kind_of, quoted, require_type
from .structural_tags import KIND as STRUCTURAL_TAG

JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, LARK = "json_object", "json_schema", "regex", "choice", "lark"
VLLM_KINDS = {
    "json": JSON_SCHEMA,
    "regex": REGEX,
    "choice": CHOICE,
    "grammar": LARK,
    "json_object": JSON_OBJECT,
    "structural_tag": STRUCTURAL_TAG,
}
GUIDED = {f"guided_{name}": VLLM_KINDS[name] for name in ("json", "regex", "choice", "grammar")}
FIELDS = ("response_format", "structured_outputs", *GUIDED, "json_schema", "format")


def read_output(given: Mapping[str, Any], *, close_at_limit: bool = False) -> OutputGrammar | None:
    """Return the grammar that a request asks for; None if it asks for none. Raises InvalidRequest with the place, also
    for more than one."""
    found = list(_found(given))
    if len(found) > 1:
        first, second = found[0][2].partition(".")[0], found[1][2].partition(".")[0]
        raise InvalidRequest(f"{first} and {second} both ask for a format of the answer: give one", param=second)
    return OutputGrammar(*found[0], close_at_limit=close_at_limit) if found else None


def read_format(value: Any, param: str, *, close_at_limit: bool = False) -> OutputGrammar | None:
    """Return the grammar of a format object, `{"type": ...}`, with its schema beside the type or in `json_schema`; None
    for text. Raises InvalidRequest with the place."""
    found = None if value is None else _response_format(value, param, place="schema")
    return None if found is None else OutputGrammar(*found, close_at_limit=close_at_limit)


Found = tuple[str, Any, str]
"""Kind, specification and place of a grammar."""


def _found(given: Mapping[str, Any]) -> Iterator[Found]:
    readers: dict[str, Callable[[Any, str], Found | None]] = {
        "response_format": _response_format,
        "structured_outputs": _structured_outputs,
        **{name: _of_kind(kind) for name, kind in GUIDED.items()},
        "json_schema": _of_kind(JSON_SCHEMA),
        "format": _ollama_format,
    }
    for name, reader in readers.items():
        value = given.get(name)
        found = None if value is None else reader(value, name)
        if found is not None:
            yield found


def _of_kind(kind: str) -> Callable[[Any, str], Found]:
    return lambda value, at: (kind, _spec(kind, value, at), at)


def _response_format(value: Any, at: str, place: str = "json_schema.schema") -> Found | None:
    """Return the grammar of a format object. `place` is where a schema belongs that it lacks."""
    require_type(value, Mapping, "an object with a type", at)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == JSON_SCHEMA:
        return _openai_schema(value, at, place)
    if kind == STRUCTURAL_TAG:
        return STRUCTURAL_TAG, json.dumps(value), at
    if kind == JSON_OBJECT:
        if value.get("schema") is None:
            return JSON_OBJECT, None, at
        return JSON_SCHEMA, _spec(JSON_SCHEMA, value["schema"], f"{at}.schema"), f"{at}.schema"
    raise UnsupportedParameter(
        f"{at}.type {quoted(kind)} is not supported here: use 'text', 'json_object' or 'json_schema'",
        param=f"{at}.type",
    )


def _openai_schema(value: Mapping[str, Any], at: str, belongs: str) -> Found:
    """Return the schema in `json_schema.schema`, or in `schema`, where some clients put it."""
    place = f"{at}.json_schema"
    holder: Any = value.get("json_schema")
    if holder is None and (belongs == "schema" or "schema" in value):
        holder, place = value, at
    require_type(holder, Mapping, "an object with a schema", place)
    checked(holder, "strict", bool, "true or false", place)
    if holder.get("schema") is None:
        raise InvalidRequest(f"{place}.schema is missing: give a JSON Schema", param=f"{place}.schema")
    return JSON_SCHEMA, _spec(JSON_SCHEMA, holder["schema"], f"{place}.schema"), f"{place}.schema"


def _structured_outputs(value: Any, at: str) -> Found | None:
    require_type(value, Mapping, "an object", at)
    for key, setting in value.items():
        if key not in VLLM_KINDS and _is_given(setting):
            place, known = f"{at}.{key[:40]}", ", ".join(VLLM_KINDS)
            raise UnsupportedParameter(f"{place} is not supported here: give one of {known}", param=place)
    kinds = [key for key in VLLM_KINDS if _is_given(value.get(key))]
    if len(kinds) != 1:
        has = f"has {' and '.join(kinds)}" if kinds else "names no format"
        raise InvalidRequest(f"{at} {has}: give one of {', '.join(VLLM_KINDS)}", param=at)
    key, place = kinds[0], f"{at}.{kinds[0]}"
    return VLLM_KINDS[key], _spec(VLLM_KINDS[key], value[key], place), place


def _ollama_format(value: Any, at: str) -> Found | None:
    if value == "":
        return None
    if value == "json":
        return JSON_OBJECT, None, at
    return JSON_SCHEMA, _spec(JSON_SCHEMA, value, at), at


def _spec(kind: str, value: Any, at: str) -> Any:
    """Return the specification of a grammar, of the right JSON type. Raises InvalidRequest."""
    if kind == JSON_OBJECT:
        if value is not True:
            raise InvalidRequest(f"{at} is {kind_of(value)}: it must be true", param=at)
        return None
    if kind == JSON_SCHEMA:
        return _schema(value, at)
    expected = (list, "an array of strings") if kind == CHOICE else (str, "a string")
    if not isinstance(value, expected[0]):
        raise InvalidRequest(f"{at} is {kind_of(value)}: it must be {expected[1]}", param=at)
    return value


def _schema(value: Any, at: str) -> Any:
    """Return a JSON Schema, which may also be given as a string of JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{at} is a string that is no JSON: {error}", param=at) from None
    if not isinstance(value, (dict, bool)):
        raise InvalidRequest(f"{at} is {kind_of(value)}: it must be a JSON Schema, an object", param=at)
    return value


def _is_given(value: Any) -> bool:
    """Whether a key says something: null and false do not, and 0, which equals false, is a wrong value."""
    return value is not None and value is not False

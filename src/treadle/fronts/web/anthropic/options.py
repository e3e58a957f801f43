"""Reader of the fields that steer an answer: thinking, effort, and the format of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ....errors import InvalidRequest, UnsupportedParameter
from ...answer_options import OutputGrammar
from ...field_checks import checked, kind_of
from ...output_fields import JSON_SCHEMA
from ...reasoning_fields import ReasoningOptions
from ...validate import MAX_TOKENS
from ...value_checks import check_whole

TYPES = ("enabled", "adaptive", "between_tools", "disabled")
EFFORTS = ("low", "medium", "high", "xhigh", "max")


class Display(Enum):
    """Forms of reasoning in an answer: as text, as a block without text, or not at all."""

    SHOWN = "summarized"
    OMITTED = "omitted"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class ThinkingOptions:
    """Options of reasoning for the model's template and the engine, and the form in which the answer has it."""

    reasoning: ReasoningOptions
    display: Display


def read_thinking(thinking: Any, output_config: Any) -> ThinkingOptions:
    """Return the options in `thinking` and in `output_config.effort`. Without `thinking` reasoning is off. Raises
    InvalidRequest with the place."""
    effort = _one_of(_object(output_config, "output_config"), "effort", "output_config", EFFORTS)
    given = _object(thinking, "thinking")
    kind = None if thinking is None else _one_of(given, "type", "thinking", TYPES)
    if thinking is not None and kind is None:
        expected = ", ".join(TYPES)
        raise InvalidRequest(f"thinking.type is missing: give one of {expected}", param="thinking.type")
    budget = _budget(given.get("budget_tokens"))
    display = _one_of(given, "display", "thinking", (Display.SHOWN.value, Display.OMITTED.value))
    if kind in (None, "disabled"):
        return ThinkingOptions(ReasoningOptions(False, effort, shown=False), Display.HIDDEN)
    return ThinkingOptions(ReasoningOptions(True, effort, budget), Display(display or Display.SHOWN.value))


def read_format(output_config: Any, output_format: Any) -> OutputGrammar | None:
    """Return the grammar of the answer; None where it is free. Raises InvalidRequest with the place."""
    newer = _object(output_config, "output_config").get("format")
    found = [(newer, "output_config.format"), (output_format, "output_format")]
    given = [(value, at) for value, at in found if value is not None]
    if len(given) > 1:
        raise InvalidRequest(
            "output_config.format and output_format are both given: leave out output_format", param="output_format"
        )
    return _grammar(*given[0]) if given else None


def _grammar(value: Any, at: str) -> OutputGrammar:
    given = _object(value, at)
    if given.get("type") != JSON_SCHEMA:
        kind = given.get("type")
        shown = f"'{kind[:40]}'" if isinstance(kind, str) else kind_of(kind)
        raise UnsupportedParameter(
            f"{at}.type {shown} is not supported here: it must be 'json_schema'", param=f"{at}.type"
        )
    schema = checked(given, "schema", Mapping, "a JSON Schema, an object", at)
    if schema is None:
        raise InvalidRequest(f"{at}.schema is missing: give a JSON Schema", param=f"{at}.schema")
    return OutputGrammar(JSON_SCHEMA, schema, f"{at}.schema")


def _budget(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return check_whole("thinking.budget_tokens", value, 0, MAX_TOKENS)


def _one_of(given: Mapping[str, Any], key: str, at: str, known: tuple[str, ...]) -> str | None:
    value = given.get(key)
    if value is not None and value not in known:
        shown = f"'{value[:40]}'" if isinstance(value, str) else kind_of(value)
        raise InvalidRequest(f"{at}.{key} is {shown}: it must be one of {', '.join(known)}", param=f"{at}.{key}")
    return value


def _object(value: Any, at: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{at} is {kind_of(value)}: it must be an object", param=at)
    return value

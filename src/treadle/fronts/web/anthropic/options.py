"""Reader of the fields that steer an answer: thinking, effort, and the format of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ....errors import InvalidRequest, UnsupportedParameter
from ...answer_options import OutputGrammar
from ...field_checks import checked, one_of, quoted, require_type
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
    effort = one_of(_object(output_config, "output_config"), "effort", EFFORTS, "output_config")
    given = _object(thinking, "thinking")
    kind = None if thinking is None else one_of(given, "type", TYPES, "thinking")
    if thinking is not None and kind is None:
        expected = ", ".join(TYPES)
        raise InvalidRequest(f"thinking.type is missing: give one of {expected}", param="thinking.type")
    budget = _budget(given.get("budget_tokens"))
    display = one_of(given, "display", (Display.SHOWN.value, Display.OMITTED.value), "thinking")
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
        kind = quoted(given.get("type"))
        raise UnsupportedParameter(
            f"{at}.type {kind} is not supported here: it must be 'json_schema'", param=f"{at}.type"
        )
    schema = checked(given, "schema", Mapping, "a JSON Schema, an object", at)
    if schema is None:
        raise InvalidRequest(f"{at}.schema is missing: give a JSON Schema", param=f"{at}.schema")
    return OutputGrammar(JSON_SCHEMA, schema, f"{at}.schema")


def _budget(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return check_whole("thinking.budget_tokens", value, 0, MAX_TOKENS)


def _object(value: Any, at: str) -> Mapping[str, Any]:
    given: Mapping[str, Any] = {} if value is None else value
    require_type(given, Mapping, "an object", at)
    return given

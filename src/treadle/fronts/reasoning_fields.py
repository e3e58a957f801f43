"""Reader of the fields that steer reasoning, in the spellings of several APIs: switch, effort, budget, display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest
from .field_checks import checked, kind_of, require_type

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING_TYPES = ("enabled", "disabled", "adaptive", "auto")
BUDGETS = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget")
"""Spellings of a budget of reasoning in tokens: vLLM's, Qwen's, and llama.cpp's two. -1 is no limit."""
FIELDS = ("reasoning_effort", "reasoning", "thinking", "think", "include_reasoning", *BUDGETS)


@dataclass(frozen=True)
class ReasoningOptions:
    """Options of reasoning. `enabled` and `effort` are for the template, None where the request says nothing; `budget`
    is the most tokens of reasoning. `shown`: reasoning is part of the answer."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    shown: bool = True

    def template_variables(self) -> dict[str, Any]:
        """Return the variables that templates know: `enable_thinking` (Qwen), `thinking` (DeepSeek, Granite), and
        `reasoning_effort` (gpt-oss)."""
        variables: dict[str, Any] = {}
        if self.enabled is not None:
            variables |= {"enable_thinking": self.enabled, "thinking": self.enabled}
        if self.effort is not None:
            variables["reasoning_effort"] = self.effort
        return variables


def read_reasoning(given: Mapping[str, Any], enable_thinking: bool | None = None) -> ReasoningOptions:
    """Return the options in a request's fields. `enable_thinking` has precedence; of several budgets the smallest
    counts. Raises InvalidRequest with the place."""
    found = [_effort(given.get("reasoning_effort"), "reasoning_effort"), _reasoning(given.get("reasoning"))]
    found += [_thinking(given.get("thinking")), _think(given.get("think"))]
    found += [ReasoningOptions(budget=_budget(given.get(name), name)) for name in BUDGETS]
    budgets = [options.budget for options in found if options.budget is not None]
    on = [options.enabled for options in found if options.enabled is not None]
    shown = checked(given, "include_reasoning", bool, "true or false", "")
    return ReasoningOptions(
        enabled=enable_thinking if enable_thinking is not None else (all(on) if on else None),
        effort=next((options.effort for options in found if options.effort is not None), None),
        budget=min(budgets, default=None),
        shown=shown is not False and all(options.shown for options in found),
    )


def _effort(value: Any, at: str) -> ReasoningOptions:
    if value is None:
        return ReasoningOptions()
    if value not in EFFORTS:
        raise InvalidRequest(f"{at} is {_shown(value)}: it must be one of {', '.join(EFFORTS)}", param=at)
    return ReasoningOptions(False) if value == "none" else ReasoningOptions(True, value)


def _reasoning(value: Any) -> ReasoningOptions:
    """Return the options of OpenRouter's object: effort, max_tokens, enabled, exclude."""
    if value is None:
        return ReasoningOptions()
    require_type(value, Mapping, "an object", "reasoning")
    effort = _effort(value.get("effort"), "reasoning.effort")
    enabled = checked(value, "enabled", bool, "true or false", "reasoning")
    return ReasoningOptions(
        enabled=effort.enabled if enabled is None else enabled,
        effort=effort.effort,
        budget=_budget(value.get("max_tokens"), "reasoning.max_tokens"),
        shown=checked(value, "exclude", bool, "true or false", "reasoning") is not True,
    )


def _thinking(value: Any) -> ReasoningOptions:
    """Return the options of Anthropic's object: type, budget_tokens."""
    if value is None:
        return ReasoningOptions()
    if isinstance(value, bool):
        return ReasoningOptions(value)
    require_type(value, Mapping, "an object with a type", "thinking")
    kind = value.get("type")
    if kind not in THINKING_TYPES:
        expected = ", ".join(THINKING_TYPES)
        raise InvalidRequest(f"thinking.type is {_shown(kind)}: it must be one of {expected}", param="thinking.type")
    budget = _budget(value.get("budget_tokens"), "thinking.budget_tokens")
    return ReasoningOptions({"enabled": True, "disabled": False}.get(kind), budget=budget)


def _think(value: Any) -> ReasoningOptions:
    """Return the options of Ollama's field: true, false, or an effort."""
    return ReasoningOptions(value) if isinstance(value, bool) else _effort(value, "think")


def _budget(value: Any, at: str) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise InvalidRequest(f"{at} is {_shown(value)}: it must be a number of tokens, or -1 for no limit", param=at)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value[:40]}'"
    return str(value) if isinstance(value, int) and abs(value) < 2**63 else kind_of(value)

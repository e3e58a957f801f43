"""Reasoning, as clients of several APIs switch, limit and hide it."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.errors import InvalidRequest
from treadle.fronts.reasoning_fields import BUDGETS, ReasoningOptions, read_reasoning


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, ReasoningOptions()),
        ({"reasoning_effort": "none"}, ReasoningOptions(False)),
        ({"reasoning_effort": "high"}, ReasoningOptions(True, "high")),
        ({"reasoning": {"effort": "low", "max_tokens": 100}}, ReasoningOptions(True, "low", 100)),
        ({"reasoning": {"enabled": False, "effort": None}}, ReasoningOptions(False)),
        ({"reasoning": {"exclude": True}}, ReasoningOptions(shown=False)),
        ({"reasoning": {}}, ReasoningOptions()),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ReasoningOptions(True, budget=1024)),
        ({"thinking": {"type": "disabled"}}, ReasoningOptions(False)),
        ({"thinking": {"type": "adaptive"}}, ReasoningOptions()),
        ({"thinking": True}, ReasoningOptions(True)),
        ({"think": False}, ReasoningOptions(False)),
        ({"think": "medium"}, ReasoningOptions(True, "medium")),
        ({"include_reasoning": False}, ReasoningOptions(shown=False)),
        ({"thinking_token_budget": 0}, ReasoningOptions(budget=0)),
        ({"thinking_budget": 5.0}, ReasoningOptions(budget=5)),
        ({"reasoning_budget": -1}, ReasoningOptions()),
        ({"thinking_budget_tokens": 9, "reasoning": {"max_tokens": 7}}, ReasoningOptions(budget=7)),
        ({"reasoning_effort": "none", "thinking_token_budget": 5}, ReasoningOptions(False, budget=5)),
    ],
    ids=str,
)
def test_every_spelling_is_an_option(fields: dict[str, Any], options: ReasoningOptions) -> None:
    assert read_reasoning(fields) == options


def test_the_templates_own_switch_has_precedence() -> None:
    assert read_reasoning({"reasoning_effort": "none"}, True).enabled is True
    assert read_reasoning({"think": True}, False).enabled is False


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"reasoning_effort": []}, "reasoning_effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"reasoning": {"enabled": 0}}, "reasoning.enabled"),
        ({"reasoning": {"max_tokens": -5}}, "reasoning.max_tokens"),
        ({"reasoning": {"exclude": "no"}}, "reasoning.exclude"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": ["enabled"]}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"think": "yes"}, "think"),
        ({"think": 1}, "think"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        *(({name: value}, name) for name in BUDGETS for value in (-2, 1.5, True, 2**31, 10**400, "5")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_refused_by_its_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_reasoning(fields)
    assert caught.value.param == place
    assert caught.value.message.startswith(place)


def test_templates_get_the_switch_under_both_names() -> None:
    assert ReasoningOptions(False).template_variables() == {"enable_thinking": False, "thinking": False}
    assert ReasoningOptions(True, "low").template_variables()["reasoning_effort"] == "low"
    assert ReasoningOptions().template_variables() == {}

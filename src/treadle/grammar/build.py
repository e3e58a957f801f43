"""Grammars of structured output, built from requests: JSON, JSON Schema, regular expressions, choices and Lark.

All functions run in a text worker or in a library's thread: a dear grammar takes up to a second, and is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from ..core.messages import Constraint
from ..errors import one_line
from . import deep_stack
from .limits import WRITTEN
from .patterns import check_pattern
from .places import below, refusal
from .productive import keep_finite
from .schema import rewrite
from .validation import check_grammar, check_schema

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_CHARACTERS = 256 * 1024
"""Longest Lark grammar, and longest list of choices together."""
MAX_CHOICES = 10_000
MAX_RULES = 1_000
"""Most rules and terminals of a Lark grammar. Where each refers to the next one, a bitmask takes up to 30 ms."""
MAX_PARTS = 5_000
"""Most names and texts in a Lark grammar: the parser's time grows with the square of those in one rule."""

_RULES = re.compile(r"^[ \t]*[?!]?\w+[ \t]*(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)

_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\w+')


def build(kind: Kind, spec: Any, *, param: str, close_at_limit: bool = False) -> Constraint:
    """Build the constraint of a request.

    `spec` is None for "json_object", a JSON Schema (dict, bool, or its JSON as text) for "json_schema", a list of
    strings for "choice", and text for "regex" and "lark" (Lark as llguidance reads it, or GBNF). Raises
    InvalidRequest, whose `param` is `param` or the place at fault below it.
    """
    grammar = deep_stack.call(lambda: _BUILDERS[kind](spec, param))
    return Constraint(kind, grammar, close_at_limit=close_at_limit, param=param)


def json_rule(schema: Any, *, param: str, check: bool = True) -> str:
    """Return a JSON Schema as an expression of Lark, `%json {...}`, that stands by itself with all its definitions.

    The schema is rewritten and checked like one of "json_schema", and raises the same errors. For grammars that have
    JSON within other text, such as the arguments of a tool. Without `check` the grammar that it becomes a part of is to
    be checked: llguidance may refuse it there.
    """
    rewritten = rewrite(_parsed(schema, param), param=param)
    keep_finite(rewritten.schema, param)
    if check:
        check_schema(rewritten, param=param)
    return f"%json {rewritten.text()}"


def _json_object(spec: Any, param: str) -> str:
    return _json_schema({"type": "object"}, param)


def _json_schema(spec: Any, param: str) -> str:
    rewritten = rewrite(_parsed(spec, param), param=param)
    keep_finite(rewritten.schema, param)
    return check_schema(rewritten, param=param)


def _parsed(spec: Any, param: str) -> Any:
    if not isinstance(spec, str):
        return spec
    if len(spec) > MAX_CHARACTERS:
        raise refusal(param, f"is longer than {MAX_CHARACTERS} characters: use a smaller schema")
    try:
        return json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise refusal(param, f"is not valid JSON: {one_line(error)}") from error


def _regex(spec: Any, param: str) -> str:
    pattern = _text(spec, param)
    check_pattern(pattern, param)
    return _checked(LLMatcher.grammar_from_regex(pattern), param)


def _choice(spec: Any, param: str) -> str:
    if not isinstance(spec, list) or not spec:
        raise refusal(param, "must be a list of at least one string")
    if len(spec) > MAX_CHOICES:
        raise refusal(param, f"has over {MAX_CHOICES} strings: give fewer")
    for index, choice in enumerate(spec):
        if not isinstance(choice, str) or not choice:
            raise refusal(below(param, index), "must be a string of at least one character")
    choices = " | ".join(json.dumps(choice) for choice in dict.fromkeys(spec))
    if len(choices) > MAX_CHARACTERS:
        raise refusal(param, f"is longer than {MAX_CHARACTERS} characters: give fewer or shorter strings")
    return _checked(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"), param)


def _lark(spec: Any, param: str) -> str:
    text = _text(spec, param)
    if text.lstrip().startswith("{"):
        raise refusal(param, "must be Lark or GBNF, not JSON")
    if len(text) > MAX_CHARACTERS:
        raise refusal(param, f"is longer than {MAX_CHARACTERS} characters: use a smaller grammar")
    if "::=" in text:
        text = _from_gbnf(text, param)
    if len(_RULES.findall(text)) > MAX_RULES:
        raise refusal(param, f"has over {MAX_RULES} rules: use a smaller grammar")
    if sum(1 for _ in _PARTS.finditer(text)) > MAX_PARTS:
        raise refusal(param, f"has over {MAX_PARTS} names and texts: use a smaller grammar")
    return _checked(LLMatcher.grammar_from_lark(text), param)


def _from_gbnf(text: str, param: str) -> str:
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises plain exceptions
        raise refusal(param, f"is no GBNF grammar that can be converted to Lark: {one_line(error)}") from error


def _text(spec: Any, param: str) -> str:
    if not isinstance(spec, str) or not spec:
        raise refusal(param, "must be text of at least one character")
    return spec


def _checked(grammar: str, param: str) -> str:
    check_grammar(grammar, param=param, limits=WRITTEN)
    return grammar


_BUILDERS: dict[str, Callable[[Any, str], str]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
}

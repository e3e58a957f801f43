"""Checks of finished grammars with llguidance, without a tokenizer. A text worker runs them, under its limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..errors import InvalidRequest, one_line
from . import deep_stack
from .faults import FAILED
from .limits import LIMITS
from .places import below
from .schema import Rewritten

MAX_CHARACTERS = 256 * 1024
MAX_STEPS = 6
"""Tokens of the texts whose bitmasks are computed."""
MAX_TRIALS = 64
"""Most parts of a schema that are compiled by themselves to find the one at fault."""

_HINTS = {
    "oneOf constraints are not supported": "oneOf is only supported where no value can match two of its schemas: give "
    "each a property with a const of its own, or use anyOf",
    "grammar size": "it is too large: use fewer or simpler rules",
    "initial lexer configuration": "it takes too much work to compile: use fewer or simpler numbers and patterns",
    "fuel exhausted": "it takes too much work to compile: use fewer or simpler numbers and patterns",
    "too many expressions": "it takes too much work to compile: use fewer or simpler numbers and patterns",
    "Too many items": "it has too many ways to go on at once: use fewer optional parts",
    "Current row has": "it has too many ways to go on at once: use fewer optional parts",
    "panic": FAILED,
    "NoExtension": "no text matches it",
    "patternProperties": "its patterns may match the same name: make them exclude one another",
}


def fault_of(grammar: str, limits: LLParserLimits = LIMITS) -> str | None:
    """Return why llguidance can't use a grammar within limits, as one line; None if it can."""
    return deep_stack.call(lambda: _fault(grammar, limits))


def _fault(grammar: str, limits: LLParserLimits) -> str | None:
    fault = LLMatcher.validate_grammar(grammar, None, limits=limits)
    if not fault or _is_warning(fault):
        fault = _mask_fault(grammar)
    return _readable(fault) if fault else None


def _is_warning(fault: str) -> bool:
    return fault.startswith("WARNING")


_bytes: LLTokenizer | None = None


def _mask_fault(grammar: str) -> str:
    """Return the fault of a grammar that allows nothing, or that is too large to be followed; empty if there is none.

    The texts are the first and the last one that begin as the grammar allows.
    """
    global _bytes
    _bytes = _bytes or LLTokenizer("byte", slices=[])
    matcher = LLMatcher(_bytes, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
        return "no text matches it"
    return _fault_of_walk(matcher.deep_copy(), min) or _fault_of_walk(matcher, max)


def _fault_of_walk(matcher: LLMatcher, choose: Callable[[list[int]], int]) -> str:
    for _ in range(MAX_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            break
        matcher.consume_token(choose(allowed))
    return str(matcher.get_error()) if matcher.is_error() else ""


def _readable(fault: str) -> str:
    for start, hint in _HINTS.items():
        if start in fault:
            return hint
    lines = [line.strip() for line in fault.partition("<backtrace")[0].splitlines() if line.strip()]
    return one_line(" ".join(lines[:4]))


_TOKEN_IDS, _ANY_TOKEN = re.compile(r"<\[[0-9,-]+\]>"), "<[0]>"
"""Token ids of the model, which the vocabulary of the check lacks."""


def check_grammar(grammar: str, *, param: str, limits: LLParserLimits = LIMITS) -> None:
    """Raise InvalidRequest if llguidance can't use a grammar. The ids of tokens in it are not checked."""
    if fault := fault_of(_TOKEN_IDS.sub(_ANY_TOKEN, grammar), limits):
        raise InvalidRequest(f"{param} can't be used as a grammar: {fault}", param=param)


def check_schema(rewritten: Rewritten, *, param: str) -> str:
    """Return the grammar of a rewritten schema. Raises InvalidRequest with the place of the part at fault."""
    grammar = str(LLMatcher.grammar_from_json_schema(rewritten.text()))
    if fault := fault_of(grammar):
        place, fault = _Search(rewritten).deepest(rewritten.schema, param, fault)
        raise InvalidRequest(f"{place} can't be used as a grammar: {fault}", param=place)
    return grammar


def _within(schema: dict[str, Any], place: str, fault: str) -> tuple[str, str]:
    """Return the place of the keyword at fault in a schema, where it is plain, and the fault."""
    if "pattern" in schema and "regex" in fault:
        return below(place, "pattern"), fault
    return place, fault


class _Search:
    """Search for the smallest part of a schema that has a fault of its own."""

    def __init__(self, rewritten: Rewritten) -> None:
        self._rewritten = rewritten
        self._definitions = rewritten.schema.get("$defs", {})
        self._trials = 0
        self._seen: set[int] = set()

    def deepest(self, schema: dict[str, Any], place: str, fault: str) -> tuple[str, str]:
        """Return the place and the fault of the smallest part below `schema`, which has `fault` itself."""
        found = self._rewritten.places.get(id(schema), place), fault
        for part in self._parts(schema):
            if (inner := self._fault(part)) is not None:
                return self.deepest(part, found[0], inner)
        return _within(schema, *found)

    def _fault(self, part: dict[str, Any]) -> str | None:
        if id(part) in self._seen or self._trials >= MAX_TRIALS:
            return None
        self._seen.add(id(part))
        self._trials += 1
        alone = Rewritten({**part, "$defs": self._definitions}, {})
        return fault_of(LLMatcher.grammar_from_json_schema(alone.text()))

    def _parts(self, schema: Any) -> list[dict[str, Any]]:
        """Return the schemas right below one, and its definition where it is a reference."""
        found: list[dict[str, Any]] = []
        for key, value in schema.items():
            if key in ("enum", "$defs"):
                continue
            if key == "$ref":
                value = self._definitions[value.rpartition("/")[2]]
            parts = value.values() if key in ("properties", "patternProperties") else [value]
            for part in parts:
                found += [one for one in (part if isinstance(part, list) else [part]) if isinstance(one, dict)]
        return found

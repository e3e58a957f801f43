"""Structural tags, the gateway's and vLLM's form of tool-call constraints: their grammar.

The format is xgrammar's (https://xgrammar.mlc.ai/docs/structural_tag): `format` is a tree of elements, each with a
`type`. The older form, `structures` and `triggers`, is read too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..core.messages import Constraint
from ..errors import InvalidRequest
from ..grammar.build import build, json_rule
from ..grammar.validation import check_grammar
from ..text.formats.lark import Grammar, plain_schema

KIND = "structural_tag"
_TEXT = r"/(.|\n)+/"
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def structural_tag(spec: Any, *, special: Mapping[str, int], end_ids: Collection[int], param: str) -> Constraint:
    """Return the constraint of a structural tag, given as JSON text or as its value.

    `special` are the ids of the vocabulary's special tokens by text, `end_ids` those of them that end an answer. Raises
    InvalidRequest, whose `param` is `param` or the place at fault below it.
    """
    element, place = _format_of(_parse(spec, param), param)
    try:
        constraint = _constraint(_TagGrammar(special, end_ids), element, place)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None
    check_grammar(constraint.grammar, param=param)
    return msgspec.structs.replace(constraint, param=param)


def _constraint(grammar: _TagGrammar, element: dict[str, Any], place: str) -> Constraint:
    if element.get("type") != "triggered_tags" or element.get("at_least_one"):
        return Constraint(KIND, grammar.render(grammar.element(element, place)))
    # Free text until a trigger: the engine waits for it, and masks nothing before.
    _refuse_excludes(element, place)
    triggers = _texts(element, "triggers", place)
    tags = _list(element, "tags", place)
    for i, tag in enumerate(tags):
        _trigger_of(tag, f"{place}.tags[{i}]", triggers)
    start = grammar.any_tag(tags, f"{place}.tags")
    return Constraint(KIND, grammar.render(start), triggers, then_free=not element.get("stop_after_first"))


def _parse(spec: Any, param: str) -> dict[str, Any]:
    if not isinstance(spec, str):
        return _object(spec, param)
    try:
        return _object(msgspec.json.decode(spec), param)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


def _format_of(tag: dict[str, Any], param: str) -> tuple[dict[str, Any], str]:
    """Return the root element, and its place; of the older form the same as triggered tags."""
    if "format" in tag:
        return _object(tag["format"], f"{param}.format"), f"{param}.format"
    structures = _list(tag, "structures", param)
    tags = [_older(_object(one, f"{param}.structures[{i}]")) for i, one in enumerate(structures)]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}, param


def _older(structure: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": structure.get("schema")}
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end")}


class _TagGrammar(Grammar):
    """A grammar of elements. Each method returns an expression; `place` is the element's place in the request."""

    def __init__(self, special: Mapping[str, int], end_ids: Collection[int]) -> None:
        super().__init__(special, plain_schema)
        self._special = special
        self._end_ids = frozenset(end_ids)
        self._elements: dict[str, Callable[[dict[str, Any], str], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._alternatives,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def element(self, value: Any, place: str) -> str:
        element = _object(value, place)
        kind = element.get("type")
        write = self._elements.get(kind) if isinstance(kind, str) else None
        if write is None:
            known = ", ".join(self._elements)
            raise InvalidRequest(f"{place}.type is {_short(kind)}: use one of {known}", param=f"{place}.type")
        return write(element, place)

    def any_tag(self, tags: Sequence[Any], place: str) -> str:
        """Return the expression of one of `tags`."""
        rules = [
            self.rule("tag", self._tag(_object(tag, f"{place}[{i}]"), f"{place}[{i}]")) for i, tag in enumerate(tags)
        ]
        return "(" + " | ".join(rules) + ")"

    def _const_string(self, element: dict[str, Any], place: str) -> str:
        return self.text(_text(element, "value", place)) or '""'

    def _json_schema(self, element: dict[str, Any], place: str) -> str:
        if element.get("style", "json") != "json":
            where = f"{place}.style"
            raise InvalidRequest(f"{where} is {_short(element['style'])}: only json is supported", param=where)
        return self.rule("json", json_rule(element.get("json_schema"), param=f"{place}.json_schema"))

    def _regex(self, element: dict[str, Any], place: str) -> str:
        pattern = _text(element, "pattern", place)
        build("regex", pattern, param=f"{place}.pattern")
        slashed = _SLASH.sub(lambda found: found[1] or r"\/", pattern)
        return self.terminal("PATTERN", f"/{slashed}/")

    def _any_text(self, element: dict[str, Any], place: str) -> str:
        _refuse_excludes(element, place)
        return self.free(())

    def _sequence(self, element: dict[str, Any], place: str) -> str:
        return " ".join(self._each(element, "elements", place)) or '""'

    def _alternatives(self, element: dict[str, Any], place: str) -> str:
        return "(" + " | ".join(self._each(element, "elements", place)) + ")"

    def _each(self, element: dict[str, Any], name: str, place: str) -> list[str]:
        return [self.element(one, f"{place}.{name}[{i}]") for i, one in enumerate(_list(element, name, place))]

    def _tag(self, element: dict[str, Any], place: str) -> str:
        begin = self.text(_text(element, "begin", place))
        content = _object(element.get("content"), f"{place}.content")
        ends = _texts(element, "end", place)
        if content.get("type") == "any_text":
            _refuse_excludes(content, f"{place}.content")
            return f"{begin} {self._until(ends)}"
        closing = " | ".join(self.text(end) or '""' for end in ends)
        return f"{begin} {self.element(content, f'{place}.content')} ({closing})"

    def _triggered_tags(self, element: dict[str, Any], place: str) -> str:
        _refuse_excludes(element, place)
        triggers = _texts(element, "triggers", place)
        tags = _list(element, "tags", place)
        first = self.any_tag(tags, f"{place}.tags")
        if element.get("stop_after_first"):
            return first
        more = " | ".join(self._after_trigger(tag, f"{place}.tags[{i}]", triggers) for i, tag in enumerate(tags))
        many = f"({more})* {self.free(triggers)}"
        return f"{first} {many}" if element.get("at_least_one") else many

    def _after_trigger(self, tag: Any, place: str, triggers: Sequence[str]) -> str:
        """Return the expression of free text up to a trigger, and the tag that begins with it."""
        trigger = _trigger_of(tag, place, triggers)
        rest = self._tag({**tag, "begin": tag["begin"][len(trigger) :]}, place)
        return f"{self.lead(trigger, triggers)} {rest}"

    def _tags_with_separator(self, element: dict[str, Any], place: str) -> str:
        tag = self.any_tag(_list(element, "tags", place), f"{place}.tags")
        one = (
            tag
            if element.get("stop_after_first")
            else f"{tag} ({self.text(_text(element, 'separator', place))} {tag})*"
        )
        return one if element.get("at_least_one") else f"({one})?"

    def _until(self, ends: Sequence[str]) -> str:
        """Return the expression of any text up to one of `ends`."""
        return "(" + " | ".join(self.lead(end, ends) for end in ends) + ")"

    def lead(self, text: str, others: Sequence[str]) -> str:
        """Return the expression of free text without `others`, up to and with `text`."""
        if any(text.startswith(one) for one in self._special):
            return f"{self.free(others)} {self.text(text)}"
        return self.rule("lead", f"{self.terminal('TEXT', _TEXT)}? {self.text(text)}", "[lazy]")

    def free(self, without: Sequence[str]) -> str:
        """Return the expression of text and special tokens, except those that `without` begin with."""
        ids = {i for text, i in self._special.items() if not any(one.startswith(text) for one in without)}
        tokens = [f"<[{','.join(_ranges(ids - self._end_ids))}]>"] if ids - self._end_ids else []
        return f"({' | '.join([self.terminal('TEXT', _TEXT), *tokens])})*"


def _ranges(ids: Iterable[int]) -> Iterator[str]:
    """Yield the ranges of consecutive ids, each as Lark writes it."""
    for _, group in itertools.groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0]):
        found = [i for _, i in group]
        yield str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _trigger_of(tag: Any, place: str, triggers: Sequence[str]) -> str:
    """Return the trigger that a tag begins with."""
    begin = _text(_object(tag, place), "begin", place)
    trigger = next((one for one in triggers if one and begin.startswith(one)), None)
    if trigger is None:
        raise InvalidRequest(f"{place}.begin must begin with one of the triggers", param=f"{place}.begin")
    return trigger


def _refuse_excludes(element: dict[str, Any], place: str) -> None:
    if element.get("excludes"):
        raise InvalidRequest(f"{place}.excludes is not supported: leave it out", param=f"{place}.excludes")


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place} must be an object", param=place)
    return value


def _list(element: dict[str, Any], name: str, place: str) -> list[Any]:
    value = element.get(name)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{place}.{name} must be a list that is not empty", param=f"{place}.{name}")
    return value


def _text(element: dict[str, Any], name: str, place: str) -> str:
    value = element.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{place}.{name} must be text", param=f"{place}.{name}")
    return value


def _texts(element: dict[str, Any], name: str, place: str) -> tuple[str, ...]:
    """Return a text or a list of texts, as a tuple."""
    value = element.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{place}.{name} must be text, or a list of texts", param=f"{place}.{name}")
    return tuple(texts)


def _short(value: Any) -> str:
    return repr(value)[:80]

"""Guard against special-token injection: `<|im_start|>` in a user's message stays text and opens no turn.

Before rendering, a sentinel (a Unicode noncharacter that the request does not contain) is inserted into each
occurrence of a special token's text. After rendering, the sentinel is replaced with a real special token, at which
every tokenizer splits, and the ids of those separators are dropped. Templates may still trim, join or search the
texts, and a conversation without special tokens is tokenized exactly as without the guard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import InvalidRequest

SENTINELS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
TEXT_KEYS = ("name", "reasoning_content", "tools")
CALL_KEYS = ("tool_calls", "tool_call_id")
ASSISTANT_ROLE = "assistant"


@dataclass(frozen=True)
class Separator:
    """The special token that replaces the sentinel before tokenization."""

    content: str
    id: int


@dataclass(frozen=True)
class GuardedChat:
    """A conversation whose special tokens are each split by `sentinel`."""

    messages: Sequence[Mapping[str, Any]]
    extra: Mapping[str, Any]
    sentinel: str
    tools: Sequence[Mapping[str, Any]] = ()


class SpecialTokenGuard:
    """Splits special tokens in the texts of a request.

    `special` are split in every text. `template_tokens` (added tokens that the template writes and that are not
    special) are split in all but the assistant's texts, where templates look for some of them.
    """

    def __init__(self, special: Iterable[str], template_tokens: Iterable[str], separator: Separator | None) -> None:
        usual = {content for content in special if len(content) > 1} if separator else set()
        self._separator = separator
        self._special = _SubstringFinder(usual)
        added = {content for content in template_tokens if len(content) > 1} if separator else set()
        self._any_role = _SubstringFinder(usual | added)

    def split_special_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> GuardedChat | None:
        """Return the conversation with its special tokens split; None if it has none. Raises InvalidRequest when it
        contains all sentinels."""
        in_messages = (self._finder_for(message).occurs_in(text) for message in messages for text in _texts_of(message))
        nested = [extra, tools, *(_calls_of(message) for message in messages)]
        in_nested = (self._any_role.occurs_in(text) for value in nested for text in _strings_of(value))
        if not any(in_messages) and not any(in_nested):
            return None
        texts = [text for message in messages for text in _texts_of(message)]
        sentinel = _unused_sentinel([*texts, *(text for value in nested for text in _strings_of(value))])
        return GuardedChat(
            [self._split_message(message, sentinel) for message in messages],
            self._split_nested(extra, sentinel),
            sentinel,
            self._split_nested(list(tools), sentinel),
        )

    def to_separators(self, rendered: str, sentinel: str) -> tuple[str, frozenset[int], int]:
        """Replace sentinels with the separator. Returns the text to tokenize, the ordinals of the inserted separators
        among all occurrences of the separator's text, and the number of all occurrences."""
        assert self._separator is not None
        inserted, count = set(), 0
        *before, last = rendered.split(sentinel)
        for part in before:
            count += part.count(self._separator.content)
            inserted.add(count)
            count += 1
        text = self._separator.content.join((*before, last))
        return text, frozenset(inserted), count + last.count(self._separator.content)

    def drop_separators(self, ids: Sequence[int], inserted: frozenset[int], count: int) -> list[int]:
        """Return the ids without the inserted separators. Raises InvalidRequest when the ids do not contain exactly
        `count` separators, so that the inserted ones can't be identified."""
        assert self._separator is not None
        places = [place for place, token in enumerate(ids) if token == self._separator.id]
        if len(places) != count:
            raise InvalidRequest(
                "the messages hold special tokens of the model in a way that can't be told from its own: remove them",
                param="messages",
            )
        dropped = {place for order, place in enumerate(places) if order in inserted}
        return [token for place, token in enumerate(ids) if place not in dropped]

    def _finder_for(self, message: Mapping[str, Any]) -> _SubstringFinder:
        return self._special if message.get("role") == ASSISTANT_ROLE else self._any_role

    def _split_nested(self, value: Any, sentinel: str) -> Any:
        """Return the value with the special tokens in all of its strings split, names of members included."""
        if isinstance(value, str):
            return self._any_role.split(value, sentinel)
        if isinstance(value, Mapping):
            members = value.items()
            return {self._split_nested(key, sentinel): self._split_nested(inner, sentinel) for key, inner in members}
        if isinstance(value, list):
            return [self._split_nested(inner, sentinel) for inner in value]
        return value

    def _split_message(self, message: Mapping[str, Any], sentinel: str) -> dict[str, Any]:
        finder, result = self._finder_for(message), dict(message)
        for key in TEXT_KEYS:
            if isinstance(result.get(key), str):
                result[key] = finder.split(result[key], sentinel)
        result |= self._split_nested(_calls_of(message), sentinel)
        content = message.get("content")
        if isinstance(content, str):
            result["content"] = finder.split(content, sentinel)
        elif isinstance(content, list):
            texts = finder.split_across([part.get("text", "") for part in content], sentinel)
            both = zip(content, texts, strict=True)
            result["content"] = [{**part, "text": text} if "text" in part else part for part, text in both]
        return result


class _SubstringFinder:
    """Finder of several substrings, indexed by their first two characters."""

    def __init__(self, contents: set[str]) -> None:
        self._contents = contents
        self._lengths: dict[str, list[int]] = {}
        for content in contents:
            lengths = self._lengths.setdefault(content[:2], [])
            if len(content) not in lengths:
                lengths.append(len(content))
        starts = "|".join(map(re.escape, sorted(self._lengths)))
        self._start = re.compile(f"(?={starts})") if starts else None

    def occurs_in(self, text: str) -> bool:
        return bool(self._break_positions(text, first=True))

    def split(self, text: str, sentinel: str) -> str:
        return self.split_across([text], sentinel)[0]

    def split_across(self, texts: Sequence[str], sentinel: str) -> list[str]:
        """Insert the sentinel into every occurrence, also into one that spans two texts."""
        breaks, result, begin = self._break_positions("".join(texts)), [], 0
        for text in texts:
            end = begin + len(text)
            inside = [0, *(at - begin for at in breaks if begin < at <= end), len(text)]
            result.append(sentinel.join(text[a:b] for a, b in pairwise(inside)))
            begin = end
        return result

    def _break_positions(self, text: str, *, first: bool = False) -> list[int]:
        """Return the position after the first character of each occurrence."""
        found: list[int] = []
        for match in self._start.finditer(text) if self._start else ():
            at = match.start()
            if any(text[at : at + length] in self._contents for length in self._lengths[text[at : at + 2]]):
                found.append(at + 1)
                if first:
                    break
        return found


def _texts_of(message: Mapping[str, Any]) -> Iterable[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield "".join(part.get("text", "") for part in content)
    yield from (message[key] for key in TEXT_KEYS if isinstance(message.get(key), str))


def _calls_of(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: message[key] for key in CALL_KEYS if key in message}


def _strings_of(value: Any) -> Iterator[str]:
    """Yield all strings in a value of JSON, names of members included."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            rest += item


def _unused_sentinel(texts: Sequence[str]) -> str:
    for sentinel in SENTINELS:
        if not any(sentinel in text for text in texts):
            return sentinel
    raise InvalidRequest("the messages hold every noncharacter from U+FDD0 to U+FDEF: remove one", param="messages")

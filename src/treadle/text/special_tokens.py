"""Special tokens in users' texts, kept text: `<|im_start|>` in a message must not open a turn.

Before rendering, each special token's text in a message is split by a sign: a noncharacter that the request does not
hold. After rendering, the sign becomes a real special token, at which every tokenizer splits; its ids are dropped from
the result. So templates may trim, join or search the texts, and a conversation that holds no special token is tokenized
exactly as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import InvalidRequest

SIGNS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
TEXT_KEYS = ("name", "reasoning_content")
OWN_ROLE = "assistant"


@dataclass(frozen=True)
class Separator:
    """The special token that stands in for the sign."""

    content: str
    id: int


@dataclass(frozen=True)
class Marked:
    """A conversation in which `sign` splits every special token of its texts."""

    messages: Sequence[Mapping[str, Any]]
    extra: Mapping[str, Any]
    sign: str


class SpecialTokenGuard:
    """Finds special tokens in texts. `special` are split in every text; `markers`, which the template writes but which
    are not special, in all but the assistant's: templates look for some of them there."""

    def __init__(self, special: Iterable[str], markers: Iterable[str], separator: Separator | None) -> None:
        usual = {content for content in special if len(content) > 1} if separator else set()
        self._separator = separator
        self._special = _Finder(usual)
        self._all = _Finder(usual | {content for content in markers if len(content) > 1 and separator})

    def marked(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> Marked | None:
        """The conversation with its special tokens split; None where it has none. Raises InvalidRequest for one that
        holds every sign."""
        if not any(self._finder(message).finds(text) for message in messages for text in _joined_texts(message)) and (
            not any(self._all.finds(value) for value in extra.values() if isinstance(value, str))
        ):
            return None
        sign = _free_sign(messages, extra)
        return Marked(
            [self._message(message, sign) for message in messages],
            {key: self._all.split(v, sign) if isinstance(v, str) else v for key, v in extra.items()},
            sign,
        )

    def separated(self, rendered: str, sign: str) -> tuple[str, frozenset[int], int]:
        """The text to tokenize, which occurrences of the separator in it stand for the sign, and how many occurrences
        there are."""
        assert self._separator is not None
        ours, count = set(), 0
        *before, last = rendered.split(sign)
        for part in before:
            count += part.count(self._separator.content)
            ours.add(count)
            count += 1
        text = self._separator.content.join((*before, last))
        return text, frozenset(ours), count + last.count(self._separator.content)

    def without(self, ids: Sequence[int], ours: frozenset[int], count: int) -> list[int]:
        """The ids without those that stand for the sign. Raises InvalidRequest where they can't be told apart."""
        assert self._separator is not None
        places = [place for place, token in enumerate(ids) if token == self._separator.id]
        if len(places) != count:
            raise InvalidRequest(
                "the messages hold special tokens of the model in a way that can't be told from its own: remove them",
                param="messages",
            )
        dropped = {place for order, place in enumerate(places) if order in ours}
        return [token for place, token in enumerate(ids) if place not in dropped]

    def _finder(self, message: Mapping[str, Any]) -> _Finder:
        return self._special if message.get("role") == OWN_ROLE else self._all

    def _message(self, message: Mapping[str, Any], sign: str) -> dict[str, Any]:
        finder, made = self._finder(message), dict(message)
        for key in TEXT_KEYS:
            if isinstance(made.get(key), str):
                made[key] = finder.split(made[key], sign)
        content = message.get("content")
        if isinstance(content, str):
            made["content"] = finder.split(content, sign)
        elif isinstance(content, list):
            texts = finder.split_across([part["text"] for part in content], sign)
            made["content"] = [{**part, "text": text} for part, text in zip(content, texts, strict=True)]
        return made


class _Finder:
    """Occurrences of some strings in texts."""

    def __init__(self, contents: set[str]) -> None:
        self._contents = contents
        self._lengths: dict[str, list[int]] = {}
        for content in contents:
            lengths = self._lengths.setdefault(content[:2], [])
            if len(content) not in lengths:
                lengths.append(len(content))
        starts = "|".join(map(re.escape, sorted(self._lengths)))
        self._start = re.compile(f"(?={starts})") if starts else None

    def finds(self, text: str) -> bool:
        return bool(self._breaks(text, first=True))

    def split(self, text: str, sign: str) -> str:
        return self.split_across([text], sign)[0]

    def split_across(self, texts: Sequence[str], sign: str) -> list[str]:
        """The texts with the sign in every occurrence, also where one begins in a text and ends in the next."""
        breaks, made, begin = self._breaks("".join(texts)), [], 0
        for text in texts:
            end = begin + len(text)
            inside = [0, *(at - begin for at in breaks if begin < at <= end), len(text)]
            made.append(sign.join(text[a:b] for a, b in pairwise(inside)))
            begin = end
        return made

    def _breaks(self, text: str, *, first: bool = False) -> list[int]:
        """After the first character of each occurrence."""
        found: list[int] = []
        for match in self._start.finditer(text) if self._start else ():
            at = match.start()
            if any(text[at : at + length] in self._contents for length in self._lengths[text[at : at + 2]]):
                found.append(at + 1)
                if first:
                    break
        return found


def _joined_texts(message: Mapping[str, Any]) -> Iterable[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield "".join(part["text"] for part in content)
    yield from (message[key] for key in TEXT_KEYS if isinstance(message.get(key), str))


def _free_sign(messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> str:
    texts = [text for message in messages for text in _joined_texts(message)]
    texts += [value for value in extra.values() if isinstance(value, str)]
    for sign in SIGNS:
        if not any(sign in text for text in texts):
            return sign
    raise InvalidRequest("the messages hold every noncharacter from U+FDD0 to U+FDEF: remove one", param="messages")

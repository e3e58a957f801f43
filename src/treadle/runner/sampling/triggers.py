"""Search for triggers in the bytes of generated tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass


@dataclass(frozen=True)
class Trigger:
    """Occurrence of a trigger: the tokens from the one where it starts, how many bytes of that come before it, and how
    many bytes of the last one come after it."""

    tokens: tuple[int, ...]
    offset: int
    rest: int


class TriggerSearch:
    """Finds the first occurrence of one of `triggers` in a row's text, token by token. `bytes_of` returns the bytes of
    a token; a special token's are its name."""

    def __init__(self, triggers: Sequence[str], bytes_of: Callable[[int], bytes]) -> None:
        self._triggers = tuple(text.encode() for text in triggers)
        self._longest = max(len(text) for text in self._triggers)
        self._bytes_of = bytes_of
        self.reset()

    def fork(self) -> TriggerSearch:
        """Return a search that goes on from here by itself."""
        made = copy(self)
        made._tokens = list(self._tokens)
        return made

    def reset(self) -> None:
        """Forget all tokens so far."""
        self._tokens: list[tuple[int, int]] = []  # with their lengths in bytes
        self._text = b""

    def push(self, token: int) -> Trigger | None:
        """Append a token. Return the trigger that it completes; the search starts anew behind that token."""
        text = self._bytes_of(token)
        self._tokens.append((token, len(text)))
        self._text += text
        found = [(at, at + len(trigger)) for trigger in self._triggers if (at := self._text.find(trigger)) >= 0]
        if found:
            return self._take(*min(found))
        self._forget(len(self._text) - self._longest + 1)
        return None

    def push_back(self, trigger: Trigger) -> None:
        """Take back the token that has completed `trigger`."""
        for token in trigger.tokens[:-1]:
            self.push(token)

    def _take(self, start: int, end: int) -> Trigger:
        rest = len(self._text) - end
        start -= self._forget(start)
        found = Trigger(tuple(token for token, _ in self._tokens), start, rest)
        self.reset()
        return found

    def _forget(self, count: int) -> int:
        """Forget the first tokens, as far as they have at most `count` bytes together. Return their bytes."""
        gone = tokens = 0
        for _, length in self._tokens:
            if gone + length > count:
                break
            gone, tokens = gone + length, tokens + 1
        del self._tokens[:tokens]
        self._text = self._text[gone:]
        return gone

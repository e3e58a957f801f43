"""Streaming matcher of stop strings, independent of chunk borders.

An Aho-Corasick automaton reads each character once. The depth of its state is the length of the longest suffix of the
text that is a prefix of a stop string: the number of characters to hold back.

The text ends at the first position where a stop string is complete. If several are complete there, the one that starts
earliest wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InvalidRequest


class StopMatch(NamedTuple):
    """Text that may be sent now, and the stop string that ended the text, if any."""

    text: str
    stop: str | None = None


class StopSet:
    """Aho-Corasick automaton of a request's stop strings. Immutable; shared by its sequences.

    Raises InvalidRequest for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequest("a stop string is empty; leave it out", param="stop")
        self.transitions: list[dict[str, int]] = [{}]
        self.depths: list[int] = [0]
        self.matches: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self.first_chars = frozenset(self.transitions[0])
        self.failure_links = self._build_failure_links()

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, char in enumerate(stop, 1):
            child = self.transitions[node].get(char)
            if child is None:
                child = self.transitions[node][char] = len(self.transitions)
                self.transitions.append({})
                self.depths.append(depth)
                self.matches.append(None)
            node = child
        self.matches[node] = stop

    def _build_failure_links(self) -> list[int]:
        """Return each node's failure link (the node of its longest proper suffix); nodes inherit their link's match."""
        failure_links = [0] * len(self.transitions)
        queue = deque(self.transitions[0].values())
        while queue:
            node = queue.popleft()
            self.matches[node] = self.matches[node] or self.matches[failure_links[node]]
            for char, child in self.transitions[node].items():
                failure_links[child] = self._step(failure_links, failure_links[node], char)
                queue.append(child)
        return failure_links

    def _step(self, failure_links: list[int], node: int, char: str) -> int:
        while node and char not in self.transitions[node]:
            node = failure_links[node]
        return self.transitions[node].get(char, 0)

    def step(self, node: int, char: str) -> int:
        """Return the node after reading `char` at `node`."""
        return self._step(self.failure_links, node, char)


class StopStrings:
    """Stop string matcher of one sequence."""

    def __init__(self, stops: Sequence[str] | StopSet) -> None:
        self._set = stops if isinstance(stops, StopSet) else StopSet(stops)
        self._node = 0
        self._held = ""

    @property
    def held(self) -> str:
        """Text held back because it may become a stop string."""
        return self._held

    def push(self, text: str) -> StopMatch:
        """Match new text. After a match, the rest of `text` is dropped and the matcher is reset."""
        stops, node = self._set, self._node
        if not node and stops.first_chars.isdisjoint(text):
            return StopMatch(text)
        for position, char in enumerate(text, 1):
            node = stops.step(node, char)
            stop = stops.matches[node]
            if stop is not None:
                seen = self._held + text[:position]
                self._node, self._held = 0, ""
                return StopMatch(seen[: len(seen) - len(stop)], stop)
        return self._hold(self._held + text, node)

    def _hold(self, seen: str, node: int) -> StopMatch:
        safe = len(seen) - self._set.depths[node]
        self._node, self._held = node, seen[safe:]
        return StopMatch(seen[:safe])

    def flush(self) -> str:
        """Return the held text at the end of the sequence, and reset the matcher."""
        held, self._held, self._node = self._held, "", 0
        return held

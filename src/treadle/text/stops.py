"""Stop strings, found across any borders between chunks.

One Aho-Corasick automaton reads each character once. Its state's depth is the length of the longest suffix of the text
that is a prefix of a stop string: exactly what must be held back.

The text ends at the first position where any stop string is complete; of those that are complete there, the one that
starts earliest wins. So the cut never depends on how the text arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InvalidRequest


class StopMatch(NamedTuple):
    """`text` may be shown now. `stop` is the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopSet:
    """The automaton of some stop strings: immutable, shared by the sequences of a request.

    Raises InvalidRequest for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequest("a stop string is empty; leave it out", param="stop")
        self.moves: list[dict[str, int]] = [{}]
        self.depths: list[int] = [0]
        self.matches: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self.firsts = frozenset(self.moves[0])
        self.falls = self._fall_links()

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, char in enumerate(stop, 1):
            follower = self.moves[node].get(char)
            if follower is None:
                follower = self.moves[node][char] = len(self.moves)
                self.moves.append({})
                self.depths.append(depth)
                self.matches.append(None)
            node = follower
        self.matches[node] = stop

    def _fall_links(self) -> list[int]:
        """For each node the node of its longest proper suffix; matches are inherited along the way."""
        falls = [0] * len(self.moves)
        queue = deque(self.moves[0].values())
        while queue:
            node = queue.popleft()
            self.matches[node] = self.matches[node] or self.matches[falls[node]]
            for char, follower in self.moves[node].items():
                falls[follower] = self._step(falls, falls[node], char)
                queue.append(follower)
        return falls

    def _step(self, falls: list[int], node: int, char: str) -> int:
        while node and char not in self.moves[node]:
            node = falls[node]
        return self.moves[node].get(char, 0)

    def step(self, node: int, char: str) -> int:
        """The node after reading `char` at `node`."""
        return self._step(self.falls, node, char)


class StopStrings:
    """The stop strings of one sequence."""

    def __init__(self, stops: Sequence[str] | StopSet) -> None:
        self._set = stops if isinstance(stops, StopSet) else StopSet(stops)
        self._node = 0
        self._held = ""

    @property
    def held(self) -> str:
        """Text that may still become a stop string."""
        return self._held

    def push(self, text: str) -> StopMatch:
        """Take new text. After a match the rest of it is dropped and the object is at its start again."""
        stops, node = self._set, self._node
        if not node and stops.firsts.isdisjoint(text):
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
        """The held text, at the end of the sequence: it became no stop string."""
        held, self._held, self._node = self._held, "", 0
        return held

"""Base of views of a row's tokens, which read as sequences and copy nothing in advance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload


class TokenView(Sequence[int]):
    """A sequence of tokens of which `part` gives those from `start` to `stop`. Slices have no step."""

    __slots__ = ()

    @abstractmethod
    def part(self, start: int, stop: int) -> list[int]:
        """Return the tokens at `start` and behind it, in front of `stop`; both are within the sequence."""

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        start, stop, step = (index if isinstance(index, slice) else slice(index, index + 1 or None)).indices(len(self))
        assert step == 1
        found = self.part(start, stop)
        return found if isinstance(index, slice) else found[0]

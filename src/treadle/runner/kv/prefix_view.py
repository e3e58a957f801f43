"""View of a growing list's first items, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class PrefixView(Sequence[int]):
    """The first `count` of `tokens`; more may be appended to them meanwhile."""

    __slots__ = ("_count", "_tokens")

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        assert count <= len(tokens)
        self._tokens = tokens
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self._tokens[slice(*index.indices(self._count))]
        return self._tokens[range(self._count)[index]]

"""Pages and slots that belong to cached blocks of tokens, and are given to others when these need them. Pure numbers.

A unit is free, one sequence's own, or attached to a block of the prefix index, which is known by its `handle`: its page
or copy in layers that see all tokens. Sequences hold attached units together and never write them. Units that are
attached and that no sequence holds are idle: a block can be reused with them until all free ones are taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ...cache.prefix_index import PrefixIndex


def places_to_keep(index: PrefixIndex, salt: str, tokens: Sequence[int], reused: int) -> list[int]:
    """Return the positions in a new sequence that other prompts may go on from, as blocks end there, behind its first
    `reused` blocks: that at which it parts from cached blocks, and the last one before its end."""
    ends = len(index.find(salt, tokens).nodes), (len(tokens) - 1) // index.block
    return [end * index.block for end in ends if end > reused]


class BlockResources:
    """`count` units; `name` is what they are called in errors."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._free = list(range(count - 1, -1, -1))
        self._unit_of: dict[int, int] = {}
        self._handle_of: dict[int, int] = {}
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> int:
        """Units that sequences hold."""
        return self.count - len(self._free) - len(self._idle)

    @property
    def idle(self) -> int:
        """Units that only cached blocks have."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Units that no sequence holds."""
        return len(self._free) + len(self._idle)

    def has(self, handle: int) -> bool:
        """Whether the block with this handle has a unit."""
        return handle in self._unit_of

    def detach(self, handles: Iterable[int]) -> None:
        """Free the units of these blocks, which have left the index, once no sequence holds them."""
        for handle in handles:
            if (unit := self._unit_of.get(handle)) is not None:
                self._separate(unit)
                if not self._holders[unit]:
                    del self._idle[unit]
                    self._recycle(unit)

    def _take(self) -> int:
        """Take a free unit, or an idle one, for a sequence. Raises MemoryError where there is none."""
        if not self._free:
            if not self._idle:
                raise MemoryError(f"all {self.count} {self._name} are held")
            unit, _ = self._idle.popitem(last=False)
            self._separate(unit)
            self._recycle(unit)
        unit = self._free.pop()
        self._holders[unit] = 1
        return unit

    def _attach(self, unit: int, handle: int) -> int:
        """Attach a unit that a sequence holds to a block. Return the one to hold instead: the block's, if it had
        one."""
        there = self._unit_of.get(handle)
        if unit == there or unit in self._handle_of:
            return unit
        if there is not None:
            self._hold(there)
            self._let_go(unit)
            return there
        self._unit_of[handle], self._handle_of[unit] = unit, handle
        return unit

    def _hold(self, unit: int) -> None:
        self._idle.pop(unit, None)
        self._holders[unit] += 1

    def _let_go(self, unit: int, *, last: bool = True) -> None:
        """Let go of a unit. One that becomes idle is given away after all others that are idle if it comes `last`, else
        before them."""
        self._holders[unit] -= 1
        if self._holders[unit]:
            return
        if unit not in self._handle_of:
            self._recycle(unit)
        else:
            self._idle[unit] = None
            self._idle.move_to_end(unit, last=last)

    def _recycle(self, unit: int) -> None:
        self._free.append(unit)

    def _separate(self, unit: int) -> None:
        del self._unit_of[self._handle_of.pop(unit)]

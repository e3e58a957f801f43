"""The merged caches of the sequences that decode together.

Rules: a sequence's caches are either its own or inside the batch, never both. A batch of one is that sequence's own
caches (no padding, no mask). Sequences that were released are filtered out when the batch is next arranged; those that
only pause get caches of their own again, evaluated at once, so that the next forward pass does not advance them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ... import mlxlm
from ...mlxlm import Caches


@dataclass(slots=True, eq=False)
class PaddedState:
    """A sequence's caches, None while they are inside the batch, which hold `cached` tokens.

    `stored` of its tokens are in a snapshot already, and it is to be stored after as many as `checkpoints` says, and
    when it leaves, after `committed` ones (None: it failed, and nothing it leaves can be trusted).
    """

    caches: Caches | None
    cached: int = 0
    stored: int = 0
    committed: int | None = None
    checkpoints: list[int] = field(default_factory=list)
    shares: bool = True


class DecodeBatch:
    """`members` are the sequences inside, in the order of the caches' first axis; None is one that has left."""

    def __init__(self) -> None:
        self.members: list[PaddedState | None] = []
        self.caches: Caches = []

    @property
    def kv_bytes(self) -> int:
        return mlxlm.kv_bytes(self.caches)

    def drop(self) -> None:
        """Forget everything inside."""
        self.members, self.caches = [], []

    def __contains__(self, state: PaddedState) -> bool:
        return state in self.members

    def caches_of(self, state: PaddedState) -> Caches:
        """The caches of a sequence inside, lazily: they hold on to the batch until they are evaluated, and are the
        sequence's own where it is alone."""
        return mlxlm.extract(self.caches, self.members.index(state)) if len(self.members) > 1 else self.caches

    def forget(self, state: PaddedState) -> None:
        """Drop a sequence that has left. The last one's caches go at once."""
        self.members = [None if member is state else member for member in self.members]
        if not any(member is not None for member in self.members):
            self.drop()

    def take_out(self, states: Collection[PaddedState]) -> None:
        """Give those of `states` that are inside, as they have forced tokens to compute, their caches back."""
        inside = [member for member in self.members if member is not None]
        staying = [member for member in inside if member not in states]
        if len(staying) < len(inside):
            self.arrange(staying)

    def arrange(self, wanted: Sequence[PaddedState]) -> None:
        """Hold exactly the sequences `wanted`, in any order.

        Newcomers give up their caches; members that are not wanted get theirs back. On an exception the batch is empty,
        so that no sequence is left in it half-way: those without caches are lost.
        """
        if set(wanted) == set(self.members):
            return
        members, caches = self.members, self.caches
        self.drop()
        _split_off(members, caches, set(wanted))
        stay = [i for i, member in enumerate(members) if member in set(wanted)]
        staying = {members[i] for i in stay}
        join = [state for state in wanted if state not in staying]
        if len(stay) == 1 and len(members) > 1:
            caches = mlxlm.extract(caches, stay[0])
        elif 1 < len(stay) < len(members):
            mlxlm.keep_rows(caches, stay)
        self.caches = _joined(caches if stay else [], len(stay), [_taken_from(state) for state in join])
        self.members = [*(members[i] for i in stay), *join]


def _taken_from(state: PaddedState) -> Caches:
    caches, state.caches = state.caches, None
    assert caches is not None, "its caches are in a batch already"
    return caches


def _split_off(members: Sequence[PaddedState | None], caches: Caches, wanted: set[PaddedState]) -> None:
    for place, member in enumerate(members):
        if member is not None and member not in wanted:
            member.caches = mlxlm.extract(caches, place) if len(members) > 1 else caches
            mx.eval(mlxlm.states(member.caches))


def _joined(caches: Caches, count: int, newcomers: list[Caches]) -> Caches:
    """`caches` of `count` sequences (a sequence's own if that is one) with the newcomers' behind them."""
    if not newcomers:
        return caches
    if count < 2:
        rows = [caches, *newcomers] if count else newcomers
        return mlxlm.merge(rows) if len(rows) > 1 else rows[0]
    mlxlm.extend(caches, mlxlm.merge(newcomers))
    return caches

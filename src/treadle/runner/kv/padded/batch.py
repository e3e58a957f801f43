"""The caches of the rows that decode together.

Rules: a row's caches are either its own or inside the batch, never both. A batch of one is that row's own caches (no
padding, no mask). Rows that were released are filtered out when the batch is next arranged; rows that are only held
back get caches of their own again, evaluated at once, so that the next forward pass does not advance them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import mlx.core as mx

from ... import mlxlm
from ...mlxlm import Caches


class DecodeBatch:
    """`ids` are the rows inside, in the order of the caches' first axis; None is one that has left."""

    def __init__(self) -> None:
        self.ids: list[str | None] = []
        self.caches: Caches = []

    @property
    def kv_bytes(self) -> int:
        return mlxlm.kv_bytes(self.caches)

    def drop(self) -> None:
        """Forget everything inside."""
        self.ids, self.caches = [], []

    def of(self, row: str) -> Caches:
        """The caches of a row inside, lazily: they hold on to the batch until they are evaluated, and are the row's own
        where it is alone."""
        return mlxlm.extract(self.caches, self.ids.index(row)) if len(self.ids) > 1 else self.caches

    def forget(self, row: str) -> None:
        """The row has left, and its id may come back as another's. The last one's caches go at once."""
        self.ids = [None if id_ == row else id_ for id_ in self.ids]
        if not any(id_ is not None for id_ in self.ids):
            self.drop()

    def arrange(self, wanted: Sequence[str], own: MutableMapping[str, Caches]) -> None:
        """Hold exactly the rows `wanted`, in any order.

        Newcomers are taken out of `own`; rows inside that are not wanted are put there. On an exception the batch is
        empty, so no row is left in it half-way: those not in `own` are lost.
        """
        if set(wanted) == set(self.ids):
            return
        ids, caches = self.ids, self.caches
        self.drop()
        _split_off(ids, caches, set(wanted), own)
        stay = [i for i, id_ in enumerate(ids) if id_ in set(wanted)]
        staying = {ids[i] for i in stay}
        join = [id_ for id_ in wanted if id_ not in staying]
        if len(stay) == 1 and len(ids) > 1:
            caches = mlxlm.extract(caches, stay[0])
        elif 1 < len(stay) < len(ids):
            mlxlm.keep_rows(caches, stay)
        self.caches = _joined(caches if stay else [], len(stay), [own.pop(id_) for id_ in join])
        self.ids = [*(ids[i] for i in stay), *join]


def _split_off(ids: list[str | None], caches: Caches, wanted: set[str], own: MutableMapping[str, Caches]) -> None:
    for place, id_ in enumerate(ids):
        if id_ is not None and id_ not in wanted:
            own[id_] = mlxlm.extract(caches, place) if len(ids) > 1 else caches
            mx.eval(mlxlm.states(own[id_]))


def _joined(caches: Caches, count: int, newcomers: list[Caches]) -> Caches:
    """`caches` of `count` rows (their own if that is one) with the newcomers' behind them."""
    if not newcomers:
        return caches
    if count < 2:
        rows = [caches, *newcomers] if count else newcomers
        return mlxlm.merge(rows) if len(rows) > 1 else rows[0]
    mlxlm.extend(caches, mlxlm.merge(newcomers))
    return caches


def own_bytes(own: Mapping[str, Caches]) -> int:
    """Bytes in the caches of rows outside the batch."""
    return sum(mlxlm.kv_bytes(caches) for caches in own.values())

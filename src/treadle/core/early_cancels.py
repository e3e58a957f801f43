"""Ids without a live sequence: cancels that precede their Submit, and sequences that ended lately."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .messages import CancelReason

EARLY_CANCEL_S = 30.0
REMEMBERED_IDS = 4096


class EarlyCancels:
    """Memory of such ids, REMEMBERED_IDS of each kind at most."""

    def __init__(self) -> None:
        self._early: OrderedDict[str, tuple[float, CancelReason]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def cancelled(self, id_: str, reason: CancelReason, now: float) -> None:
        """Remember the cancel of an unknown id for EARLY_CANCEL_S, unless its sequence has ended."""
        if id_ not in self._ended:
            self._early[id_] = (now, reason)
            _trim(self._early)

    def submitted(self, id_: str, now: float) -> CancelReason | None:
        """Return why `id_`, which is submitted now, was cancelled before, if it was."""
        self._ended.pop(id_, None)
        early = self._early.pop(id_, None)
        return early[1] if early is not None and now - early[0] <= EARLY_CANCEL_S else None

    def ended(self, id_: str) -> None:
        """Remember that the sequence of `id_` has ended."""
        self._ended[id_] = None
        _trim(self._ended)


def _trim(remembered: OrderedDict[str, Any]) -> None:
    while len(remembered) > REMEMBERED_IDS:
        remembered.popitem(last=False)

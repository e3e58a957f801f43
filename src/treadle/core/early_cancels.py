"""Ids that are not there: cancels that came before their Submit, and who has ended of late."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .messages import CancelReason

EARLY_CANCEL_S = 30.0
REMEMBERED_IDS = 4096


class EarlyCancels:
    """Remembers REMEMBERED_IDS of each kind."""

    def __init__(self) -> None:
        self._early: OrderedDict[str, tuple[float, CancelReason]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def cancelled(self, id_: str, reason: CancelReason, now: float) -> None:
        """A cancel of nobody: remembered for EARLY_CANCEL_S, unless it is only late."""
        if id_ not in self._ended:
            self._early[id_] = (now, reason)
            _trim(self._early)

    def submitted(self, id_: str, now: float) -> CancelReason | None:
        """`id_` comes: why it was cancelled before, if it was."""
        self._ended.pop(id_, None)
        early = self._early.pop(id_, None)
        return early[1] if early is not None and now - early[0] <= EARLY_CANCEL_S else None

    def ended(self, id_: str) -> None:
        self._ended[id_] = None
        _trim(self._ended)


def _trim(remembered: OrderedDict[str, Any]) -> None:
    while len(remembered) > REMEMBERED_IDS:
        remembered.popitem(last=False)

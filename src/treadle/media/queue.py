"""Queue of images. The next image of a tenant outlasts one of another tenant, which may take longer than any waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass
from weakref import WeakValueDictionary

from ..errors import Busy
from ..text.work.item_queue import ItemQueue, QueuedItem, QueueWords
from .messages import Prepare

WORDS = QueueWords("too many images wait to be read", "no image process came free")


@dataclass(eq=False, kw_only=True)
class ImageItem(QueuedItem):
    """One image, from its caller to its pixels. `attempts` counts the processes that have begun it."""

    order: Prepare
    data: bytes
    attempts: int = 0

    @property
    def size(self) -> int:
        return len(self.data)


class ImageQueue(ItemQueue[ImageItem]):
    """Queue of images that wait for `max_wait_s` seconds. One image of each tenant waits for `longest_s` more, the
    longest time of an image, where all that are at work then are of others: `at_work` returns the tenants of these."""

    def __init__(
        self, max_wait_s: float, longest_s: float, busy: Callable[[str], Busy], at_work: Callable[[], Container[str]]
    ) -> None:
        super().__init__(max_wait_s, busy, WORDS)
        self._longest_s = longest_s
        self._at_work = at_work
        self._kept: WeakValueDictionary[str, ImageItem] = WeakValueDictionary()
        self._last = ""

    def take(self, fits: Callable[[ImageItem], bool] = lambda item: True) -> ImageItem:
        """Return the next image, as ItemQueue does, of another tenant than the last one if there is any: a tenant that
        had left the line stands behind one that always has an image in it."""
        try:
            item = super().take(lambda item: item.tenant != self._last and fits(item))
        except IndexError:
            item = super().take(fits)
        self._last = item.tenant
        return item

    def _expire(self, item: ImageItem) -> None:
        kept = self._kept.get(item.tenant)
        if item.tenant in self._at_work() or (kept is not None and not kept.result.done()):
            super()._expire(item)
            return
        self._kept[item.tenant] = item
        item.expiry = asyncio.get_running_loop().call_later(self._longest_s, super()._expire, item)

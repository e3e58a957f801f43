"""Memory of the paged backend for one model: pages of its layers, and slots of recurrent states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from ..backend import LeastMemory
from ..cost import KvCost
from ..recurrent_group import ROW_SLOTS, TEST_SLOTS, RecurrentConfig
from .kernels import Kernels
from .paged_pass import PAGE

SLACK = PAGE
"""Tokens behind a window that are kept: a sequence may go back by so many."""
_LEAST_PAGES = 2
"""Pages that the smallest warm-up steps take: one for each of two sequences."""


class LayerConfig(NamedTuple):
    """One layer's `window` (0: none), and the `kernels` that read its heads; layers of one shape have the same. The
    windows of a `chunked` layer begin at multiples of their length."""

    window: int
    kernels: Kernels
    chunked: bool = False


def uniform(windows: Iterable[int], kernels: Kernels) -> list[LayerConfig]:
    """Layers of one shape."""
    return [LayerConfig(window, kernels) for window in windows]


@dataclass(frozen=True)
class PagedMemory:
    """`pages` pages for `layers`, and `slots` slots for `recurrent` layers.

    Steps compute at most `step_tokens` tokens of `max_running` sequences of `context` tokens (0: not known). Where some
    layers see all tokens, those with a window have pages of their own, for the tokens that such sequences can see.
    """

    layers: Sequence[LayerConfig]
    pages: int = field(kw_only=True)
    max_running: int = field(default=0, kw_only=True)
    step_tokens: int = field(default=0, kw_only=True)
    context: int = field(default=0, kw_only=True)
    recurrent: RecurrentConfig | None = field(default=None, kw_only=True)
    slots: int = field(default=TEST_SLOTS, kw_only=True)

    @property
    def int8(self) -> bool:
        """Whether keys and values are stored as int8."""
        return any(layer.kernels.int8 for layer in self.layers)

    @property
    def windows(self) -> list[int]:
        """The windows of groups of layers with pages of their own, ascending."""
        windows = {layer.window for layer in self.layers}
        return sorted(windows - {0}) if 0 in windows else []

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers without pages of their own."""
        return self.page_bytes_of(0) if self.windows else sum(layer.kernels.page_bytes for layer in self.layers)

    @property
    def cost(self) -> KvCost:
        """Memory of a sequence, by the token and at most for its windows."""
        row_bytes = sum(self._seen_pages(window) * self.page_bytes_of(window) for window in self.windows)
        return KvCost(self.page_bytes // PAGE, row_bytes + ROW_SLOTS * self.slot_bytes)

    @property
    def slot_bytes(self) -> int:
        return 0 if self.recurrent is None else self.recurrent.slot_bytes

    def window_pages(self, window: int) -> int:
        """Pages of the layers with `window`: for all tokens where these are fewer than what sequences see, which is
        enough then, as each token has a page in the other layers."""
        if not self.max_running or not self.step_tokens:
            return self.pages
        return min(self.pages, self._most_pages(window))

    @property
    def most_window_bytes(self) -> int:
        """Bytes of the most pages of layers with pages of their own."""
        return sum(self._most_pages(window) * self.page_bytes_of(window) for window in self.windows)

    def with_memory(self, budget: int) -> Self:
        """This backend with as many pages as `budget` bytes hold. Cached states take half of it at most."""
        if self.recurrent is not None and self.max_running:
            own = ROW_SLOTS * self.max_running
            slots = min(2 * own, max(own, budget // 2 // self.slot_bytes))
            return replace(self, slots=slots)._with_pages(budget - slots * self.slot_bytes)
        return self._with_pages(budget)

    def for_rows(self, max_running: int) -> Self:
        return replace(self, max_running=max_running)

    def _with_pages(self, budget: int) -> Self:
        each = self.page_bytes + sum(map(self.page_bytes_of, self.windows))
        if not each:  # recurrent layers alone: pages are numbers
            return replace(self, pages=2 * self.max_running * -(-self.context // PAGE))
        if self.max_running and self.step_tokens:
            for window in sorted(self.windows, key=self._most_pages):
                most = self._most_pages(window)
                if budget // each > most:
                    budget -= most * self.page_bytes_of(window)
                    each -= self.page_bytes_of(window)
        return replace(self, pages=max(0, budget // each))

    def page_bytes_of(self, window: int) -> int:
        """Bytes of a page in all layers with this window."""
        return sum(layer.kernels.page_bytes for layer in self.layers if layer.window == window)

    def _seen_pages(self, window: int) -> int:
        """The most pages that a sequence holds of a window, whatever of its tokens is in flight."""
        return -(-(window + SLACK) // PAGE) + 2

    def _most_pages(self, window: int) -> int:
        """Pages with which sequences never lack one, and as many again to keep the windows of cached prefixes."""
        in_flight = 2 * -(-self.step_tokens // PAGE)
        return 2 * self.max_running * self._seen_pages(window) + in_flight

    def least_memory(self, max_running: int) -> LeastMemory:
        each = self.page_bytes + sum(map(self.page_bytes_of, self.windows))
        pages = LeastMemory(_LEAST_PAGES * each, f"{_LEAST_PAGES} pages", "give more `memory`")
        if self.recurrent is None:
            return pages
        slots = ROW_SLOTS * max_running * self.slot_bytes
        fix = "lower `max_running`, or give more `memory`"
        return LeastMemory(
            slots + pages.nbytes, f"the recurrent states of {max_running} sequences and {pages.holds}", fix
        )

"""Layer caches of the paged backend: attention over shared pages by CUDA kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...mlxlm import FETCHED, Window, identity
from ..seen_queries import Seen
from .kernels import Kernels
from .paged_pass import LayerKind, PagedPass
from .pool import Pool


class _Queries(NamedTuple):
    """Queries (T, query heads, 1, D) of a pass, with `scale`, `sinks` and `rotated` as `Kernels.attend` takes them."""

    own: Any
    scale: float
    sinks: Any | None = None
    rotated: Any | None = None

    def part(self, tokens: slice) -> _Queries:
        rotated = None if self.rotated is None else self.rotated[tokens]
        return self._replace(own=self.own[tokens], rotated=rotated)


class PagedLayer:
    """A layer of some `kind`, with its `pool` and the `kernels` that read it."""

    def __init__(self, kind: LayerKind, kernels: Kernels, pool: Pool, step: PagedPass) -> None:
        self.kind = kind
        self.kernels = kernels
        self.pool = pool
        self.step = step
        self.written: Any = None

    @property
    def offset(self) -> Any:
        """Positions (T,) of the pass's tokens."""
        return self.step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask, as the kernels compute it; or the window, where only the model knows it."""
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write `keys` and `values` (T, kv heads, 1, D) to the pool; in a latent layer latents and rotated keys."""
        slots = self.step.tables[self.kind.table].slots
        self.written = self.kernels.write(self.pool, keys, values, slots)
        return FETCHED.put(self, keys, identity(values.shape[-1], values.dtype) if self.kernels.latent else values)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the pass's keys and values, for a layer that shares them."""
        return FETCHED.of(self)

    def attend(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        scale: float,
        window: int,
        sinks: Any | None,
        *,
        softcap: float = 0.0,
    ) -> Any:
        """Causal attention (T, query heads, 1, DV) of `queries` (T, query heads, 1, D), each token over its own
        sequence. `keys` and `values` are what `update_and_fetch` returned: the self-test checks that."""
        assert softcap == self.kernels.softcap
        kind = self.kind._replace(window=min(filter(None, (window, self.kind.window)), default=0))
        return self._attention(self.step, kind, _Queries(queries, scale, sinks), self.written)

    def attend_latent(self, queries: Any, rotated: Any, latents: Any, scale: float) -> Any:
        """Causal attention (T, query heads, 1, DV) over latents, which `update_and_fetch` got, of absorbed `queries` of
        that shape and their `rotated` parts, which are scaled already."""
        return self._attention(self.step, self.kind, _Queries(queries, scale, rotated=rotated), self.written)

    def attention(
        self,
        step: PagedPass,
        queries: Any,
        written: Any,
        scale: float,
        sinks: Any | None = None,
        rotated: Any | None = None,
    ) -> Any:
        """Attention as by `attend`, or with `rotated` as by `attend_latent`, in `step`, once the array `written` is
        there."""
        return self._attention(step, self.kind, _Queries(queries, scale, sinks, rotated), written)

    def _attention(self, step: PagedPass, kind: LayerKind, queries: _Queries, written: Any) -> Any:
        if step.seen is not None and not (kind.window or kind.chunk or self.kernels.latent):
            step.seen.append(Seen((self.kernels, self.pool), queries.own, queries.scale))
        border = step.decode_tokens
        if border in (0, step.count):
            return self._launch(step, kind, queries, written, decode=border > 0)
        first = self._launch(step, kind, queries.part(slice(border)), written, decode=True)
        return self._launch(step, kind, queries.part(slice(border, None)), written, decode=False, leading=first)

    def _launch(
        self, step: PagedPass, kind: LayerKind, queries: _Queries, written: Any, *, decode: bool, leading: Any = None
    ) -> Any:
        return self.kernels.attend(
            queries.own,
            self.pool,
            step.tiles_of(kind, decode=decode),
            step.tables[kind.table].pages[decode],
            step.counters[decode],
            written,
            scale=queries.scale,
            window=kind.window,
            sinks=queries.sinks,
            rotated=queries.rotated,
            leading=leading,
        )

"""Layer caches of the contiguous backend: attention over each sequence's own buffers by MLX's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ...mlxlm import FETCHED, LayerWritten, Window, identity
from ..seen_queries import Seen
from .buffer import Buffer
from .placing import PlacedSegment
from .stack import Stack


@dataclass
class ContiguousPass:
    """A step's data that all layers share: segments of one token, longer ones behind them, the tokens' positions
    (T,). `wanted` are the tokens that reach the head, as segments of one token, where these are fewer than all and the
    last layer may compute them alone, at the positions `ends`. Where the pass is observed, `seen` gets the queries of
    layers that see all tokens. `stacks` of layers hold the sequences of the single tokens, and `masks` what is seen of
    them."""

    singles: Sequence[PlacedSegment] = ()
    longer: Sequence[PlacedSegment] = ()
    positions: Any = None
    wanted: Sequence[PlacedSegment] | None = None
    ends: Any = None
    seen: list[Seen] | None = None
    writes: bool = True
    attends: bool = True
    stacks: Sequence[Stack | None] = ()
    masks: dict[Any, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Keep no sequence that leaves."""
        self.singles = self.longer = ()
        self.wanted = None
        self.stacks = ()
        self.masks.clear()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let layers take keys and values inside the block, and raise LayerWritten instead of attending."""
        self.attends = False
        try:
            yield
        finally:
            self.attends = True

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """Let layers attend for the `wanted` tokens alone inside the block, and take no keys and values."""
        assert self.wanted is not None
        before = self.singles, self.longer, self.positions, self.stacks
        self.singles, self.longer, self.positions, self.writes = self.wanted, (), self.ends, False
        self.stacks = ()
        try:
            yield
        finally:
            self.singles, self.longer, self.positions, self.stacks = before
            self.writes = True

    def check_attends(self) -> None:
        """Raise LayerWritten where nothing is to be attended to."""
        if not self.attends:
            raise LayerWritten


class ContiguousLayer:
    """Layer `index`; `window` is 0 where it sees everything. With `matmuls`, the attention of single tokens is two
    matrix products and a softmax: fewer operations, where each is a task for a thread, as on the CPU. A
    `latent` layer holds latents and rotated keys; in a `chunked` one windows begin at multiples of their length."""

    def __init__(
        self,
        index: int,
        window: int,
        step: ContiguousPass,
        *,
        matmuls: bool,
        latent: bool = False,
        chunked: bool = False,
    ) -> None:
        self._index = index
        self._window = 0 if chunked else window
        self._chunk = window if chunked else 0
        self._step = step
        self._matmuls = matmuls
        self._latent = latent

    @property
    def narrows(self) -> bool:
        """Whether the layer may compute the tokens that reach the head alone, inside of `narrowed`."""
        return self._step.wanted is not None

    @property
    def offset(self) -> Any:
        """Positions (T,) of the batch's tokens."""
        return self._step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask, as `attend` knows it; or the window, where only the model knows it."""
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append each sequence's part of `keys` and `values` (T, kv heads, 1, D) to its buffers."""
        if self._step.writes:
            self._append(keys, values)
        return FETCHED.put(self, keys, identity(values.shape[-1], values.dtype) if self._latent else values)

    def _append(self, keys: Any, values: Any) -> None:
        count = len(self._step.singles)
        if (stack := self._stack) is not None:
            whole = keys.shape[0] == count
            stack.append(*((keys, values) if whole else (keys[:count], values[:count])))
            count = 0
        for segment, own_keys, own_values in zip(
            self._step.singles[:count], _rows(keys, count), _rows(values, count), strict=True
        ):
            self._buffer(segment).append(own_keys, own_values)
        for segment in self._step.longer:
            self._buffer(segment).append(_part_of(keys, segment), _part_of(values, segment))

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
        self._step.check_attends()
        window = min(filter(None, (window, self._window)), default=0)
        if self._step.seen is not None and not (window or self._chunk):
            self._step.seen.append(Seen(self._index, queries, scale))
        parts = self._attend_singles(queries, scale, window, sinks, softcap)
        for segment in self._longer():
            parts.append(self._attend_longer(_part_of(queries, segment), segment, scale, window, sinks, softcap))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _attend_singles(self, queries: Any, scale: float, window: int, sinks: Any | None, softcap: float) -> list[Any]:
        if (stack := self._stack) is not None:
            return [self._attend_stacked(stack, queries, scale, window, sinks, softcap)]
        seen = [self._seen(segment, window) for segment in self._step.singles]
        if not seen:
            return []
        if not softcap and not self._matmuls:
            rows = _rows(queries, len(seen))
            return [_fused(own, *kv, scale=scale, sinks=sinks) for own, kv in zip(rows, seen, strict=True)]
        # The queries of one kv head are as good as a longer query that sees everything.
        count, heads = len(seen), seen[0][0].shape[1]
        grouped = (queries[:count] * scale).reshape(count, heads, -1, queries.shape[-1])
        if sinks is not None:
            sinks = sinks.reshape(1, heads, -1, 1).astype(grouped.dtype)
        parts = [
            _attend_by_matmuls(own, *kv, softcap, sinks=sinks)
            for own, kv in zip(_rows(grouped, count), seen, strict=True)
        ]
        out = parts[0] if count == 1 else mx.concatenate(parts)
        return [out.reshape(count, -1, 1, out.shape[-1])]

    def _attend_stacked(
        self, stack: Stack, queries: Any, scale: float, window: int, sinks: Any | None, softcap: float
    ) -> Any:
        keys, values, mask = stack.seen(window, self._step.masks)
        count, heads = keys.shape[:2]
        grouped = (queries if queries.shape[0] == count else queries[:count]) * scale
        grouped = grouped.reshape(count, heads, -1, queries.shape[-1])
        if sinks is not None:
            sinks = mx.broadcast_to(sinks.reshape(1, heads, -1, 1).astype(grouped.dtype), (*grouped.shape[:3], 1))
        out = _attend_by_matmuls(grouped, keys, values, softcap, mask, sinks)
        return out.reshape(count, -1, 1, out.shape[-1])

    def _longer(self) -> Iterator[PlacedSegment]:
        """The segments of several tokens, in a chunked layer as parts that are in one chunk each."""
        for segment in self._step.longer:
            if not self._chunk or segment.visible(0, self._chunk) is not None:
                yield segment
                continue
            start, end = segment.end - segment.count, segment.end
            borders = range(start // self._chunk * self._chunk + self._chunk, end, self._chunk)
            for low, high in pairwise([start, *borders, end]):
                yield PlacedSegment(segment.first + low - start, high - low, high, segment.buffers)

    def _attend_longer(
        self, queries: Any, segment: PlacedSegment, scale: float, window: int, sinks: Any | None, softcap: float
    ) -> Any:
        """Attention (n, query heads, 1, DV) of one segment with `queries` (1, query heads, n, D)."""
        keys, values = self._seen(segment, window)
        seen = keys.shape[2]
        mask = self._mask(segment, window, seen)
        if mask is None:
            narrow = softcap or (window and segment.end > window)
            mask = _window_mask(segment.count, seen, window or seen) if narrow else "causal"
        if softcap:
            grouped = (queries * scale).reshape(1, keys.shape[1], -1, *queries.shape[2:])
            out = _attend_by_matmuls(grouped, keys[:, :, None], values[:, :, None], softcap, mask).flatten(1, 2)
        else:
            out = _fused(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return out[0].transpose(1, 0, 2)[:, :, None]

    def attend_latent(self, queries: Any, rotated: Any, latents: Any, scale: float) -> Any:
        """Causal attention (T, query heads, 1, DV) over latents, which `update_and_fetch` got, of absorbed `queries`
        and their `rotated` parts, which are scaled already."""
        self._step.check_attends()
        queries, singles = queries * scale, self._step.singles
        if (stack := self._stack) is not None:
            count = len(singles)
            parts = [_attend_to_latents(queries[:count], rotated[:count], *stack.seen(0, self._step.masks))]
        else:
            parts = [
                _attend_to_latents(own, own_rotated, *self._seen(segment, 0))
                for own, own_rotated, segment in zip(
                    _rows(queries, len(singles)), _rows(rotated, len(singles)), singles, strict=True
                )
            ]
        for segment in self._step.longer:
            latent, rotated_keys = self._seen(segment, 0)
            own = mx.concatenate([_part_of(queries, segment), _part_of(rotated, segment)], axis=-1)
            keys = mx.concatenate([latent, rotated_keys], axis=-1)
            mask = self._mask(segment, 0, latent.shape[2])
            out = _fused(own, keys, latent, scale=1.0, mask="causal" if mask is None else mask)
            parts.append(out[0].transpose(1, 0, 2)[:, :, None])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def choices(self, choose: Callable[..., Any | None], *arrays: Any) -> list[Any | None] | None:
        """What `choose` returns for each segment, single tokens first: the cached tokens that it attends to, as a mask
        (1, 1 or query heads, n, S) or as indices, None for all. It gets the segment's part (1, heads, n, D) of each of
        `arrays` (T, heads, 1, D), and this layer's keys (1, kv heads, S, D). None where it chose all everywhere."""
        assert all(one.visible(0, 0) is None for one in self._segments), "choices are made of the tokens before"
        made = [
            choose(*(_part_of(array, segment) for array in arrays), self._seen(segment, 0)[0])
            for segment in self._segments
        ]
        return made if any(one is not None for one in made) else None

    def attend_chosen(
        self, queries: Any, scale: float, chosen: Sequence[Any | None], rotated: Any | None = None
    ) -> Any:
        """Attention as by `attend`, or with `rotated` as by `attend_latent`, over the tokens that are `chosen`, as
        `choices` returns them."""
        self._step.check_attends()
        parts = []
        for segment, choice in zip(self._segments, chosen, strict=True):
            keys, values = self._seen(segment, 0)
            own = _part_of(queries, segment) * scale
            if rotated is not None:
                own = mx.concatenate([own, _part_of(rotated, segment)], axis=-1)
                keys, values = mx.concatenate([keys, values], axis=-1), keys
            out = _attend_to_chosen(own, keys, values, choice)
            parts.append(out[0].transpose(1, 0, 2)[:, :, None])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    @property
    def stacks(self) -> bool:
        """Whether sequences may be stacked: not in chunks, which begin in columns of their own."""
        return self._matmuls and not self._chunk

    @property
    def _stack(self) -> Stack | None:
        stacks = self._step.stacks
        return stacks[self._index] if stacks else None

    def writing(self) -> AbstractContextManager[None]:
        return self._step.writing()

    def narrowed(self) -> AbstractContextManager[None]:
        return self._step.narrowed()

    @property
    def _segments(self) -> list[PlacedSegment]:
        """The step's segments, in the batch's order."""
        return [*self._step.singles, *self._step.longer]

    def _seen(self, segment: PlacedSegment, window: int) -> tuple[Any, Any]:
        """Keys and values that the segment's tokens see."""
        visible = segment.visible(window, self._chunk)
        if visible is not None:
            return self._buffer(segment).between(int(visible[:, 0].min()), segment.end)
        low = max(0, segment.end - (window - 1 + segment.count)) if window else 0
        if self._chunk:
            low = max(low, (segment.end - 1) // self._chunk * self._chunk)
        return self._buffer(segment).between(low, segment.end)

    def _mask(self, segment: PlacedSegment, window: int, seen: int) -> Any | None:
        """Mask (n, seen) of the segment's tokens over the last `seen` cached ones, where what they see does not follow
        from their places."""
        visible = segment.visible(window, self._chunk)
        if visible is None:
            return None
        first, last = mx.split(mx.array(visible - (segment.end - seen)), 2, axis=1)
        others = mx.arange(seen)[None]
        return (others >= first) & (others <= last)

    def _buffer(self, segment: PlacedSegment) -> Buffer:
        return segment.buffers[self._index]


_fused = mx.fast.scaled_dot_product_attention


def _attend_by_matmuls(
    queries: Any, keys: Any, values: Any, softcap: float, mask: Any | None = None, sinks: Any | None = None
) -> Any:
    """Attention of scaled queries, with scores that are capped (0: not), and with `sinks` (1, kv heads, n, 1), the
    scores of a token without a value. A `mask` says what is seen, or is added to scores."""
    scores = queries @ keys.swapaxes(-1, -2)
    if softcap:
        scores = mx.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype != mx.bool_:
        scores = scores + mask
    elif mask is not None:
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True) @ values
    return mx.softmax(mx.concatenate([sinks, scores], axis=-1), axis=-1, precise=True)[..., 1:] @ values


def _attend_to_latents(queries: Any, rotated: Any, latents: Any, rotated_keys: Any, mask: Any | None = None) -> Any:
    """Attention (B, heads, 1, DV) of one token's scaled `queries` of each sequence, of that shape, and of their rotated
    parts. A `mask` is added to scores."""
    scores = queries.swapaxes(1, 2) @ latents.swapaxes(-1, -2) + rotated.swapaxes(1, 2) @ rotated_keys.swapaxes(-1, -2)
    if mask is not None:
        scores = scores + mask
    return (mx.softmax(scores, axis=-1, precise=True) @ latents).swapaxes(1, 2)


def _attend_to_chosen(queries: Any, keys: Any, values: Any, chosen: Any | None) -> Any:
    """Attention (1, query heads, n, DV) of scaled queries over the tokens that are `chosen`: a mask, indices, or None
    for all."""
    if chosen is None:
        return _fused(queries, keys, values, scale=1.0, mask="causal")
    if chosen.dtype == mx.bool_:
        return _fused(queries, keys, values, scale=1.0, mask=chosen)
    return _fused(queries, keys[:, :, chosen], values[:, :, chosen], scale=1.0)


def _rows(array: Any, count: int) -> list[Any]:
    """The first `count` of `array` along its first axis, each as (1, ...)."""
    if count > 1:
        return list(mx.split(array if array.shape[0] == count else array[:count], count))
    return [array[:count]] if count else []


def _part_of(array: Any, segment: PlacedSegment) -> Any:
    """The segment's part (1, heads, n, D) of `array` (T, heads, 1, D)."""
    return array[segment.first : segment.first + segment.count, :, 0].transpose(1, 0, 2)[None]


def _window_mask(count: int, seen: int, window: int) -> Any:
    """Mask (count, seen) of the last `count` tokens over the last `seen`, each with a window."""
    own = mx.arange(seen - count, seen)[:, None]
    others = mx.arange(seen)[None]
    return (others <= own) & (others > own - window)

"""Sequences, their segments of a pass, and the logits that a pass gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace


@dataclass(slots=True, eq=False)
class KvSequence:
    """A live sequence as a KV backend sees it.

    `tokens` are all that are known, the prompt and what was generated; its owner may append to them. `salt` separates
    its prefixes from those of other tenants. `kv` is the backend's own state, None while the backend holds nothing.
    `positions` are those of its tokens where some are apart from the index (`SequencePositions`): as its owner sets
    them, or as segments have them. What is computed of one that is `private` is never reused for others: its cache has
    not all of its tokens.
    """

    id: str
    salt: str
    tokens: Sequence[int]
    kv: Any = field(default=None, init=False)
    positions: Any = field(default=None, init=False)
    private: bool = field(default=False, init=False)

    @property
    def keys(self) -> Sequence[int]:
        """What its tokens are in the prefix index: others stand there for images."""
        return self.tokens


class Features(NamedTuple):
    """Embeddings `rows` (m, D) in place of those of the tokens at `places` (m,) of a segment, in order, as for images.
    What a layer returns gets its part of `deepstack`, (m, D) for each of the first layers, added at these places.

    They stand for what the model's embedding returns, and are multiplied by the model's factor where it has one, as
    Gemma: features that are not to be multiplied come divided by it. Where other parts of a model read token ids, they
    get those of the segment.
    """

    places: npt.NDArray[np.int32]
    rows: Any
    deepstack: Sequence[Any] = ()

    def part(self, start: int, end: int) -> Features | None:
        """Those of tokens `start` to `end` of the segment."""
        low, high = np.searchsorted(self.places, [start, end]).tolist()
        if low == high:
            return None
        deepstack = [rows[low:high] for rows in self.deepstack]
        return Features(self.places[low:high] - start, self.rows[low:high], deepstack)


class RowSegment(msgspec.Struct, frozen=True):
    """The consecutive tokens that one sequence computes in a step; the first has index `start` in its cache.

    Where `previous` is not negative, the last token is the one sampled at that index of the step before, and its value
    here is ignored. `wants` is the number of last tokens whose logits are needed: 0, 1 or all. With `picks` the next
    token is sampled from the last one's logits. `hidden` is the number of last tokens whose hidden states are
    needed, where a pass is asked for any: where they are `observed` those that a drafter reads, which may be of layers
    in the middle, else those behind the last norm. `beside` is the number of tokens that a decode row computes beside
    the one that it feeds: `drafts` behind it, and tokens that are computed again before it. `states` (n, W) are hidden
    states that a head for drafts joins with the tokens. A segment with `padding` fills a batch up to its bucket.

    `positions` (n,) are rotary positions apart from the index, which do not decrease over a sequence. None stands for
    the index, or for those that follow the positions of the sequence's tokens before: text that is decoded behind such
    tokens needs none. Windows count positions. `last_visible` (n,) is the index of the last token that each one sees,
    itself or one behind it in this segment (None: itself). With three axes (n, 3) of positions windows count indices.
    `features` are embeddings of images in place of tokens' own.
    """

    sequence: KvSequence
    tokens: Sequence[int]
    start: int
    wants: int = 0
    picks: bool = False
    previous: int = -1
    padding: bool = False
    hidden: int = 0
    observed: bool = False
    beside: int = 0
    drafts: int = 0
    states: Any = None
    positions: Any = None
    last_visible: Any = None
    features: Features | None = None

    @property
    def id(self) -> str:
        return self.sequence.id

    @property
    def known(self) -> list[int]:
        """The tokens, none of which may still be on the device only."""
        assert self.previous < 0, "a token that is not known yet"
        return list(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def part(self, start: int, end: int, **changed: Any) -> RowSegment:
        """The tokens from index `start` to `end` as a segment of their own, with fields `changed`."""
        low, high = start - self.start, end - self.start
        columns = {name: value[low:high] for name in _COLUMNS if (value := getattr(self, name)) is not None}
        if self.features is not None:
            columns["features"] = self.features.part(low, high)
        return replace(self, tokens=self.tokens[low:high], start=start, **columns, **changed)


_COLUMNS = ("positions", "last_visible")
"""Fields with a value for each token."""


def with_columns(segments: Sequence[RowSegment]) -> list[RowSegment]:
    """Those whose tokens have positions apart from their index, see tokens behind them, or have features."""
    return [
        one
        for one in segments
        if one.positions is not None
        or one.last_visible is not None
        or one.features is not None
        or one.sequence.positions is not None
    ]


_NOBODY = KvSequence("", "", ())


def padding(count: int) -> RowSegment:
    """A segment of `count` tokens that belongs to no sequence."""
    return RowSegment(_NOBODY, (0,) * count, 0, padding=True)


@dataclass(slots=True)
class ForwardOutput:
    """Results of a pass, not evaluated yet.

    `logits` are (N, V), of which sequence `id` has rows `places[id]` as (first, count). `arrays` must be evaluated with
    whatever is computed from the logits. `refused` sequences were not computed and cannot go on; the values are
    reasons. `prefill_s` are seconds spent on prompts alone, where they had a pass of their own. `hidden` are hidden
    states (n, W), by id, where they were asked for. `early` are arrays that may be evaluated before the others, in
    their order: the device begins earlier then.
    """

    logits: Any | None = None
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    arrays: list[Any] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    prefill_s: float | None = None
    hidden: dict[str, Any] = field(default_factory=dict)
    early: Sequence[Any] = ()


def joined_states(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the hidden states of sequences whose segments were computed in `parts`, in order."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        for id_, states in part.items():
            found.setdefault(id_, []).append(states)
    return {id_: states[0] if len(states) == 1 else mx.concatenate(states) for id_, states in found.items()}

"""The protocol of KV backends: how keys and values are held, and how a model attends over them.

A `KvConfig` describes a backend for one model, as it was chosen; `build` makes the backend, which takes its memory.
The runner owns the one registry of live sequences, a mapping by id. A backend reads it, and attaches its state to each
sequence (`KvSequence.kv`): at `reuse` or `admit`, until `release` or `invalidate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from ...cache.prefix_index import PrefixIndex
from ...core.capabilities import Sharing
from ...core.statistics import PrefixStatistics
from ..forward.segments import ForwardOutput, KvSequence, RowSegment
from ..mlxlm import Selection
from ..unsupported import Unsupported as Unsupported

MOST_DRAFTS = 8
"""Draft tokens of a sequence in a pass, at most."""
Live = Mapping[str, KvSequence]
"""The registry of live sequences, by id. The runner adds and removes them."""
Clock = Callable[[], float]


class WarmPass(NamedTuple):
    """A step to run before the first request: `decoding` sequences that decode one token beside a prompt that is
    computed in `chunks`. `scored` asks for log-probabilities of the prompt's tokens, with that many alternatives. With
    `drafts` each of the sequences also verifies so many draft tokens."""

    decoding: int = 0
    chunks: tuple[int, ...] = ()
    scored: int | None = None
    drafts: int = 0


class WarmLimits(NamedTuple):
    """Largest steps to warm up for: sequences that decode, tokens of a sequence, tokens of prompts in a step (0: no
    limit), and draft tokens of a sequence."""

    max_running: int
    context: int
    prefill_tokens: int
    draft_tokens: int = 0


class LeastMemory(NamedTuple):
    """The least cache memory to start with: `nbytes` for `holds`, and how to get along with less."""

    nbytes: int
    holds: str
    fix: str


class KvBackend(Protocol):
    """Keys and values of all live sequences, and the passes over them.

    `name` is the backend's name in the glossary. Memory is given out in `blocks` blocks of `block` tokens (0 blocks: no
    limit). `lookahead` is the number of steps that may be started before one is read. Without `launches_ahead` such a
    step is prepared while the device runs the one before, and handed over when that is finished: it writes to arrays
    that MLX would copy while they are in use. Chunks of prompts should be as long as one of `chunk_sizes` (empty: any
    length), or multiples of `prefill_quantum` tokens (0: any).

    A sequence may verify up to `draft_tokens` draft tokens in a pass (0: none, for the reason `no_drafts`). Where the
    backend `replays`, states can't be cut everywhere: `retract` may leave less of a sequence than it is asked to.

    Segments may have positions apart from the index, and say what their tokens see, unless there is a reason against
    it, `no_positions`; features, unless there is one, `no_features`; positions of three axes, unless there is one,
    `no_axes`.
    """

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def lookahead(self) -> int: ...

    @property
    def launches_ahead(self) -> bool: ...

    @property
    def sharing(self) -> Sharing: ...

    @property
    def index(self) -> PrefixIndex | None:
        """The index of cached blocks; None where no prefixes are kept, or not as blocks."""
        ...

    @property
    def chunk_sizes(self) -> tuple[int, ...]: ...

    @property
    def prefill_quantum(self) -> int: ...

    @property
    def draft_tokens(self) -> int: ...

    @property
    def no_drafts(self) -> str: ...

    @property
    def no_positions(self) -> str: ...

    @property
    def no_features(self) -> str: ...

    @property
    def no_axes(self) -> str: ...

    @property
    def replays(self) -> bool: ...

    def warm_passes(self, limits: WarmLimits) -> list[WarmPass]:
        """Steps that compile or load what is usual, so that no request waits for it."""
        ...

    def least_forced(self, decoding: int) -> int:
        """Return the fewest forced tokens of a sequence that are computed faster in one step than one a step, where
        `decoding` sequences decode; 0 where none are."""
        ...

    def free_blocks(self) -> int:
        """Blocks that no live sequence holds; blocks of the prefix cache alone count as free."""
        ...

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        """Return how many tokens of the longest cached prefix of `tokens` a sequence could reuse. Changes nothing."""
        ...

    def reuse(self, wanted: Sequence[tuple[KvSequence, int]]) -> list[int]:
        """Give each new sequence its first n tokens from the prefix cache; return how many each one got. All prefixes
        are held before anything is allocated."""
        ...

    def admit(self, sequence: KvSequence) -> None:
        """Start a sequence with the prefix that `reuse` gave it, or with nothing. Its `tokens` are known by now, the
        last of which is not to be cached before it is followed by another."""
        ...

    def checkpoint(self, sequence: KvSequence, ends: Sequence[int]) -> None:
        """Make the sequence's first n tokens reusable for each n of `ends`: others wait for them."""
        ...

    def compute(self, segments: Sequence[RowSegment], previous: Any | None, *, hidden: bool = False) -> ForwardOutput:
        """Run a pass over `segments`, one a sequence. `previous` (int32) are the tokens sampled in the step before, and
        maybe zeros behind them. The last pass may be run again, without sequences that have left, when `previous` has
        changed. With `hidden` some segments need hidden states, which `KvConfig.selection` keeps.
        Raises MemoryError where no block is left."""
        ...

    def prepare(self) -> None:
        """Prepare a pass like the last one that verified drafts, if any, while the device computes another. The next
        pass gains if it has the same shapes, and loses nothing otherwise."""
        ...

    def commit(self, segments: Iterable[RowSegment]) -> None:
        """Mark all tokens up to each segment's end as computed and known: other sequences may reuse them."""
        ...

    def retract(self, sequence: KvSequence, length: int) -> int:
        """Forget what the last pass computed behind the first `length` tokens, of rejected drafts, and free its blocks.
        Return how many tokens are left: where the backend `replays`, its drafts are computed again by the sequence's
        next segment, and not committed before. Called after the pass, before its `commit`, and with no other in
        flight."""
        ...

    def release(self, sequence: KvSequence) -> None:
        """Free what the sequence holds; its committed tokens go to the prefix cache. It is not in the registry any
        more. One that the backend holds nothing of is ignored."""
        ...

    def invalidate(self, sequences: Iterable[KvSequence]) -> None:
        """Free what sequences hold after a pass over them failed: whatever was not committed cannot be trusted."""
        ...

    def reset(self) -> int:
        """Clear the prefix cache; the number of tokens in it."""
        ...

    def kv_bytes(self) -> int:
        """Bytes that live sequences hold."""
        ...

    def statistics(self) -> PrefixStatistics: ...

    def close(self) -> None:
        """Free everything."""
        ...


class KvConfig(Protocol):
    """A KV backend that was chosen for a model, not built yet. `fused` says whether its layers are (glossary).
    `selection` chooses what the model's head sees, and keeps hidden states; None where its last norm is not known."""

    @property
    def name(self) -> str: ...

    @property
    def fused(self) -> bool: ...

    @property
    def selection(self) -> Selection | None: ...

    @property
    def keep_prefixes(self) -> bool: ...

    def least_memory(self, max_running: int) -> LeastMemory:
        """Cache memory without which `max_running` sequences cannot start."""
        ...

    def with_memory(self, budget: int) -> Self:
        """The backend with `budget` bytes of cache memory in place of its own."""
        ...

    def for_rows(self, max_running: int) -> Self:
        """The backend for `max_running` sequences in place of its own number."""
        ...

    def build(self, module: Any, live: Live, clock: Clock) -> KvBackend:
        """The backend, empty, for `module`; `live` is the registry of sequences."""
        ...

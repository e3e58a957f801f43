"""A model in memory with what the runner must know about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .. import mlxlm
from ..device.memory import KvCost
from ..device.readback import Readback
from ..forward.batch_buckets import PROMPT_SIZES
from ..kv.backend import KvRows
from ..kv.padded.backend import PaddedBackend
from ..mlxlm import Caches, MlxLm
from ..sampling.sampler import Kernel
from .own_backend import Own

CUDA_QUANTUM = 256
CUDA_PAD = 64


@dataclass(frozen=True)
class LoadedModel:
    """`batched` says whether rows may share one forward pass; otherwise each decodes with its own caches. `own` is how
    their keys and values are kept; None where they are in mlx-lm's caches, and `shares_prefill` says whether several
    prompts may share a pass there. `kv_dtype` is how they are stored, and `prefill_tokens` how many tokens of prompts
    there is memory to compute in a step (0: as many as are asked for). No more than `max_running` rows are expected.
    `draws` picks tokens where a kernel does, and `lands` brings them to the host where another does."""

    name: str
    module: Any
    library: MlxLm
    architecture: str
    vocabulary: int
    context: int
    device: str
    dtype: str
    parameters: int
    weight_bytes: int
    kv: KvCost
    kv_budget_bytes: int
    batched: bool
    shares_prefill: bool
    own: Own | None = None
    kv_dtype: str = ""
    prefill_tokens: int = 0
    max_running: int = 64
    keeps_prefixes: bool = False
    draws: Kernel | None = None
    lands: Readback | None = None
    details: dict[str, str] = field(default_factory=dict)

    @property
    def prefill_quantum(self) -> int:
        """What chunks of a prompt should be multiples of; 0: any number will do. On CUDA attention is planned anew for
        every length of a chunk and of what is before it: about 45 ms on an H200, where the pass itself takes 6."""
        return CUDA_QUANTUM if self.device == "cuda" and self._planned else 0

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """What chunks of a prompt are best long, where passes are compiled for each length; none where any will do."""
        compiled = self.own is not None and self.own.decoder is not None and self.own.plain
        return PROMPT_SIZES if compiled else ()

    @property
    def pad_to(self) -> int:
        """What the length of a pass should be a multiple of, for the same reason."""
        return CUDA_PAD if self.device == "cuda" else 1

    @property
    def _planned(self) -> bool:
        """Whether attention is MLX's own, which plans for lengths."""
        return self.own is None or self.own.kind != "pages"

    def new_body(self, clock: Callable[[], float]) -> KvRows:
        """Rows of this model, none yet."""
        return PaddedBackend(self, clock) if self.own is None else self.own.new_rows(self.module)

    def new_caches(self) -> Caches:
        """Empty caches for one row."""
        return self.library.new_caches(self.module)

    def prefill(self, tokens: Sequence[int], caches: Caches) -> None:
        """Put `tokens` behind what the caches of one row hold. Only caches are evaluated: no logits are computed."""
        extra = -len(tokens) % self.pad_to
        if extra and not mlxlm.can_trim(caches):
            extra = 0
        self.module(mx.array([[*tokens, *[0] * extra]], mx.int32), cache=caches)
        if extra:
            mlxlm.trim(caches, extra)
        mx.eval(mlxlm.states(caches))

    def score(self, tokens: Sequence[int], caches: Caches) -> Any:
        """Like `prefill`; logits (n, V) of all of them, evaluated."""
        logits = self.module(mx.array([list(tokens)], mx.int32), cache=caches)[0]
        mx.eval(logits, mlxlm.states(caches))
        return logits

    def decode(self, tokens: Sequence[int], caches: Caches) -> Any:
        """Logits (B, V), not evaluated, of one more token a row."""
        logits = self.module(mx.array(list(tokens), mx.int32)[:, None], cache=caches)
        return logits[:, -1, :]

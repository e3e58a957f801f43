"""Expected compute path of a model whose weights are not read, by the structure of its layers. The start decides by
self-tests, and on CUDA by the memory that there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx

from ...core.compute_path import Backend
from ...errors import one_line
from .. import mlxlm
from ..device.self_test import FAULTS
from ..kv.backend import Unsupported
from ..kv.contiguous.backend import ContiguousConfig
from ..kv.contiguous.buffer import STEP
from ..kv.cost import KvCost, kv_cost
from ..kv.paged.backend import PagedConfig
from ..kv.paged.kernels import Kernels
from ..mlxlm import MlxLm
from .attention_shape import latent_layers
from .backend_choice import Rejection
from .candidates import page_layers
from .padded_self_test import reason_not_merged
from .routed_layers import known_attention, routed_layers

_ROWS = 3
"""Of a batch that is tried: a mask for a number that heads have too would fit by chance."""
_TOKENS = 6
"""Of the sequence that is measured."""


class Expected(NamedTuple):
    """A KV `backend`, its way to reuse prefixes in words, and the better backends that are `rejected`, best first.

    `cost` is that of a sequence, of which recurrent layers have `state_bytes`. The first allocation of one is of
    `first_tokens` tokens; with pages `config` says what a start takes.
    """

    backend: Backend
    prefixes: str
    rejected: tuple[Rejection, ...] = ()
    cost: KvCost = KvCost(0, 0)
    state_bytes: int = 0
    first_tokens: int = 0
    config: PagedConfig | None = None

    def least_memory(self, max_running: int) -> int:
        """Bytes of cache without which a server of `max_running` sequences does not start."""
        if self.config is not None:
            return self.config.least_memory(max_running).nbytes
        return self.cost.least_memory(max_running, self.first_tokens).nbytes


def expected_path(
    library: MlxLm,
    module: Any,
    device: str,
    context: int,
    *,
    pages: bool = True,
    bits: int = 16,
    kernels: type[Kernels] = Kernels,
) -> Expected:
    """The path of `module` with that `context` on `device`, without `pages` where custom kernels are off. With 8 `bits`
    keys and values are stored as int8. Computes nothing but positions and shapes."""
    rejected: list[Rejection] = []
    cost = _own_cost(library, module, context)  # before its attention is left to other caches
    if device == "cuda" and pages:
        try:
            config = replace(page_layers(library, module, bits, kernels), context=context)
            return Expected(Backend.PAGED, prefix_reuse(config), (), config.cost, config.slot_bytes, config=config)
        except Unsupported as error:
            rejected.append(Rejection("paged", str(error)))
    try:
        routed = routed_layers(library, module)
        with known_attention():
            latent_layers(library, module, routed.layout)
    except Unsupported as error:
        rejected.append(Rejection("contiguous", str(error)))
    else:
        reuse = "copies" if routed.recurrent is None else "snapshots"
        states = 0 if routed.recurrent is None else routed.recurrent.slot_bytes
        cost = replace(cost, row_bytes=cost.row_bytes + states)  # one to go back to
        return Expected(Backend.CONTIGUOUS, reuse, tuple(rejected), cost, states, STEP)
    if reason := _not_batched(library, module):
        return Expected(Backend.SERIAL, "snapshots", (*rejected, Rejection("padded", reason)), cost, first_tokens=1)
    return Expected(Backend.PADDED, "snapshots", tuple(rejected), cost, first_tokens=1)


def _own_cost(library: MlxLm, module: Any, context: int) -> KvCost:
    """The cost of a sequence in mlx-lm's caches, as the start measures it."""
    caches = library.new_caches(module)
    module(mx.ones((1, _TOKENS), mx.int32), cache=caches)
    return kv_cost(library.leaves(caches), _TOKENS, context)


def _not_batched(library: MlxLm, module: Any) -> str:
    """The reason why sequences of several lengths can't share a pass, as far as shapes say; empty where they may."""
    rows = [library.new_caches(module) for _ in range(_ROWS)]
    if reason := reason_not_merged(library, rows[0]):
        return reason
    try:
        for length, caches in enumerate(rows, start=1):
            module(mx.zeros((1, length), mx.int32), cache=caches)
        module(mx.zeros((_ROWS, 1), mx.int32), cache=mlxlm.merge(rows))
    except FAULTS as error:
        return f"a batch of sequences failed ({type(error).__name__}: {one_line(error)})"
    return ""


def prefix_reuse(config: Any) -> str:
    """How a backend of `config` reuses a prefix of another prompt, in words: `blocks` of pages that are shared in
    place, with `windows` and `states` at positions that are kept; `copies` of any prefix; `snapshots` of the whole
    state at positions that are kept."""
    if isinstance(config, PagedConfig):
        kinds = {"windows": config.windows, "states": config.recurrent is not None}
        return ", ".join(["blocks", *(name for name, there in kinds.items() if there)])
    copies = isinstance(config, ContiguousConfig) and config.recurrent is None
    return "copies" if copies else "snapshots"

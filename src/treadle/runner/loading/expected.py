"""Expected compute path of a model whose weights are not read, by the structure of its layers. The start decides by
self-tests, and on CUDA by the memory that there is."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from ...core.compute_path import Backend
from ...errors import one_line
from .. import mlxlm
from ..device.self_test import FAULTS
from ..kv.backend import Unsupported
from ..kv.contiguous.backend import ContiguousConfig
from ..kv.paged.backend import PagedConfig
from ..kv.paged.kernels import AttentionShape, Kernels
from ..mlxlm import MlxLm
from .attention_shape import attention_shapes, latent_layers
from .backend_choice import Rejection
from .candidates import page_layers
from .padded_self_test import reason_not_merged
from .routed_layers import known_attention, routed_layers

_ROWS = 3
"""Of a batch that is tried: a mask for a number that heads have too would fit by chance."""


class Expected(NamedTuple):
    """A KV `backend`, its way to reuse prefixes in words, and the better backends that are `rejected`, best first.

    `layers` have for each layer with attention its window, 0 for none, and the elements of a token's keys and values;
    None where this is not known. Recurrent layers take `state_bytes` a sequence.
    """

    backend: Backend
    prefixes: str
    rejected: tuple[Rejection, ...] = ()
    layers: tuple[tuple[int, int], ...] | None = None
    state_bytes: int = 0


def expected_path(
    library: MlxLm, module: Any, device: str, *, pages: bool = True, bits: int = 16, kernels: type[Kernels] = Kernels
) -> Expected:
    """The path of `module` on `device`, without `pages` where custom kernels are off. With 8 `bits` keys and values are
    stored as int8. Computes nothing but positions and shapes."""
    rejected: list[Rejection] = []
    if device == "cuda" and pages:
        try:
            config = page_layers(library, module, bits, kernels)
            return Expected(Backend.PAGED, prefix_reuse(config), (), *_memory(library, module))
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
        return Expected(Backend.CONTIGUOUS, reuse, tuple(rejected), *_memory(library, module))
    if reason := _not_batched(library, module):
        return Expected(Backend.SERIAL, "snapshots", (*rejected, Rejection("padded", reason)))
    return Expected(Backend.PADDED, "snapshots", tuple(rejected))


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


def _memory(library: MlxLm, module: Any) -> tuple[tuple[tuple[int, int], ...] | None, int]:
    """Window and elements of each layer with attention, and the bytes of a sequence's recurrent states."""
    routed = routed_layers(library, module)
    states = 0 if routed.recurrent is None else routed.recurrent.slot_bytes
    try:
        shapes = attention_shapes(library, module, routed.layout)
    except (*FAULTS, Unsupported):
        return None, states
    return tuple(zip(routed.windows, map(_elements, shapes), strict=True)), states


def _elements(shape: AttentionShape) -> int:
    """Elements of a token's keys and values; a latent is both."""
    keys, values = shape.widest
    return shape.heads * (keys if shape.latent else keys + values)


def prefix_reuse(config: Any) -> str:
    """How a backend of `config` reuses a prefix of another prompt, in words: `blocks` of pages that are shared in
    place, with `windows` and `states` at positions that are kept; `copies` of any prefix; `snapshots` of the whole
    state at positions that are kept."""
    if isinstance(config, PagedConfig):
        kinds = {"windows": config.windows, "states": config.recurrent is not None}
        return ", ".join(["blocks", *(name for name, there in kinds.items() if there)])
    copies = isinstance(config, ContiguousConfig) and config.recurrent is None
    return "copies" if copies else "snapshots"

"""Expected compute path of a model whose weights are not read, by the structure of its layers. The start decides by
self-tests, and on CUDA by the memory that there is."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.compute_path import Backend
from ..device.self_test import FAULTS
from ..kv.backend import Unsupported
from ..kv.contiguous.backend import ContiguousConfig
from ..kv.paged.backend import PagedConfig
from ..kv.paged.kernels import AttentionShape, Kernels
from ..mlxlm import MlxLm
from .attention_shape import attention_shapes, latent_layers
from .backend_choice import Rejection
from .candidates import page_layers
from .routed_layers import known_attention, routed_layers


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
    batched = library.can_merge(library.new_caches(module))
    return Expected(Backend.PADDED if batched else Backend.SERIAL, "snapshots", tuple(rejected))


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

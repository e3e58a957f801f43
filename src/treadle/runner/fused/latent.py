"""Multi-head latent attention (DeepSeek-V2, 2024) by kernels, over the latents themselves.

Keys and values of all heads are products of one latent: the product for keys is absorbed into queries, that for values
is made of what attention returns. A layer takes seven launches, where mlx-lm's module takes about twenty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ..kv.paged.kernels import Kernels
from ..kv.paged.layer import PagedLayer
from .families import Family
from .head_product import HeadProduct, Rotated
from .layer import FusedPass, JoinedLinear, Part, check_parts
from .merged_linear import MergedLinear, Tools
from .mixer_kernels import Latents
from .norms import Norm
from .quantization import Quantization
from .rotary import Rotary

_LOW_RANK = ("q_a_proj", "q_a_layernorm", "q_b_proj")
_QUERIES, _LATENTS, _NORM, _ABSORB, _VALUES = "q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "embed_q", "unembed_out"


@dataclass(frozen=True)
class FusedLatentAttention:
    """Attention over latents: `down` makes queries, of a low rank where there is a way `up`, and latents. `absorb` gets
    the first dimensions of queries, and `rotated` are the others."""

    down: JoinedLinear
    up: JoinedLinear | None
    latents: Latents
    absorb: HeadProduct
    values: HeadProduct
    rotated: Rotated
    out: JoinedLinear
    rotary: Rotary | None
    scale: float
    own_modules: Sequence[Any] = ()
    part: Part = Part.LATENT_ATTENTION

    @classmethod
    def of(cls, module: Any, family: Family, kernels: Kernels | None, tools: Tools) -> FusedLatentAttention:
        """The attention of a module. Raises NotImplementedError where a part of it is not known."""
        if kernels is None or not kernels.latent or kernels.heads != 1:
            raise NotImplementedError("attention that is not over one latent for all heads")
        low_rank = _LOW_RANK[0] in module
        queries = _LOW_RANK if low_rank else (_QUERIES,)
        check_parts(module, {*queries, _LATENTS, _NORM, _ABSORB, _VALUES, family.output, "rope"})
        absorb, values = (_of_heads(module[name], kernels.dtype, tools) for name in (_ABSORB, _VALUES))
        rotary = Rotary.of(module.rope) if "rope" in module else None
        interleaved = rotary is not None and rotary.interleaved
        rotated = Rotated(absorb.columns, kernels.dim - kernels.value_dim, float(module.scale), interleaved)
        down = JoinedLinear.of([module[queries[0]], module[_LATENTS]], tools)
        first = down.outputs - kernels.dim
        norm, query_norm = _norm(module[_NORM], kernels), _norm(module[_LOW_RANK[1]], kernels) if low_rank else None
        latents = Latents(
            first if low_rank else 0, first, kernels.value_dim, rotated.dims, norm, query_norm, interleaved
        )
        up = JoinedLinear.of([module[_LOW_RANK[2]]], tools) if low_rank else None
        step = absorb.columns + rotated.dims
        known = absorb.outputs == values.columns == kernels.value_dim and absorb.heads == values.heads == kernels.rep
        if not known or (first if up is None else up.outputs) != absorb.heads * step:
            raise NotImplementedError("latents or queries of other dimensions than keys have")
        if rotary is not None and rotary.dims != rotated.dims:
            raise NotImplementedError(f"{rotary.dims} rotated dimensions of {rotated.dims}")
        out = JoinedLinear.of([module[family.output]], tools)
        return cls(down, up, latents, absorb, values, rotated, out, rotary, float(module.scale))

    @property
    def products(self) -> Sequence[MergedLinear]:
        up = () if self.up is None else self.up.products
        return [*self.down.products, *up, *self.out.products]

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        pages: PagedLayer = cache
        step, tokens = computed.step, y.shape[0]
        slots, cos_sin = step.tables[pages.kind.table].slots, computed.turns(self.rotary)
        queries, written = computed.mixers.put_latents(self.down(y), self.latents, cos_sin, slots, pages.pool)
        queries = queries if self.up is None else self.up(queries)
        each = self.absorb.columns + self.rotated.dims
        absorbed, rotated = self.absorb.with_rotated(queries, 0, each, self.rotated, cos_sin)
        attended = pages.attention(step, absorbed[:, :, None], written, self.scale, rotated=rotated[:, :, None])
        return self.out(self.values(attended.reshape(tokens, -1), 0, self.values.columns).reshape(tokens, -1))


def _of_heads(layer: Any, dtype: Any, tools: Tools) -> HeadProduct:
    """The product by a linear layer of each head."""
    if "scales" not in layer:
        return HeadProduct(layer.weight, None, None, None, tools.kernel, dtype)
    return HeadProduct(layer.weight, layer.scales, layer.get("biases"), Quantization.of(layer), tools.kernel, dtype)


def _norm(module: Any, kernels: Kernels) -> Norm:
    if type(module) is not nn.RMSNorm:
        raise NotImplementedError(f"latents normalized by {type(module).__name__}")
    return Norm.of(module, kernels.dtype)

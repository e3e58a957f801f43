"""Facts of mixers with a gated delta rule: the places of queries, keys, values and gates among projections' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DeltaFacts:
    """A mixer's parts. `inputs` are linear layers, whose outputs lie side by side; `columns` are those that
    `convolutions` see, queries, keys and values in turn, then betas and, where there are no `low_rank` ones, decays.

    `groups` heads of keys have `dim` dimensions, `heads` of values `value_dim`. Outputs are normalized by `norm` and
    multiplied by gates, whose first columns for each head are `places`: by their SiLU, or their sigmoids. The two
    `low_rank` layers make decays and gates of as many outputs each, from column `low_first` on.
    """

    inputs: Sequence[Any]
    columns: Sequence[int]
    convolutions: Sequence[Any]
    groups: int
    dim: int
    heads: int
    value_dim: int
    places: Sequence[int]
    norm: Any
    a_log: Any
    dt_bias: Any
    silu: bool = True
    low_rank: Sequence[Any] = ()
    low_first: int = 0


def qwen3_5(module: Any) -> DeltaFacts:
    """Projections of queries, keys and values together, of gates, betas and decays."""
    convolved, heads, values = module.conv_dim, module.num_v_heads, module.value_dim
    scalars = np.arange(2 * heads) + convolved + values
    return DeltaFacts(
        [module[name] for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")],
        [*range(convolved), *scalars],
        [module.conv1d],
        *_heads(module),
        [convolved + head * module.head_v_dim for head in range(heads)],
        *_state(module),
    )


def qwen3_next(module: Any) -> DeltaFacts:
    """Projections of which each head of keys has its part: query, key, values and gates; betas and decays."""
    groups, dim, value_dim = module.num_k_heads, module.head_k_dim, module.head_v_dim
    each = module.num_v_heads // groups
    own = np.arange(groups)[:, None] * (2 * dim + 2 * each * value_dim)
    scalars = own[-1, 0] + 2 * dim + 2 * each * value_dim + np.arange(groups)[:, None] * 2 * each + np.arange(each)
    parts = (np.arange(dim), dim + np.arange(dim), 2 * dim + np.arange(each * value_dim))
    gates = 2 * dim + each * value_dim + np.arange(each) * value_dim
    return DeltaFacts(
        [module.in_proj_qkvz, module.in_proj_ba],
        np.concatenate([(own + part).ravel() for part in parts] + [scalars.ravel(), scalars.ravel() + each]).tolist(),
        [module.conv1d],
        *_heads(module),
        (own + gates).ravel().tolist(),
        *_state(module),
    )


def kimi_linear(module: Any) -> DeltaFacts:
    """Kimi Delta Attention: a projection and a convolution for each of queries, keys and values; decays for each
    dimension, and gates, both of a low rank."""
    heads, dim, width = module.num_heads, module.head_dim, module.projection_dim
    inputs = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
    low = 3 * width
    return DeltaFacts(
        [module[name] for name in inputs],
        [*range(low), *(low + 2 * dim + head for head in range(heads))],
        [module[name].conv for name in ("q_conv", "k_conv", "v_conv")],
        *(heads, dim, heads, dim),
        [width + head * dim for head in range(heads)],
        module.o_norm,
        module.A_log.reshape(heads, 1),
        module.dt_bias.reshape(heads, dim),
        silu=False,
        low_rank=[module.f_b_proj, module.g_b_proj],
        low_first=low,
    )


def _heads(module: Any) -> tuple[int, int, int, int]:
    return module.num_k_heads, module.head_k_dim, module.num_v_heads, module.head_v_dim


def _state(module: Any) -> tuple[Any, Any, Any]:
    return module.norm, module.A_log, module.dt_bias

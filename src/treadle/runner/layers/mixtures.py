"""Mixtures of experts on CUDA: the blocks of mlx-lm's models around their experts, by facts of each class.

A block has a router, experts, and maybe shared experts that see each token. Its own code takes a dozen launches around
the experts' products; with the kernels it takes two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..device.cuda import CudaKernel, NewKernel
from ..fused.families import part
from ..fused.mixture_kernels import UNIT, Choice, MixtureKernels, Rounds, Score
from .replace import Faster, Makers

_MODELS = "mlx_lm.models"
_TYPES = (mx.bfloat16, mx.float16)
_TESTED, _CANDIDATES = (1, 5), 512


@dataclass(frozen=True)
class _Facts:
    """Facts of a class of blocks: how it chooses (None: in a way that the kernel does not have), and the names of its
    experts, of its linear router (or of a module with a router's `weight`), which may compute in float32 (`wide`), of
    shared experts and of their gate."""

    choice: Callable[[Any], Choice | None]
    router: str = "gate"
    experts: str = "switch_mlp"
    shared: str | None = None
    shared_gate: str | None = None
    wide: bool = False


def _softmax(layer: Any) -> Choice:
    return Choice(layer.top_k, Score.SOFTMAX, normalized=bool(getattr(layer, "norm_topk_prob", False)))


def _mixtral(layer: Any) -> Choice:
    return Choice(layer.num_experts_per_tok, Score.CHOSEN_SOFTMAX)


def _granite(layer: Any) -> Choice:
    return Choice(layer.router.top_k, Score.CHOSEN_SOFTMAX)


def _grouped(layer: Any) -> Choice:
    """DeepSeek V3's, with the facts in its gate."""
    gate = layer.gate
    return Choice(
        gate.top_k,
        Score.SIGMOID,
        gate.e_score_correction_bias,
        gate.n_group,
        gate.topk_group,
        bool(gate.norm_topk_prob) and gate.top_k > 1,
        factor=float(gate.routed_scaling_factor),
    )


def _nemotron(layer: Any) -> Choice | None:
    return None if layer.moe_latent_size is not None else _grouped(layer)


def _bailing(layer: Any) -> Choice:
    gate = layer.gate
    return Choice(
        gate.top_k,
        Score.SIGMOID if gate.score_function == "sigmoid" else Score.SOFTMAX,
        gate.expert_bias,
        gate.n_group,
        gate.topk_group,
        bool(gate.norm_topk_prob) and gate.top_k > 1,
        1e-20,
        float(gate.routed_scaling_factor),
    )


def _kimi(layer: Any) -> Choice:
    args = layer.args
    return Choice(
        args.num_experts_per_token,
        Score.SIGMOID if args.moe_router_activation_func == "sigmoid" else Score.SOFTMAX,
        layer.e_score_correction_bias,
        args.num_expert_group,
        args.topk_group,
        bool(args.moe_renormalize) and args.num_experts_per_token > 1,
        1e-20,
        float(args.routed_scaling_factor),
        rounds=Rounds.KEYS,
    )


def _lfm2(layer: Any) -> Choice:
    return Choice(
        layer.top_k,
        Score.SIGMOID,
        layer.expert_bias if layer.use_expert_bias else None,
        normalized=bool(layer.norm_topk_prob),
        epsilon=1e-6,
        factor=float(layer.routed_scaling_factor),
        rounds=Rounds.SCORES,
    )


def _minimax(layer: Any) -> Choice:
    return Choice(
        layer.num_experts_per_tok, Score.SIGMOID, layer.e_score_correction_bias, normalized=True, epsilon=1e-20
    )


def _ernie(layer: Any) -> Choice:
    kind = type(layer.gate_act).__name__
    return Choice(layer.k, Score.SIGMOID if kind == "Sigmoid" else Score.SOFTMAX, normalized=True)


_SHARED = _Facts(_grouped, shared="shared_experts")
_GATED = _Facts(_softmax, shared="shared_expert", shared_gate="shared_expert_gate")
_GRANITE = _Facts(_granite, router="router.layer")
FACTS: dict[str, _Facts] = {
    f"{_MODELS}.qwen3_moe.Qwen3MoeSparseMoeBlock": _Facts(_softmax),
    f"{_MODELS}.olmoe.OlmoeSparseMoeBlock": _Facts(_softmax),
    f"{_MODELS}.qwen2_moe.Qwen2MoeSparseMoeBlock": _GATED,
    f"{_MODELS}.qwen3_next.Qwen3NextSparseMoeBlock": _GATED,
    f"{_MODELS}.mixtral.MixtralSparseMoeBlock": _Facts(_mixtral),
    f"{_MODELS}.gpt_oss.MLPBlock": _Facts(_mixtral, router="router", experts="experts"),
    f"{_MODELS}.deepseek_v3.DeepseekV3MoE": _SHARED,
    f"{_MODELS}.glm4_moe.MoE": _SHARED,
    f"{_MODELS}.glm4_moe_lite.Glm4MoeLiteMoE": _SHARED,
    f"{_MODELS}.dots1.Dots1MoE": _Facts(_grouped, experts="experts", shared="shared_experts"),
    f"{_MODELS}.nemotron_h.NemotronHMoE": _Facts(_nemotron, shared="shared_experts"),
    f"{_MODELS}.bailing_moe.BailingMoeSparseMoeBlock": _Facts(
        _bailing, router="gate.gate_proj", shared="shared_experts"
    ),
    f"{_MODELS}.kimi_linear.KimiSparseMoE": _Facts(_kimi, shared="shared_experts"),
    f"{_MODELS}.granitemoe.GraniteMoeMoE": _GRANITE,
    f"{_MODELS}.granitemoehybrid.GraniteMoeHybridMoE": _GRANITE,
    f"{_MODELS}.lfm2_moe.Lfm2MoeSparseMoeBlock": _Facts(_lfm2),
    f"{_MODELS}.minimax.MiniMaxSparseMoeBlock": _Facts(_minimax, wide=True),
    f"{_MODELS}.ernie4_5_moe.Ernie4_5_MoeMLP": _Facts(_ernie, shared="shared_experts"),
}
"""By a class's full name. The self-test finds a block whose facts have changed."""


class MixtureMakers:
    """Makers of faster blocks of a model that computes in `dtype`, for kernels made by `kernel` (None: there are
    none)."""

    def __init__(self, dtype: Any, kernel: NewKernel | None = CudaKernel) -> None:
        self._kernels = None if kernel is None or dtype not in _TYPES else MixtureKernels(kernel)
        self._dtype = dtype

    @property
    def makers(self) -> Makers:
        return {} if self._kernels is None else {name: partial(self._made, facts) for name, facts in FACTS.items()}

    def _made(self, facts: _Facts, layer: Any) -> Faster | None:
        assert self._kernels is not None
        choice, experts = facts.choice(layer), part(part(layer, facts.router), "weight").shape[0]
        outputs = _outputs(part(layer, facts.experts))
        if choice is None or not choice.takes(experts) or outputs % UNIT:
            return None
        block = _Block(self._kernels, layer, facts, choice, self._dtype)
        kind = type(layer), experts, outputs, choice.numbers, block.shared is None, self._dtype
        label = f"mixtures of {choice.top} of {experts} experts"
        return Faster({"__call__": block}, kind, label, partial(_examples, block, outputs))


class _Block:
    """The faster call of one block `layer`, on x of `dtype`. Its router, experts and shared experts are the layer's
    own, which may be faster ones themselves."""

    def __init__(self, kernels: MixtureKernels, layer: Any, facts: _Facts, choice: Choice, dtype: Any) -> None:
        self.choice = choice
        self.dtype = dtype
        self.shared = None if facts.shared is None else layer.get(facts.shared)
        self._gate = None if facts.shared_gate is None else layer[facts.shared_gate]
        self._router = part(layer, facts.router)
        self._wide = facts.wide
        self._experts = part(layer, facts.experts)
        self._kernels = kernels
        self._own = partial(type(layer).__call__, layer)

    def __call__(self, x: Any) -> Any:
        """(..., K) of `x` of that shape."""
        if x.dtype != self.dtype:
            return self._own(x)
        flat = x.reshape(-1, 1, x.shape[-1])
        chosen, weights = self._kernels.choose(self.logits(flat)[:, 0], self.choice)
        y = self._experts(flat, chosen[:, None])[:, 0]
        shared, gate = (None if one is None else one(flat)[:, 0] for one in (self.shared, self._gate))
        return self._kernels.combine(y, weights, shared, gate).reshape(x.shape)

    def logits(self, x: Any) -> Any:
        """The router's logits (T, 1, E) of `x` (T, 1, K)."""
        router, x = self._router, x.astype(mx.float32) if self._wide else x
        return router(x) if isinstance(router, (nn.Linear, nn.QuantizedLinear)) else x @ router.weight.T


def _outputs(experts: Any) -> int:
    """Outputs of a SwitchGLU or a SwitchMLP, which are as many as its inputs."""
    last = experts.down_proj if "down_proj" in experts else experts.fc2
    return int(last.weight.shape[1])


def _examples(block: _Block, inputs: int) -> Iterator[tuple[Any]]:
    """Tokens whose experts are clearly better than others: nearly equal ones may be chosen in any way. Quiet tokens are
    among them, as loud ones may have many experts with a score of nearly 1."""
    x = mx.random.normal((_CANDIDATES, 1, inputs), key=mx.random.key(0))
    x = (x * 4.0 ** -(mx.arange(_CANDIDATES) % 4)[:, None, None]).astype(block.dtype)
    clearest = mx.array(np.argsort(-block.choice.margins(block.logits(x)[:, 0])))
    for tokens in _TESTED:
        yield (x[clearest[:tokens]],)

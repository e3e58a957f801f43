"""Mixtures of experts on CUDA: the blocks of mlx-lm's models around their experts, by facts of each class.

A block has a router, experts, and maybe shared experts that see each token. Its own code takes a dozen launches around
the experts' products; with the kernels it takes two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..device.cuda import NewKernel
from ..fused.families import part
from ..fused.merged_linear import MergedLinear, Tools, linear, merge_linears
from ..fused.mixture_kernels import UNIT, Choice, MixtureKernels, Rounds, Score
from .experts import ExpertMakers, Experts
from .joined_experts import JoinedExperts
from .replace import Faster, Makers, full_name

_MODELS = "mlx_lm.models"
_TYPES = (mx.bfloat16, mx.float16)
_TESTED, _CANDIDATES = (1, 5, 40), 512


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
    """Makers of faster blocks of a model that computes in `dtype`, for kernels made by `kernel` (None: there are none).
    `experts` makes those of the experts inside, and `tools` returns what products of a type need."""

    def __init__(
        self,
        dtype: Any,
        kernel: NewKernel | None,
        experts: ExpertMakers,
        tools: Callable[[Any], Tools | None],
    ) -> None:
        self._kernels = None if kernel is None or dtype not in _TYPES else MixtureKernels(kernel)
        self._dtype = dtype
        self._experts = experts
        self._tools = tools
        self._joined: dict[int, JoinedExperts | None] = {}

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
        inside = self._faster_experts(block)
        block.join_router(self._tools(self._dtype))
        kind = type(layer), experts, outputs, block.choice.numbers, block.shared is None, self._dtype
        label = f"mixtures of {choice.top} of {experts} experts"
        made = Faster({"__call__": block}, kind, label, partial(_examples, block, outputs))
        if inside is None:
            return made
        _, faster = inside
        prepare, restore, takes = faster.prepare, faster.restore, faster.takes
        return replace(made, kind=(kind, faster.kind), prepare=prepare, restore=restore, inside=[inside], takes=takes)

    def _faster_experts(self, block: _Block) -> tuple[Any, Faster] | None:
        """Let a block have its experts' products by kernels, with its shared expert among them if possible. Returns
        the experts with their faster methods; None where the kernels don't take them."""
        layer = block.experts
        if id(layer) not in self._joined:
            joins = replace(block.choice, shared=True).takes(_count(layer)) and block.shared is not None
            self._joined[id(layer)] = JoinedExperts.of(layer, block.shared) if joins else None
        joined = self._joined[id(layer)]
        maker = self._experts.makers.get(full_name(type(layer)))
        module = layer if joined is None else joined.module
        made = None if maker is None else maker(module)
        experts = None if made is None else made.methods["__call__"]
        if not isinstance(experts, Experts) or not experts.takes(self._dtype):
            return None
        block.use(experts, joined is not None)
        assert made is not None
        if joined is None:
            return module, replace(made, takes=[layer])
        prepare, restore = (partial(_both, one, joined.share) for one in (made.prepare, made.restore))
        return module, replace(made, prepare=prepare, restore=restore, takes=[layer, joined.shared])


class _Block:
    """The faster call of one block `layer`, on x of `dtype`. Its router, experts and shared experts are the layer's
    own, which may be faster ones themselves, where they are not taken by `use` and `join_router`."""

    def __init__(self, kernels: MixtureKernels, layer: Any, facts: _Facts, choice: Choice, dtype: Any) -> None:
        self.choice = choice
        self.dtype = dtype
        self.shared = None if facts.shared is None else layer.get(facts.shared)
        self.experts = part(layer, facts.experts)
        self._gate = None if facts.shared_gate is None else layer[facts.shared_gate]
        self._router = part(layer, facts.router)
        self._wide = facts.wide
        self._kernels = kernels
        self._own = partial(type(layer).__call__, layer)
        self._products: Experts | None = None
        self._logits: MergedLinear | None = None

    def use(self, experts: Experts, joined: bool) -> None:
        """Compute by `experts` from now on, which are `joined` with the shared one."""
        self._products = experts
        if joined:
            self.choice, self.shared = replace(self.choice, shared=True, gated=self._gate is not None), None

    def join_router(self, tools: Tools | None) -> None:
        """Make the router's logits, and those of the gate of a shared expert among the others, by one product."""
        layers = [self._router, *([self._gate] if self.choice.gated else [])]
        if tools is None or self._wide or self._router.weight.dtype not in (self.dtype, mx.uint32):
            return
        try:
            self._logits = merge_linears(layers, tools)
        except NotImplementedError:
            if len(layers) == 1 and self._router.weight.ndim == 2 and "scales" not in self._router:
                self._logits = linear(self._router.weight, None, tools)

    def __call__(self, x: Any) -> Any:
        """(..., K) of `x` of that shape."""
        if x.dtype != self.dtype:
            return self._own(x)
        flat = x.reshape(-1, x.shape[-1])
        y, weights = self._weighted(flat)
        shared, gate = (None if one is None else one(flat[:, None])[:, 0] for one in (self.shared, self._own_gate))
        return self._kernels.combine(y, weights, shared, gate).reshape(x.shape)

    def apart(self, x: Any) -> tuple[Any, Any] | None:
        """Outputs (T, k, K) of experts for `x` (T, K), and their weights (T, k), float32, of whose products the block's
        result is the sum; None where there is more to add."""
        return self._weighted(x) if self.shared is None and x.dtype == self.dtype else None

    def _weighted(self, x: Any) -> tuple[Any, Any]:
        logits = self._of_router(x)
        if self._products is not None:
            return self._products.chosen(x, logits, self.choice)
        chosen, weights = self._kernels.choose(logits, self.choice)
        return self.experts(x[:, None], chosen[:, None])[:, 0], weights

    @property
    def _own_gate(self) -> Any | None:
        return None if self.shared is None else self._gate

    def logits(self, x: Any) -> Any:
        """The router's logits (T, E) of `x` (T, K)."""
        return self._of_router(x)[:, : _count(self.experts)]

    def _of_router(self, x: Any) -> Any:
        """Logits that the choice is made by."""
        if self._logits is not None:
            return self._logits(x)
        router, x = self._router, x[:, None].astype(mx.float32) if self._wide else x[:, None]
        logits = router(x) if isinstance(router, (nn.Linear, nn.QuantizedLinear)) else x @ router.weight.T
        if self.choice.gated:
            assert self._gate is not None
            logits = mx.concatenate([logits, self._gate(x)], axis=-1)
        return logits[:, 0]


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _last(experts: Any) -> Any:
    """The last linear layer of a SwitchGLU or a SwitchMLP."""
    return experts.down_proj if "down_proj" in experts else experts.fc2


def _count(experts: Any) -> int:
    return int(_last(experts).weight.shape[0])


def _outputs(experts: Any) -> int:
    """Outputs of a SwitchGLU or a SwitchMLP, which are as many as its inputs."""
    return int(_last(experts).weight.shape[1])


def _examples(block: _Block, inputs: int) -> Iterator[tuple[Any]]:
    """Tokens whose experts are clearly better than others: nearly equal ones may be chosen in any way. Quiet tokens are
    among them, as loud ones may have many experts with a score of nearly 1."""
    x = mx.random.normal((_CANDIDATES, 1, inputs), key=mx.random.key(0))
    x = (x * 4.0 ** -(mx.arange(_CANDIDATES) % 4)[:, None, None]).astype(block.dtype)
    clearest = mx.array(np.argsort(-block.choice.margins(block.logits(x[:, 0]))))
    for tokens in _TESTED:
        yield (x[clearest[:tokens]],)

"""Random models of many architectures at several precisions, and what the self-tests say of each backend with them.

    python -m tests.runner.self_tests [ARCHITECTURE ...]

prints a table: the backends that pass, how far the contiguous one is from the reference and what its faults come to, in
units of the model's own noise (the limit is 2.5, in float32 1,000).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx

from tests.runner.families import COMMON, FAMILIES
from tests.runner.mutants import MUTANTS, WINDOW_MUTANTS, mutated
from treadle.runner.kv.backend import Unsupported
from treadle.runner.kv.contiguous.backend import ContiguousConfig
from treadle.runner.kv.cost import KvCost
from treadle.runner.loading import backend_self_test, candidates
from treadle.runner.loading.backend_choice import BackendRequest
from treadle.runner.loading.padded_self_test import reason_not_batched, shares_prefill
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect

PRECISIONS = ("float32", "bfloat16", "float16", "8 bits", "4 bits")
_PLAIN: dict[str, Any] = {**COMMON, "num_hidden_layers": 4}
_WINDOW = {"sliding_window": 32}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
_NEMOTRON = {
    "attention_bias": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hybrid_override_pattern": list("M*M-"),
    "time_step_limit": (0.0, float("inf")),
}
_LFM2 = {
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 96,
    "full_attn_idxs": [1, 3],
}
_LATENT = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 32)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "olmo2", "phi3", "starcoder2", "gemma", "gemma2"), _PLAIN),
    "gemma3_text": {**_PLAIN, **_WINDOW, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    "cohere2": {**_PLAIN, **_WINDOW},
    "qwen3_moe": {**_PLAIN, **_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {**_PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": FAMILIES["gpt_oss"],
    "deepseek_v3": {**FAMILIES["deepseek_v3"], **_LATENT},
    **{name: FAMILIES[name] for name in ("llama4", "mamba", "qwen3_next", "falcon_h1", "smollm3")},
    "lfm2": {**_PLAIN, **_LFM2},
    "nemotron_h": {**_PLAIN, **_NEMOTRON},
}


def make(architecture: str, precision: str, **changed: Any) -> Any:
    """A random model whose weights are three times as large as usual, for sharp attention."""
    connect()
    import mlx.nn as nn
    from mlx.utils import tree_map
    from mlx_lm.utils import _get_classes

    config = {"model_type": architecture, **ARCHITECTURES[architecture], **changed}
    model_class, arguments = _get_classes(config)
    mx.random.seed(0)
    module = model_class(arguments.from_dict(config))
    module.update(tree_map(lambda w: w * 3 if w.ndim == 2 else w, module.parameters()))
    module.set_dtype(getattr(mx, precision, mx.bfloat16))
    if precision.endswith("bits"):
        nn.quantize(module, group_size=32, bits=int(precision[0]), class_predicate=_quantizable)
    mx.eval(module.parameters())
    return module


def _quantizable(_: str, layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


def runs_here(architecture: str, precision: str) -> bool:
    """MLX's CPU has no experts in half precision."""
    experts = any("expert" in name for name in str(ARCHITECTURES[architecture]).split("'"))
    return not experts or precision not in ("bfloat16", "float16")


def contiguous(reference: Reference) -> ContiguousConfig:
    """The contiguous backend of the reference's model, tested. Raises Unsupported."""
    request = BackendRequest("cpu", None, 4, keep_prefixes=False)
    return candidates.contiguous(reference, KvCost(1, 0), 0, request, [])


def faults(reference: Reference, config: ContiguousConfig, layers: Any = None) -> dict[str, str]:
    """Each fault in the backend of `config`, with what its self-test says; empty where it says nothing."""
    trials = reference.trials()
    names = [*MUTANTS, *(WINDOW_MUTANTS if any(config.windows) and layers is None else ())]
    found = {}
    for name in names:
        wrong: Any = mutated(config, name, layers)
        try:
            backend_self_test.self_test(reference, wrong, trials)
            found[name] = ""
        except Unsupported as error:
            found[name] = str(error)
    return found


def _line(architecture: str, precision: str) -> str:
    module = make(architecture, precision)
    reference = Reference(connect(), module, 2048)
    try:
        config, own = contiguous(reference), "contiguous"
        some, one = faults(reference, replace(config)), faults(reference, config, {1})
        caught = f"{sum(map(bool, some.values()))}/{len(some)}, one layer {sum(map(bool, one.values()))}/{len(one)}"
    except Unsupported as error:
        own, caught = f"not contiguous: {error}"[:70], "-"
    batched = reason_not_batched(reference)
    padded = f"not batched: {batched}"[:60] if batched else f"padded{', shared' * shares_prefill(reference)}"
    return f"| {architecture} | {precision} | {own} | {padded} | {caught} |"


if __name__ == "__main__":
    print("| architecture | precision | own caches | mlx-lm's caches | faults found |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or ARCHITECTURES:
        for kind in PRECISIONS:
            if runs_here(name, kind):
                print(_line(name, kind), flush=True)

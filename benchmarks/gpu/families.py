"""Models of many families on a GPU: their KV backends, and a comparison of their tokens with mlx-lm's.

    python benchmarks/gpu/families.py [--family llama ...] [--bits 16] [--kv-bits 8] [--small]

Each is made with random weights in bfloat16 (the router of a mixture of experts and the head louder, so that the best
are not nearly equal), loaded from its folder as `treadle serve` does, and runs rows of many lengths at once, prompts
in chunks beside rows that decode, greedy. Where a row's tokens differ from mlx-lm's for it alone, the gap between the
two best logits there is printed: one step of bfloat16 is a tie. Then the same rows are sampled, in a batch and alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.gpu.steps import USUAL, Rows, alone, first_difference  # noqa: E402

from treadle.runner.loading.loader import load  # noqa: E402
from treadle.runner.loading.model import LoadedModel  # noqa: E402
from treadle.runner.model_runner import ModelRunner  # noqa: E402

LENGTHS = (5, 40, 333, 7, 64, 700, 17, 2)
COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
GEMMA = {
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_traditional": False},
    "llama3": {
        "model_type": "llama",
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "num_attention_heads": 8},
    "qwen3_moe": {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 256, "num_attention_heads": 4, **GEMMA},
    "phi3": {"model_type": "phi3"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        **EXPERTS,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 16,
        "moe_intermediate_size": 512,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "mamba": {
        "model_type": "mamba",
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 64,
    },
}
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
"""Changes for `--small`."""


def make_model(folder: Path, config: dict[str, Any], bits: int) -> Path:
    """Make a folder with `config` and random weights."""
    mx.random.seed(0)
    kind, arguments = _get_classes(config)
    module = kind(arguments.from_dict(config))
    module.set_dtype(mx.bfloat16)
    weights = [(name, weight * _loudness(name, config)) for name, weight in tree_flatten(module.parameters())]
    module.load_weights(weights)
    if bits < 16:
        nn.quantize(module, group_size=64, bits=bits)
        config = {**config, "quantization": {"group_size": 64, "bits": bits}}
    parameters = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), parameters, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _loudness(name: str, config: dict[str, Any]) -> float:
    head = "embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return 20.0 if name.endswith(head) else 8.0 if name.endswith("gate.weight") else 1.0


def greedy(model: LoadedModel, count: int) -> str:
    """Count the rows whose tokens are mlx-lm's own, and measure the gap of the two best logits where others differ, at
    most."""
    runner = ModelRunner(model)
    rows = Rows(runner, LENGTHS, 200, vocabulary=model.vocabulary)
    rows.run(count)
    rows.release()
    same, gaps = 0, []
    for prompt, tokens in zip(rows.prompts, rows.tokens, strict=True):
        with contextlib.nullcontext() if model.layers is None else model.layers.originals():
            expected, apart = alone(model.module, prompt, count)
        place = first_difference(tokens, expected)
        same += place == count
        gaps += [apart[place]] if place < count else []
    runner._backend.close()
    return f"greedy {same} of {len(LENGTHS)} rows alike" + (f", others part {max(gaps):.4f} apart" if gaps else "")


def sampled(model: LoadedModel, count: int) -> str:
    """Count the rows whose samples are the same alone as in a batch."""
    runner = ModelRunner(model)
    rows = Rows(runner, LENGTHS, 4096, USUAL, vocabulary=model.vocabulary)
    rows.run(count)
    rows.release()
    same = 0
    for i, length in enumerate(LENGTHS):
        runner.forget_prefixes()
        one = Rows(runner, [length], 4096, USUAL, vocabulary=model.vocabulary, first=i)
        one.run(count)
        one.release()
        same += one.tokens[0] == rows.tokens[i]
    runner._backend.close()
    return f"drawn {same} alike together and alone"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=FAMILIES, nargs="*", default=list(FAMILIES))
    parser.add_argument("--bits", type=int, nargs="*", default=[16, 4])
    parser.add_argument("--kv-bits", type=int, choices=[8])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--small", action="store_true", help="see that it works, on a CPU")
    options = parser.parse_args()
    for family in options.family:
        for bits in options.bits:
            began = time.perf_counter()
            config = {**COMMON, **FAMILIES[family], **(SMALL if options.small else {})}
            with tempfile.TemporaryDirectory() as folder:
                made = make_model(Path(folder), config, bits)
                starting = time.perf_counter()
                model = load(made, memory=1 << 30, max_running=8, kv_bits=options.kv_bits)
                backend = f"{model.compute.summary()}; loaded in {time.perf_counter() - starting:.1f} s"
                found = [greedy(model, options.tokens), sampled(model, options.tokens)]
            seconds = time.perf_counter() - began
            print(f"{family:10} {bits:2} bits: {backend}; {'; '.join(found)}; {seconds:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()

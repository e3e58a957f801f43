"""Decode steps and prompts of many families on the CPU, beside mlx-lm's BatchGenerator in the same process.

    python benchmarks/cpu_families.py [--family F...] [--size tiny 100M] [--rows 1 4 8] [--length 500] [--steps 24]
                                      [--rounds 3] [--threads 1] [--json FILE]

Makes random float32 models, loads each as the server does, and runs rows of equal length, greedy, through the runner
and the BatchGenerator in turn, both with `--threads` threads of the same BLAS. Prints the backend, the milliseconds of
a decode step, and prompt tokens a second, both of the quickest round, and ratios of wall and of CPU times: Treadle's
over the BatchGenerator's. Below 1 Treadle is faster. Other programs on the machine stretch wall times more than CPU
times.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from treadle.runner.device import blas

THREADS = int(sys.argv[sys.argv.index("--threads") + 1]) if "--threads" in sys.argv else 1
REPORT = blas.prepare(THREADS)  # before MLX is imported

import mlx.core as mx  # noqa: E402

mx.set_default_device(mx.cpu)

from benchmarks.gpu.steps import GREEDY, Rows, prompt  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402

from treadle.config import Settings  # noqa: E402
from treadle.runner.loading.loader import load  # noqa: E402
from treadle.runner.loading.model import LoadedModel  # noqa: E402
from treadle.runner.mlxlm import connect  # noqa: E402
from treadle.runner.model_runner import ModelRunner  # noqa: E402

VOCABULARY = 8192
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LARGE: dict[str, Any] = {
    **COMMON,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LINEAR = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 4}
MLA_TINY = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16}
MLA_LARGE = {"kv_lora_rank": 128, "q_lora_rank": 256, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 64}
LATENT = {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (TINY, LARGE),
    "gemma3_text": (
        TINY | {"sliding_window": 128, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        LARGE | {"sliding_window": 128, "sliding_window_pattern": 6, "query_pre_attn_scalar": 64},
    ),
    "qwen3_moe": (
        TINY | EXPERTS | {"moe_intermediate_size": 32},
        LARGE | EXPERTS | {"moe_intermediate_size": 512, "num_hidden_layers": 8},
    ),
    "gpt_oss": (
        TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
        LARGE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "intermediate_size": 768},
    ),
    "deepseek_v3": (
        TINY | MLA_TINY | LATENT | {"moe_intermediate_size": 32, "num_key_value_heads": 4},
        LARGE | MLA_LARGE | LATENT | {"moe_intermediate_size": 384, "num_key_value_heads": 12},
    ),
    "qwen3_next": (
        TINY | EXPERTS | LINEAR | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.25},
        LARGE | EXPERTS | LINEAR | {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_hidden_layers": 8}
        | {"moe_intermediate_size": 384, "shared_expert_intermediate_size": 384, "partial_rotary_factor": 0.25},
    ),
    "mamba2": (
        TINY | {"num_heads": 8, "head_dim": 16, "state_size": 16, "conv_kernel": 4, "n_groups": 1, "expand": 2}
        | {"use_bias": False, "use_conv_bias": True, "time_step_limit": [0.0, 1e9], "time_step_rank": 4}
        | {"layer_norm_epsilon": 1e-5, "chunk_size": 64},
        LARGE | {"num_heads": 24, "head_dim": 64, "state_size": 64, "conv_kernel": 4, "n_groups": 1, "expand": 2}
        | {"use_bias": False, "use_conv_bias": True, "time_step_limit": [0.0, 1e9], "time_step_rank": 48}
        | {"layer_norm_epsilon": 1e-5, "chunk_size": 64, "num_hidden_layers": 24},
    ),
}  # fmt: skip
"""Configurations of each model type: tiny, and of about 100 million parameters."""
SIZES = ("tiny", "100M")


@dataclass
class Times:
    """Times of one engine: wall seconds of a decode step, and of all prompts, one a round; CPU seconds of both."""

    steps: list[float] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)
    steps_cpu: list[float] = field(default_factory=list)
    prompts_cpu: list[float] = field(default_factory=list)

    def add_steps(self, count: int, seconds: float, cpu: float) -> None:
        """Add `count` decode steps, which may overlap, and their wall and CPU seconds."""
        self.steps.append(seconds / count)
        self.steps_cpu.append(cpu / count)

    @property
    def numbers(self) -> dict[str, float]:
        """Milliseconds of a step and seconds of the prompts: wall times of the quickest round, and median CPU times."""
        return {
            "step_ms": min(self.steps) * 1e3,
            "step_cpu_ms": statistics.median(self.steps_cpu) * 1e3,
            "prompts_s": min(self.prompts),
            "prompts_cpu_s": statistics.median(self.prompts_cpu),
        }


def write_model(folder: Path, family: str, config: dict[str, Any]) -> Path:
    """Write a folder with a random model, and return it."""
    connect()
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    config = {"model_type": family, **config}
    mx.random.seed(0)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ours(runner: ModelRunner, lengths: Sequence[int], options: argparse.Namespace, first: int, times: Times) -> None:
    """Rows through the runner, which meets none of their prompts in its prefix cache."""
    rows = Rows(runner, lengths, options.prefill_tokens, GREEDY, vocabulary=VOCABULARY, first=first)
    began, cpu = time.perf_counter(), time.process_time()
    rows.run(1)
    times.prompts.append(time.perf_counter() - began)
    times.prompts_cpu.append(time.process_time() - cpu)
    began, cpu = time.perf_counter(), time.process_time()
    rows.run(max(rows.position) + options.steps)
    times.add_steps(options.steps, time.perf_counter() - began, time.process_time() - cpu)
    rows.release()
    runner.forget_prefixes()


def theirs(module: Any, lengths: Sequence[int], options: argparse.Namespace, first: int, times: Times) -> None:
    """The same rows through the BatchGenerator."""
    generator = BatchGenerator(module, max_tokens=options.steps + 9, completion_batch_size=max(len(lengths), 8))
    began, cpu = time.perf_counter(), time.process_time()
    generator.insert([list(prompt(first + i, length, VOCABULARY)) for i, length in enumerate(lengths)])
    while len(generator.next()[1]) < len(lengths):
        pass
    times.prompts.append(time.perf_counter() - began)
    times.prompts_cpu.append(time.process_time() - cpu)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(options.steps):
        generator.next()
    times.add_steps(options.steps, time.perf_counter() - began, time.process_time() - cpu)
    generator.close()


def compare(model: LoadedModel, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run both in turn, and return their numbers and the ratios of these."""
    runner = ModelRunner(model)
    lengths = [options.length] * rows
    for round_ in range(options.rounds + 1):
        if round_ < 2:  # the first one warms up
            mine, other = Times(), Times()
        ours(runner, lengths, options, 100 * round_, mine)
        theirs(model.module, lengths, options, 100 * round_, other)
    runner._backend.close()
    found, wanted = mine.numbers, other.numbers
    ratios = {name: found[name] / wanted[name] for name in found}
    return {"rows": rows, "tokens": sum(lengths), "treadle": found, "batch_generator": wanted, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill-tokens", type=int, default=Settings.prefill_tokens)
    parser.add_argument("--threads", type=int, default=1, help="of BLAS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"{REPORT}; prompts of {options.length} tokens\n")
    print("| model | size | backend | rows | step, ms | ratio | CPU | prompts, tokens/s | ratio | CPU |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    results = []
    for family in options.family:
        for size in options.size:
            config = FAMILIES[family][SIZES.index(size)]
            with tempfile.TemporaryDirectory() as folder:
                model = load(write_model(Path(folder), family, config), max_running=max(options.rows))
            for rows in options.rows:
                one = {"family": family, "size": size, "backend": model.choice.config.name}
                one |= {"parameters": model.parameters, **compare(model, rows, options)}
                results.append(one)
                print(line(one), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def line(one: dict[str, Any]) -> str:
    """Return the result as a row of the table."""
    mine, other, ratios = one["treadle"], one["batch_generator"], one["ratios"]
    step = f"{mine['step_ms']:.2f} / {other['step_ms']:.2f} | {ratios['step_ms']:.2f} | {ratios['step_cpu_ms']:.2f}"
    rates = " / ".join(f"{one['tokens'] / times['prompts_s']:.0f}" for times in (mine, other))
    prompts = f"{rates} | {ratios['prompts_s']:.2f} | {ratios['prompts_cpu_s']:.2f}"
    size = f"{one['size']} ({one['parameters'] / 1e6:.0f}M)"
    return f"| {one['family']} | {size} | {one['backend']} | {one['rows']} | {step} | {prompts} |"


if __name__ == "__main__":
    main()

"""Decode steps and prompts of many families on the CPU, beside mlx-lm's BatchGenerator in the same process.

    python benchmarks/cpu_families.py [--family F...] [--size tiny 100M] [--rows 1 4 8] [--length 512]
                                      [--spread 0] [--steps 96] [--block 8] [--rounds 3] [--threads 1] [--padded]
                                      [--json FILE]

Makes random float32 models, loads each as the server does, and runs rows, greedy, through the runner and the
BatchGenerator, both with `--threads` threads of the same BLAS: prompts, then blocks of a few decode steps in turn, so
that other programs on the machine slow both alike. Prints the backend, the median milliseconds of a decode step,
prompt tokens a second, and median ratios of wall and of CPU times of neighbouring blocks: Treadle's over the
BatchGenerator's. Below 1 Treadle is faster.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from mlx_lm.utils import load_model  # noqa: E402
from tests.support.architectures import ARCHITECTURES, config_of  # noqa: E402

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
LFM2 = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
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
    "mixtral": (
        TINY | {"num_local_experts": 4, "num_experts_per_tok": 2},
        LARGE | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 768},
    ),
    "lfm2": (
        TINY | LFM2 | {"block_dim": 64, "block_ff_dim": 128, "full_attn_idxs": [1, 3]},
        LARGE | LFM2 | {"block_dim": 768, "block_ff_dim": 2048, "full_attn_idxs": [2, 5, 8, 10]},
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
TEST = "test"
"""The size of the tests' configurations, of every architecture."""


@dataclass
class Times:
    """Wall and CPU seconds of one engine: of decode steps, a block of them a round, and of the prompts of all rows."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    prompts: list[tuple[float, float]] = field(default_factory=list)


@contextmanager
def timed(times: list[tuple[float, float]], count: int = 1) -> Iterator[None]:
    """Add the wall and CPU seconds of the block, divided by `count`, to `times`."""
    began, cpu = time.perf_counter(), time.process_time()
    yield
    times.append(((time.perf_counter() - began) / count, (time.process_time() - cpu) / count))


def configuration(family: str, size: str) -> dict[str, Any]:
    if size == TEST:
        return {**config_of(family), "vocab_size": VOCABULARY}
    return {"model_type": family, **FAMILIES[family][SIZES.index(size)]}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder with a random model, and return it."""
    connect()
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Treadle:
    """Rows of `lengths` through a runner, which meets none of their prompts in its prefix cache; `first` is the number
    of the first one's prompt."""

    def __init__(self, runner: ModelRunner, lengths: Sequence[int], options: argparse.Namespace, first: int) -> None:
        self._runner = runner
        self._rows = Rows(runner, lengths, options.prefill_tokens, GREEDY, vocabulary=VOCABULARY, first=first)

    def prompts(self) -> None:
        self._rows.run(1)

    def steps(self, count: int) -> None:
        self._rows.run(max(self._rows.position) + count)

    def close(self) -> None:
        self._rows.release()
        self._runner.forget_prefixes()


class Theirs:
    """The same rows through a BatchGenerator over `module`, as mlx-lm loads it. Its step in flight is waited for, as it
    would run in the other's time."""

    def __init__(self, module: Any, lengths: Sequence[int], options: argparse.Namespace, first: int) -> None:
        self._generator = BatchGenerator(module, max_tokens=10**6, completion_batch_size=max(len(lengths), 8))
        self._prompts = [list(prompt(first + i, length, VOCABULARY)) for i, length in enumerate(lengths)]

    def prompts(self) -> None:
        self._generator.insert(self._prompts)
        while len(self._generator.next()[1]) < len(self._prompts):
            pass
        mx.synchronize(self._generator.stream)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._generator.next()
        mx.synchronize(self._generator.stream)

    def close(self) -> None:
        self._generator.close()


def compare(model: LoadedModel, module: Any, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run both, theirs over `module`, and return their numbers and the ratios of these."""
    runner = ModelRunner(model)
    lengths = [options.length + i * options.spread for i in range(rows)]
    found = Times(), Times()
    for round_ in range(options.rounds + 1):
        engines = Treadle(runner, lengths, options, 100 * round_), Theirs(module, lengths, options, 100 * round_)
        if round_ == 1:  # the first one warms up
            found = Times(), Times()
        one_round(engines, found, options)
    runner._backend.close()
    mine, other = map(numbers, found)
    return {
        "rows": rows,
        "tokens": sum(lengths),
        "treadle": mine,
        "batch_generator": other,
        "ratios": ratios(*found),
    }


def one_round(engines: Sequence[Treadle | Theirs], found: Sequence[Times], options: argparse.Namespace) -> None:
    """The prompts of both, and short blocks of their decode steps in turn, so that what else the machine does hits
    both."""
    for engine, times in zip(engines, found, strict=True):
        with timed(times.prompts):
            engine.prompts()
        engine.steps(2)
    for block in range(options.steps // options.block):
        for engine, times in list(zip(engines, found, strict=True))[:: 1 if block % 2 else -1]:
            with timed(times.steps, options.block):
                engine.steps(options.block)
    for engine in engines:
        engine.close()


def numbers(times: Times) -> dict[str, float]:
    """Milliseconds of a step and seconds of the prompts, medians of wall and of CPU times."""
    (step, step_cpu), (prompts, prompts_cpu) = medians(times.steps), medians(times.prompts)
    return {"step_ms": step * 1e3, "step_cpu_ms": step_cpu * 1e3, "prompts_s": prompts, "prompts_cpu_s": prompts_cpu}


def medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = zip(*times, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def ratios(mine: Times, other: Times) -> dict[str, float]:
    """Medians of the ratios of blocks, and of prompts, that followed each other."""
    found = {}
    for name, ours, theirs in (("step", mine.steps, other.steps), ("prompts", mine.prompts, other.prompts)):
        pairs = [(a[0] / b[0], a[1] / b[1]) for a, b in zip(ours, theirs, strict=True)]
        found[name], found[f"{name}_cpu"] = medians(pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES, *ARCHITECTURES], default=list(FAMILIES))
    parser.add_argument("--size", nargs="+", choices=[*SIZES, TEST], default=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--spread", type=int, default=0, help="tokens by which each row's prompt is longer than the last"
    )
    parser.add_argument("--steps", type=int, default=96, help="decode steps of a round")
    parser.add_argument("--block", type=int, default=8, help="steps before it is the other's turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill-tokens", type=int, default=Settings.prefill_tokens)
    parser.add_argument("--threads", type=int, default=1, help="of BLAS")
    parser.add_argument("--padded", action="store_true", help="the padded backend, where another would be chosen")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"{REPORT}; prompts of {options.length} tokens\n")
    print("| model | size | backend | rows | step, ms | ratio | CPU | prompts, tokens/s | ratio | CPU |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    results = []
    for family in options.family:
        for size in options.size:
            config = configuration(family, size)
            with tempfile.TemporaryDirectory() as folder:
                made = write_model(Path(folder), config)
                model = load(made, max_running=max(options.rows), padded=options.padded)
                module, _ = load_model(made)  # without Treadle's faster layers
            for rows in options.rows:
                one = {"family": family, "size": size, "backend": model.choice.config.name}
                one |= {"parameters": model.parameters, **compare(model, module, rows, options)}
                results.append(one)
                print(line(one), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def line(one: dict[str, Any]) -> str:
    """Return the result as a row of the table."""
    mine, other, ratios = one["treadle"], one["batch_generator"], one["ratios"]
    step = f"{mine['step_ms']:.2f} / {other['step_ms']:.2f} | {ratios['step']:.2f} | {ratios['step_cpu']:.2f}"
    rates = " / ".join(f"{one['tokens'] / times['prompts_s']:.0f}" for times in (mine, other))
    prompts = f"{rates} | {ratios['prompts']:.2f} | {ratios['prompts_cpu']:.2f}"
    size = f"{one['size']} ({one['parameters'] / 1e6:.0f}M)"
    return f"| {one['family']} | {size} | {one['backend']} | {one['rows']} | {step} | {prompts} |"


if __name__ == "__main__":
    main()

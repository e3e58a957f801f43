"""Decode steps, prompts and memory of many families on a GPU, beside mlx-lm's BatchGenerator and the floor.

    python benchmarks/gpu/families_steps.py [--family qwen3_moe ...] [--bits 16 4 mxfp4] [--rows 1 8 32] [--json OUT]
        [--prompts 2048 16384] [--windowed 32768] [--no-theirs] [--small] [--jobs N]

Each family has layers of its real sizes, but few of them (`family_shapes`), with random weights made in memory, and is
loaded as `treadle serve` does, self-tests included. A decode step is the median of pipelined steps of both engines;
beside it stands how long starting it holds up our host. The floor is the bytes that a step has to read at 4.3 TB/s:
weights without the embedding table, of experts those that so many tokens touch on average, and keys, values and states.
Peak memory is that of the largest batch. Prompts are timed up to their first token, without cached prefixes; beside
that stand the megabytes that their keys, values and states hold, what the layers need of them (a window no more tokens
than it sees), and what all tokens in all layers would take.

Each family and number of bits runs in a process of its own, with a time limit: one that fails is reported, and the
next one runs. With `--jobs` several are loaded at once, as most of that is the compilers' time on the host, and then
measured one after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.gpu.family_shapes import SHAPES, config_of, share_of_experts  # noqa: E402

T = TypeVar("T")
BANDWIDTH = 4.3e12
MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and groups of ways to quantize that are not affine."""
STEPS = 24


def make(config: dict[str, Any], bits: str, heard: range | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the module, random and in memory, and its config. Its router and head are louder, so that the best
    experts and tokens are not nearly equal. With `heard` only these tokens are ever the best."""
    import mlx.core as mx
    from benchmarks.gpu.families import _loudness
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes, quantize_model

    mx.random.seed(0)
    kind, arguments = _get_classes(config)
    module = kind(arguments.from_dict(config))
    module.set_dtype(mx.bfloat16)
    module.load_weights(
        [(name, weight * _loudness(name, config)) for name, weight in tree_flatten(module.parameters())]
    )
    if heard is not None:
        mask = mx.zeros((config["vocab_size"], 1), mx.bfloat16)
        mask[heard.start : heard.stop] = 1
        module.lm_head.weight = module.lm_head.weight * mask
    if bits != "16":
        width, group = MODES.get(bits) or (int(bits), 64)
        mode = bits if bits in MODES else "affine"
        predicate = getattr(module, "quant_predicate", None)
        module, config = quantize_model(module, config, group, width, mode=mode, quant_predicate=predicate)
    for _, array in tree_flatten(module.parameters()):
        mx.eval(array)  # one after the other, as all of them in float32 may not fit
    return module, config


def load_made(module: Any, config: dict[str, Any], memory: int, rows: int) -> Any:
    """Return `module` loaded as from a folder, with `memory` bytes for caches."""
    from treadle.runner.loading.loader import load
    from treadle.runner.mlxlm import MlxLm

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config, default=str))
        with mock.patch.object(MlxLm, "load", return_value=(module, config)):
            return load(Path(folder), memory=memory, max_running=rows)


def floor_ms(model: Any, config: dict[str, Any], rows: int, length: int) -> float:
    """Milliseconds to read what a step of `rows` rows of `length` tokens needs."""
    from mlx.utils import tree_flatten

    share, total = share_of_experts(config, rows), 0.0
    tied = config.get("tie_word_embeddings")
    for name, module in model.module.named_modules():
        if module.children() or (name.endswith("embed_tokens") and not tied):
            continue
        size = sum(array.nbytes for _, array in tree_flatten(module.parameters()))
        total += size * (share if "Switch" in type(module).__name__ else 1.0)
    total += rows * (model.kv.row_bytes + length * model.kv.token_bytes)
    return total / BANDWIDTH * 1e3


def our_step_ms(model: Any, rows: int, length: int) -> tuple[float, float]:
    """Milliseconds of a step, and those that starting it takes the host."""
    from benchmarks.gpu.steps import Rows

    from treadle.runner.model_runner import ModelRunner

    runner = ModelRunner(model)
    batch = Rows(runner, [length] * rows, 4096, vocabulary=model.vocabulary)
    batch.run(1)
    batch.run(max(batch.position) + STEPS)
    batch.release()
    runner._backend.close()
    return batch.decode_ms(), batch.host_ms()


def our_prompt_s(model: Any, length: int) -> tuple[float, int]:
    """Seconds from a prompt's start to its first token, the best of three, and the bytes of its keys and values."""
    from benchmarks.gpu.steps import Rows

    from treadle.runner.model_runner import ModelRunner

    runner, found = ModelRunner(model), []
    for turn in range(3):
        batch = Rows(runner, [length + 1], 4096, vocabulary=model.vocabulary, first=turn)
        began = time.perf_counter()
        batch.run(1)
        found.append(time.perf_counter() - began)
        held = runner._backend.kv_bytes()
        batch.release()
        runner.forget_prefixes()
    runner._backend.close()
    return min(found), held


def least_bytes(model: Any, tokens: int) -> tuple[int, int]:
    """Bytes of a sequence's keys, values and states: of what its layers need, and if all kept all of its tokens."""
    import mlx.core as mx

    from treadle.runner.mlxlm import states, window_of

    library, caches = model.library, model.library.new_caches(model.module)
    with model.layers.originals():
        model.module(mx.array([[1, 2]]), cache=caches)
    mx.eval(states(caches))
    needed = whole = 0
    for cache in library.leaves(caches):
        pair = library.keys_and_values(cache)
        each = sum(array[..., :1, :].nbytes for array in pair) if pair else 0
        state = 0 if pair else int(cache.nbytes)
        needed += state + each * min(tokens, window_of(cache) or tokens)
        whole += state + each * tokens
    return needed, whole


def their_step_ms(module: Any, rows: int, length: int, vocabulary: int) -> float:
    from benchmarks.gpu.steps import prompt
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(module, max_tokens=STEPS + 60, completion_batch_size=max(rows, 8))
    generator.insert([list(prompt(i, length, vocabulary)) for i in range(rows)])
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < STEPS:
        _, gained = generator.next()
        now = time.perf_counter()
        if len(gained) == rows:
            times.append((now - began) * 1e3)
        began = now
    generator.close()
    return statistics.median(times[4:])


def their_prompt_s(module: Any, length: int, vocabulary: int, turns: int) -> float:
    from benchmarks.gpu.steps import prompt
    from mlx_lm.generate import BatchGenerator

    found = []
    for turn in range(turns):
        generator = BatchGenerator(module, max_tokens=2)
        began = time.perf_counter()
        generator.insert([list(prompt(turn, length, vocabulary))])
        while not generator.next()[1]:
            pass
        found.append(time.perf_counter() - began)
        generator.close()
    return min(found)


def measure(options: argparse.Namespace, family: str, bits: str) -> dict[str, Any]:
    """Measure one family quantized to `bits`; print a line for each batch."""
    began = time.perf_counter()
    with turns_of(options, fcntl.LOCK_SH):
        module, config = make(config_of(family, small=options.small), bits)
        made = time.perf_counter()
        model = load_made(module, config, int(options.memory * 2**30), max(options.rows))
    found: dict[str, Any] = {"family": family, "bits": bits, "path": model.compute.summary(), "steps": []}
    states = {status.name.value: f"{status.state.value}: {status.reason}" for status in model.compute.kernels}
    found["kernels"] = states
    found["make_s"], found["load_s"] = made - began, time.perf_counter() - made
    with turns_of(options, fcntl.LOCK_EX):
        return measure_loaded(options, model, config, found)


@contextmanager
def turns_of(options: argparse.Namespace, lock: int) -> Iterator[None]:
    """Let no process measure inside the block, or with an exclusive `lock` nor load."""
    with (options.json.parent / "turns").open("w") as file:
        fcntl.flock(file, lock)
        yield


def measure_loaded(
    options: argparse.Namespace, model: Any, config: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    """Add the steps, the prompt and the peaks of a loaded model to what was `found`."""
    import mlx.core as mx

    vocabulary, length, began = model.vocabulary, options.length, time.perf_counter()
    print(f"{found['family']} {found['bits']} bits: {found['path']}; loaded in {found['load_s']:.1f} s", flush=True)
    print(f"  replaced layers: {found['kernels']['replaced_layers']}", flush=True)
    for rows in options.rows:
        floor = floor_ms(model, config, rows, length)
        (ours, host), peak = _with_peak(partial(our_step_ms, model, rows, length))
        line: dict[str, Any] = {"rows": rows, "ms": ours, "host_ms": host, "floor_ms": floor, "of_floor": floor / ours}
        line["peak"] = peak
        if not options.no_theirs:
            with model.layers.originals():
                run = partial(their_step_ms, model.module, rows, length, vocabulary)
                theirs, line["theirs_peak"] = _with_peak(run)
            line |= {"theirs_ms": theirs, "ratio": ours / theirs}
        found["steps"].append(line)
        print(_shown(line), flush=True)
        write(options, found)  # in case that the process is stopped
    found["prompts"] = []
    windowed = "sliding_window" in config and options.windowed > 0
    for tokens in [*options.prompts, *[options.windowed] * windowed]:
        rates = _prompt(model, tokens)
        if tokens in options.prompts:
            if not options.no_theirs:
                turns = 1 if found["prompts"] else 2  # the first one ever compiles
                with model.layers.originals():
                    rates["theirs_tokens_s"] = tokens / their_prompt_s(model.module, tokens, vocabulary, turns)
            found["prompts"].append(rates)
        found["longest"] = rates
        print(f"  prompt of {tokens:,}: {_rates(rates)} tokens a second; {_memory(rates)}", flush=True)
        write(options, found)
    found["seconds"] = time.perf_counter() - began
    mx.clear_cache()
    return found


def _prompt(model: Any, tokens: int) -> dict[str, Any]:
    """Our rate of a prompt, and the megabytes that it holds, needs, and would take without windows."""
    seconds, held = our_prompt_s(model, tokens)
    needed, whole = least_bytes(model, tokens)
    rates: dict[str, Any] = {"tokens": tokens, "tokens_s": tokens / seconds}
    return rates | {"held_mb": held / 1e6, "needed_mb": needed / 1e6, "whole_mb": whole / 1e6}


def _with_peak(run: Callable[[], T]) -> tuple[T, float]:
    """What `run` returns, and the gigabytes at its peak."""
    import mlx.core as mx

    mx.clear_cache()
    mx.reset_peak_memory()
    return run(), mx.get_peak_memory() / 1e9


def _rates(prompt: dict[str, Any]) -> str:
    return " / ".join(f"{prompt[name]:,.0f}" for name in ("tokens_s", "theirs_tokens_s") if name in prompt)


def _memory(prompt: dict[str, Any]) -> str:
    megabytes = " / ".join(f"{prompt[name]:,.1f}" for name in ("held_mb", "needed_mb", "whole_mb"))
    return f"{megabytes} MB of {prompt['tokens']:,}"


def _shown(line: dict[str, Any]) -> str:
    theirs = f" / {line['theirs_ms']:.2f} = {line['ratio']:.2f}" if "ratio" in line else ""
    peaks = " / ".join(f"{line[name]:.1f}" for name in ("peak", "theirs_peak") if name in line)
    share = f"floor {line['floor_ms']:.3f} ms = {line['of_floor']:.0%}"
    return f"  B = {line['rows']}: {line['ms']:.2f}{theirs} ms (host {line['host_ms']:.2f}); {share}; peak {peaks} GB"


def child(options: argparse.Namespace) -> None:
    """Measure the one family and number of bits of this process; the figures so far are in `--json`."""
    (family,), (bits,) = options.family, options.bits
    try:
        found = measure(options, family, bits)
    except Exception as error:
        line = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        traceback.print_exc()
        print(f"{family} {bits} bits FAILED {line}", flush=True)
        found = {"family": family, "bits": bits, "failed": line}
    write(options, found)


def write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    options.json.write_text(json.dumps(found))


def run_together(options: argparse.Namespace, cases: Sequence[tuple[str, str]], folder: Path) -> list[dict[str, Any]]:
    """Run cases, each a family and its bits, in child processes that load at the same time. Returns their figures."""
    words = ["--child", "--rows", *map(str, options.rows), "--prompts", *map(str, options.prompts)]
    words += ["--length", str(options.length), "--memory", str(options.memory), "--windowed", str(options.windowed)]
    words += [flag for flag, on in (("--small", options.small), ("--no-theirs", options.no_theirs)) if on]
    files = [folder / f"{family}-{bits}.json" for family, bits in cases]
    started = [
        subprocess.Popen([sys.executable, __file__, *words, "--family", family, "--bits", bits, "--json", str(file)])
        for (family, bits), file in zip(cases, files, strict=True)
    ]
    end, lines = time.monotonic() + options.limit * len(cases), []
    for (family, bits), file, process in zip(cases, files, started, strict=True):
        wrong = _wrong(process, end - time.monotonic())
        if wrong:
            print(f"{family} {bits} bits FAILED: {wrong}", flush=True)
        lines.append(
            json.loads(file.read_text()) if file.exists() else {"family": family, "bits": bits, "failed": wrong}
        )
    return lines


def _wrong(process: subprocess.Popen[bytes], seconds: float) -> str:
    """What went wrong with a process that has so many seconds left; empty if nothing did."""
    try:
        code = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "stopped at its limit"
    return "" if code == 0 else f"exit code {code}"


def table(lines: Sequence[dict[str, Any]]) -> str:
    """One row for each family and number of bits."""
    rows = []
    for one in lines:
        if "failed" in one:
            rows.append(f"| {one['family']} | {one['bits']} | failed: {one['failed']} |")
            continue
        cells = [one["family"], one["bits"], one["path"].split(" (")[0]]
        for step in one["steps"]:
            theirs = f" / {step['theirs_ms']:.2f} = {step['ratio']:.2f}" if "ratio" in step else ""
            cells.append(f"{step['ms']:.2f}{theirs} ({step['of_floor']:.0%})")
        last = one["steps"][-1]
        cells += [_rates(prompt) for prompt in one["prompts"]]
        cells.append(" / ".join(f"{last[name]:.1f}" for name in ("peak", "theirs_peak") if name in last))
        cells.append(_memory(one["longest"]) if "longest" in one else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=SHAPES, nargs="*", default=list(SHAPES))
    parser.add_argument("--bits", nargs="*", choices=["16", "2", "3", "4", "5", "6", "8", *MODES], default=["16", "4"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--prompts", type=int, nargs="*", help="tokens (2048 16384; with --small 64)")
    parser.add_argument("--windowed", type=int, help="tokens of one more prompt of families with windows (32768)")
    parser.add_argument("--memory", type=float, default=2.0, help="GiB for caches")
    parser.add_argument("--limit", type=int, default=180, help="seconds for a family and its bits")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--no-theirs", action="store_true", help="leave BatchGenerator out")
    parser.add_argument("--small", action="store_true", help="see that it works, on a CPU")
    parser.add_argument("--jobs", type=int, default=1, help="families that are loaded at once")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prompts is None:
        options.prompts = [64] if options.small else [2048, 16384]
    if options.windowed is None:
        options.windowed = 128 if options.small else 32768
    if options.child:
        child(options)
        return
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cases = list(itertools.product(options.family, options.bits))
        for first in range(0, len(cases), options.jobs):
            lines += run_together(options, cases[first : first + options.jobs], Path(folder))
            if options.json:
                options.json.write_text(json.dumps(lines, indent=1))
    batches = " | ".join(f"B = {rows}" for rows in options.rows)
    prompts = " | ".join(f"prompt of {tokens:,}, tokens/s" for tokens in options.prompts)
    print(f"\n| family | bits | path | {batches} | {prompts} | peak, GB | held / needed / whole |")
    print("|" + "---|" * (5 + len(options.rows) + len(options.prompts)))
    print(table(lines))
    sys.exit(1 if any("failed" in line for line in lines) else 0)


if __name__ == "__main__":
    main()

"""The prefill budget on a GPU: bursts (P1), 256 sequences (P2) and a long prompt beside four (P3), trees in turn.

    python benchmarks/gpu/pace.py OUT [--shape 0.6B | 8B] [--tree NAME=FOLDER ...] [--rounds 4] [--folder FOLDER]
        [--trace] [--memory 12GiB] [--workload W ...] [--quick]

Serves a Qwen3 shape with random bf16 weights from each tree (a checkout; this one by default) at the same time, sends
the same workloads to one after the other in each round, and prints each round's figures with their medians. `--trace`
runs one more round against this tree with its steps traced, and sums that up. Two trees and four rounds take about 2
minutes for a shape on an H200, after the model has been made in FOLDER (15 s and 1.2 GB, or 60 s and 16 GB).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "src")]

import msgspec  # noqa: E402

from treadle.bench.measures import workload_figures  # noqa: E402
from treadle.bench.samples import Result, Round  # noqa: E402

SHAPES = {"0.6B": (28, 1024, 16), "8B": (36, 4096, 32)}  # layers, hidden size, attention heads
P1 = "burst:c=16,every_s=0.05"
P2 = "burst:c=256,every_s=0.002,tokens=64"
P3 = "stall:prompt=5000,tokens=8192"
QUICK = ("burst:c=4,every_s=0.02,tokens=16", "burst:c=16,every_s=0.002,tokens=16", "stall:prompt=300")


def commands(trees: list[str], model: Path, memory: str, slots: int) -> list[str]:
    """`bench run`'s words that start a server of each tree."""
    words = []
    for tree in trees:
        name, _, folder = tree.partition("=")
        source = Path(folder).resolve() / "src"
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        serve = f"{sys.executable} -m treadle serve {model} --max-running {slots} --memory {memory}"
        words += ["--start", f"PYTHONPATH={path} {serve}", "--name", name, "--model", model.name]
    return words


def traced(trace: Path, model: Path, memory: str, slots: int) -> list[str]:
    """`bench run`'s words that start this tree's server with its steps traced."""
    script = ROOT / "benchmarks" / "traced_serve.py"
    serve = f"{sys.executable} {script} {trace} {model} --max-running {slots} --memory {memory}"
    return ["--start", serve, "--name", "traced", "--model", model.name]


def run(out: Path, words: list[str], loads: tuple[str, ...], rounds: int) -> Result:
    """Run the workloads; the result is left at `out`."""
    command = [sys.executable, "-m", "treadle", "bench", "run", *words, "--rounds", str(rounds), "--max-lag", "1"]
    command += [word for load in loads for word in ("--workload", load)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with out.with_suffix(".log").open("w") as log:
        subprocess.run([*command, "--json", str(out)], env=environment, stdout=log, stderr=log, check=True)
    return msgspec.json.decode(out.read_bytes(), type=Result)


def gaps(round_: Round) -> dict[str, float]:
    """All complete requests' gaps, and how many requests are not complete (P2)."""
    ordered = sorted(gap for sample in round_.samples for gap in sample.gaps_s)
    incomplete = sum(sample.outcome not in ("ok", "left") for sample in round_.samples)
    median = ordered[len(ordered) // 2] if ordered else 0.0
    if not median:  # the client read most pieces together
        return {"not complete": float(incomplete)}
    return {
        "gap p99 / median": ordered[int(0.99 * len(ordered))] / median,
        "longest gap / median": ordered[-1] / median,
        "not complete": float(incomplete),
    }


def figures(workload: str, round_: Round) -> dict[str, float]:
    own = {name: value for name, value in workload_figures(workload, round_).items() if "goodput" not in name}
    tokens = sum(sample.tokens for sample in round_.samples if sample.outcome == "ok")
    rate = {"tok/s": tokens / round_.wall_s}
    return own if workload.startswith("stall") else own | gaps(round_) | rate


def show(result: Result) -> None:
    """Print each figure: a line a tree, its rounds and their median."""
    for workload, rounds in result.rounds.items():
        print(f"\n{workload}")
        found: dict[str, dict[str, list[float]]] = {}
        for round_ in rounds:
            for name, value in figures(workload, round_).items():
                found.setdefault(name, {}).setdefault(round_.target, []).append(value)
        for name, targets in found.items():
            for target, values in targets.items():
                each = "  ".join(f"{value:9.3g}" for value in values)
                print(f"  {name:24} {target:10} {each}   median {statistics.median(values):.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--tree", action="append", metavar="NAME=FOLDER", help="a checkout that is measured")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where the model is, or is to be made")
    parser.add_argument("--memory", default="12GiB", help="each server's, for keys and values")
    parser.add_argument("--trace", action="store_true", help="a traced round of this tree, too")
    parser.add_argument("--workload", action="append", default=[], metavar="W", help="instead of P1, P2 and P3")
    parser.add_argument("--quick", action="store_true", help="small workloads: see that it works")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.folder or Path(tempfile.mkdtemp()) / f"qwen3-{options.shape}"
    if not (folder / "model.safetensors").exists():
        from benchmarks.gpu.served import make_model

        layers, hidden, heads = SHAPES[options.shape]
        make_model(folder, layers, hidden, heads)
    trees = options.tree or [f"here={ROOT}"]
    loads, slots = (QUICK, 16) if options.quick else ((P1, P2, P3), 256)
    loads = tuple(options.workload) or loads
    out = options.out / f"pace-{options.shape}.json"
    show(run(out, commands(trees, folder, options.memory, slots), loads, options.rounds))
    if options.trace:
        trace = options.out / f"steps-{options.shape}.jsonl"
        run(out.with_suffix(".traced.json"), traced(trace, folder, options.memory, slots), loads, 1)
        print(flush=True)
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / "step_trace.py"), str(trace)], check=True)


if __name__ == "__main__":
    main()

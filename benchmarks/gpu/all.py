"""All measurements on a GPU in one call: first correctness, then times.

    python benchmarks/gpu/all.py OUT [PART ...] [--model FOLDER] [--list]

Runs the named parts (all of them by default: about half an hour on an H200), each with a time limit; their output is
shown without comments and written to OUT. A part that fails is reported, and the next one runs. The part `served` makes
its model in FOLDER, and later parts find it there.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS = ("steps.py", "--ways", "fused", "generator")
AGENTS = ("../prefixes.py", "agents", "shared", "miss", "--agents", "20", "--turns", "8")
LONG = ("--system", "4000", "--long", "4000")
SERVED = ("served.py", "{out}", "--folder", "{model}")
BURSTS = ("--workload", "burst:c=64,every_s=0.01,tokens=256", "--workload", "burst:c=256,every_s=0.005,tokens=256")
FAULTS = ("--workload", "cancel", "--workload", "overload:fits=128,lasts_s=10")
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "sampling": (120, ("sampling.py",)),
    "linear": (150, ("linear.py", "--cases", "16")),
    "attention": (150, ("attention.py", "--cases", "16")),
    "attention-shapes": (200, ("attention_shapes.py",)),
    "recurrent": (150, ("recurrent.py",)),
    "families": (300, ("families.py",)),
    "families-kv8": (200, ("families.py", "--bits", "16", "--kv-bits", "8", "--family", "llama3", "qwen3", "gemma3")),
    "families-steps": (900, ("families_steps.py", "--jobs", "7", "--json", "{out}/families-steps.json")),
    "whole-models": (600, ("whole_models.py", "{out}")),
    "start": (900, ("start.py", "--json", "{out}/start.json")),
    "8B": (150, (*STEPS, "--shape", "8B")),
    "8B-int4": (240, (*STEPS, "--shape", "8B", "--bits", "4")),
    "8B-long": (200, (*STEPS, "--shape", "8B", "--rows", "--long", "--no-fidelity")),
    "8B-kv8": (120, ("steps.py", "--ways", "fused", "--shape", "8B", "--rows", "32", "--long", "--kv-bits", "8")),
    "0.6B": (120, (*STEPS, "--shape", "0.6B")),
    "0.6B-int4": (120, (*STEPS, "--shape", "0.6B", "--bits", "4")),
    "0.6B-drawn": (60, ("steps.py", "--ways", "fused", "--shape", "0.6B", "--sampled", "--no-fidelity")),
    "served": (500, (*SERVED, "--name", "served")),
    "bursts": (200, (*SERVED, "--name", "bursts", "--alone", "--max-running", "256", "--rounds", "1", *BURSTS)),
    "faults": (150, (*SERVED, "--name", "faults", "--rounds", "1", *FAULTS)),
    "prefixes": (150, (*AGENTS, *LONG, "--model", "{model}")),
}
STOPPING_S = 30


def run(name: str, out: Path, model: Path) -> bool:
    """Run a part. Returns whether it succeeded."""
    limit_s, words = PARTS[name]
    command = [sys.executable, str(HERE / words[0]), *(word.format(out=out, model=model) for word in words[1:])]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    began, log = time.perf_counter(), out / f"{name}.txt"
    print(f"== {name}", flush=True)
    with log.open("w") as file:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        part = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            code = part.wait(limit_s)
            ended = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit_s} s"
            stop(part)
    lines = [line for line in log.read_text().splitlines() if line.strip() and not line.startswith("#")]
    print("\n".join(lines[-60:]), flush=True)
    print(f"== {name}: {ended or 'done'}, {time.perf_counter() - began:.0f} s", flush=True)
    return not ended


def stop(part: subprocess.Popen[bytes]) -> None:
    """Send SIGINT, as a terminal does, so that it stops the servers that it has started."""
    os.killpg(part.pid, signal.SIGINT)
    try:
        part.wait(STOPPING_S)
    except subprocess.TimeoutExpired:
        os.killpg(part.pid, signal.SIGKILL)
        part.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="OUT/model by default")
    parser.add_argument("--list", action="store_true", help="say what parts there are")
    options = parser.parse_intermixed_args()
    if options.list:
        sys.exit("\n".join(f"{name:14} {' '.join(words)}" for name, (_, words) in PARTS.items()))
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}: there are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.model or options.out / "model"
    failed = [part for part in options.parts or PARTS if not run(part, options.out, model)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

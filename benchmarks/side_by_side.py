"""Measure Treadle and its peers on the same work: the tables of docs/benchmarks.md.

    python benchmarks/side_by_side.py OUT [--model demo|tiny] [--blas theirs|same] [--peer NAME...] [--workload W...]
                                      [--rounds N]

Writes OUT/MODEL-BLAS.json and .html. Run `python benchmarks/peers.py install` and `make install` first, and leave the
machine alone meanwhile.

`--blas theirs`: the peers as they install, on the model as it comes (bfloat16). On a CPU without a BLAS for it that is
slow, and the default sizes are small. `--blas same`: the peers with the OpenBLAS that Treadle uses, on the same weights
as float32. The tiny model is float32 and reads one token a byte. In all, no answer ends before its limit
(`comparable.py --endless`), as the peers do not know `ignore_eos`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"
MODELS = ROOT / ".peers" / "models"
PEERS = ("mlx-lm", "vllm-mlx-batched", "vllm-mlx")
SIZES = {
    "theirs": (
        "burst:tokens=16",
        "chat:each=1,tokens=32",
        "stall:prompt=400,lead=8,alone_s=0.5,tokens=512",
        "interactive:prompt=400,tokens=256",
        "cancel:times=6,tokens=16,prompt=16",
        "overload:lasts_s=20",
        "sweep:most=16,each=1,tokens=16",
    ),
    "same": (
        "burst",
        "burst:c=16,tokens=32",
        "chat:each=2,tokens=128",
        "stall",
        "interactive",
        "cancel",
        "overload",
        "sweep:most=32",
    ),
    "tiny": (
        "burst",
        "chat",
        "stall:prompt=1000",
        "interactive:prompt=1000",
        "cancel",
        "overload",
        "sweep:most=64",
    ),
}


def last_line_of(*arguments: str | Path) -> str:
    """Run a script of this folder; return the last line of its output."""
    done = subprocess.run([sys.executable, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1]


def model_folder(model: str, blas: str) -> Path:
    """Return the folder for all servers; made at the first call."""
    folder = MODELS / f"{model}-{blas}"
    if folder.exists():
        return folder
    if model == "tiny":
        last_line_of(HERE / "tiny_model.py", folder)
        return folder
    find = "from treadle.config import Settings; from treadle.models.resolve import resolve; "
    find += "print(resolve(Settings(model='demo'), lambda _: None).path)"
    python = ROOT / ".venv" / "bin" / "python"
    demo = subprocess.run([python, "-c", find], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    float32 = ["--float32"] if blas == "same" else []
    last_line_of(HERE / "comparable.py", demo.splitlines()[-1], folder, "--endless", *float32)
    return folder


def targets(folder: Path, blas: str, peers: list[str]) -> list[str]:
    """Return the targets' options; Treadle is the first, as the reference of the ratios."""
    program = ROOT / ".venv" / "bin" / "treadle"
    arguments = ["--start", f"{program} serve {folder}", "--name", "treadle"]
    same = ["--openblas"] if blas == "same" else []
    for peer in peers:
        arguments += [
            "--start",
            last_line_of(HERE / "peers.py", "command", peer, "--model", folder, *same),
            "--name",
            peer,
        ]
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--blas", choices=("theirs", "same"), default="same")
    parser.add_argument("--peer", action="append", choices=PEERS, help="default: all")
    parser.add_argument(
        "--workload", action="append", metavar="W", help="as of treadle bench run; default: the tables'"
    )
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    folder = model_folder(options.model, options.blas)
    loads = options.workload or SIZES["tiny" if options.model == "tiny" else options.blas]
    arguments = [word for load in loads for word in ("--workload", load)]
    arguments += targets(folder, options.blas, options.peer or list(PEERS))
    base = options.out / f"{options.model}-{options.blas}"
    arguments += ["--rounds", str(options.rounds), "--json", f"{base}.json", "--html", f"{base}.html"]
    sys.exit(subprocess.run([ROOT / ".venv" / "bin" / "treadle", "bench", "run", *arguments], check=False).returncode)


if __name__ == "__main__":
    main()

"""Families served on the CPU: Treadle beside mlx_lm.server with the same OpenBLAS, in interleaved rounds.

    python benchmarks/cpu_served.py OUT [--family F...] [--size tiny 100M] [--clients 1 8] [--prompt 64] [--tokens 32]
                                    [--each 4] [--rounds 3] [--threads 1] [--options "--speculate off"]

Makes the random float32 models of `cpu_families.py`, with the tests' tokenizer and answers of printable ASCII, none of
which ends early, and runs `treadle bench run` on each: clients that send their next request when the last is answered.
Its tables are printed, its JSON and HTML left in OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu_families import FAMILIES, SIZES, configuration, write_model  # noqa: E402
from benchmarks.peers import preloaded  # noqa: E402
from benchmarks.tiny_model import PRINTABLE  # noqa: E402
from tests.support.tiny import make_tiny  # noqa: E402


def make_model(folder: Path, family: str, size: str) -> None:
    """Write the folder of a model whose answers are text, one piece a token."""
    import mlx.core as mx

    make_tiny(folder, context=4096, eos=False)
    made = json.loads((folder / "config.json").read_text())
    tokens = {name: value for name, value in made.items() if name.endswith("_token_id")}
    write_model(folder, {**configuration(family, size), **tokens})
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    head = weights["lm_head.weight"]
    ids = mx.arange(head.shape[0])[:, None]
    weights["lm_head.weight"] = mx.where((ids >= PRINTABLE.start) & (ids < PRINTABLE.stop), head, 0)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def serve(folder: Path, base: Path, options: argparse.Namespace) -> None:
    """Run all rounds with one model; what is left has the names of `base`."""
    threads, most = options.threads, max(options.clients)
    peer = f"{' '.join(preloaded(threads))} {sys.executable} -m mlx_lm server --model {folder}"
    treadle = f"{sys.executable} -m treadle serve {folder} --threads {threads} --max-running {most} {options.options}"
    arguments = ["--start", treadle, "--name", "treadle", "--model", folder.name]
    arguments += ["--start", peer, "--name", "mlx-lm", "--model", str(folder)]
    for clients in options.clients:
        load = f"chat:c={clients},each={options.each},prompt={options.prompt},tokens={options.tokens}"
        arguments += ["--workload", load]
    arguments += ["--rounds", str(options.rounds), "--max-lag", "1"]
    arguments += ["--json", f"{base}.json", "--html", f"{base}.html"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-m", "treadle", "bench", "run", *arguments], env=env, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=["llama", "qwen3_moe", "qwen3_next"])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64, help="words")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--each", type=int, default=4, help="requests of a client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of BLAS")
    parser.add_argument("--options", default="", help="of treadle serve")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for family in options.family:
        for size in options.size:
            with tempfile.TemporaryDirectory() as parent:
                folder = Path(parent) / f"{family}-{size}"
                make_model(folder, family, size)
                print(f"\n{family}, {size}", flush=True)
                serve(folder, options.out / folder.name, options)


if __name__ == "__main__":
    main()

"""Served on a GPU: Treadle beside mlx_lm.server, and beside its own engine without a server.

    python benchmarks/gpu/served.py OUT [--layers 28] [--hidden 1024] [--quick] [--folder FOLDER] [--max-running 64]
        [--memory 40GiB] [--workload W ...] [--rounds 2] [--name run]

Makes a Qwen3 0.6B shape with random bf16 weights whose answers are printable ASCII (one piece a token, no end token).
Runs `treadle bench engine` and `treadle bench run` on it, leaves their JSON and HTML in OUT under `--name`, and prints
tables. The model is made in FOLDER, and found there the next time. Needs MLX with a GPU, mlx-lm, and Treadle's own
requirements; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.tiny import make_tiny  # noqa: E402

PRINTABLE = range(0x20, 0x7F)
VOCABULARY = 151_936
CONTEXT = 40_960


def make_model(folder: Path, layers: int, hidden: int, heads: int = 16) -> None:
    """Make a model folder of real size: the tests' tokenizer, and random weights."""
    make_tiny(folder, architecture="qwen3", context=CONTEXT, eos=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "rope_theta": 1_000_000.0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    weights = {name: value.astype(mx.bfloat16) for name, value in tree_flatten(model.parameters())}
    mask = mx.zeros((VOCABULARY, 1), dtype=mx.bfloat16)
    mask[PRINTABLE.start : PRINTABLE.stop] = 1
    weights["lm_head.weight"] = weights["lm_head.weight"] * mask
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def treadle(*arguments: str) -> None:
    """Run a command of this checkout's Treadle; a failure is reported, and the next command runs."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "treadle", *arguments], env=env, check=False)
    if done.returncode:
        print(f"treadle {' '.join(arguments)}: exit code {done.returncode}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--workload", action="append", metavar="W", help="instead of the usual ones; no engine then")
    parser.add_argument("--folder", type=Path, help="where the model is, or is to be made")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--memory", default="40GiB", help="Treadle's, for keys and values: the peer needs some, too")
    parser.add_argument("--rounds", default="2")
    parser.add_argument("--name", default="run", help="of the files that are left")
    parser.add_argument("--alone", action="store_true", help="without mlx_lm.server")
    parser.add_argument("--quick", action="store_true", help="see that it works")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.folder or Path(tempfile.mkdtemp()) / "qwen3-shape"
    if not (folder / "model.safetensors").exists():
        make_model(folder, options.layers, options.hidden)
    rounds, most = ("1", "2") if options.quick else (options.rounds, "64")
    batches = "1,2" if options.quick else "1,8,32"
    engine = ["--batch", batches, "--prompt", "512", "--tokens", "128", "--rounds", rounds]
    if not options.workload:
        treadle("bench", "engine", str(folder), *engine, "--json", str(options.out / "engine.json"))
    loads = [f"sweep:most={most},prompt=82,tokens=128,each=2"]
    if not options.quick:
        loads += ["burst:c=16", "burst:c=64", "stall:prompt=5000,tokens=8192", "interactive:prompt=5000,tokens=8192"]
    arguments = [word for load in options.workload or loads for word in ("--workload", load)]
    serve = f"treadle serve {folder} --max-running {options.max_running} --memory {options.memory} --kernels require"
    arguments += ["--start", f"{sys.executable} -m {serve}"]
    arguments += ["--name", "treadle"]
    arguments += ["--model", folder.name, "--rounds", rounds, "--max-lag", "1"]
    if not options.alone:
        arguments += ["--start", f"{sys.executable} -m mlx_lm server --model {folder}", "--name", "mlx-lm"]
        arguments += ["--model", str(folder)]
    base = options.out / options.name
    treadle("bench", "run", *arguments, "--json", f"{base}.json", "--html", f"{base}.html")


if __name__ == "__main__":
    main()

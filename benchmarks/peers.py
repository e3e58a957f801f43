"""Install the servers that Treadle is measured beside, and print the commands that serve a model with them.

    python benchmarks/peers.py install [NAME...]
    python benchmarks/peers.py command NAME --model FOLDER [--openblas [--threads N]]

NAME is mlx-lm (mlx_lm.server 0.32.2), vllm-mlx (0.6.0, its default mode, one request at a time), vllm-mlx-batched (the
same with continuous batching) or smg-servicer (SMG's own MLX worker 0.14.1, behind the SMG gateway). Each package gets
a virtual environment of its own in `.peers/`; vllm-mlx brings torch and takes some GB. `command` prints one line for
`treadle bench run --start "..."`, in which {port} stands for the port:

    treadle bench run -w burst --start "treadle serve FOLDER" \\
        --start "$(python benchmarks/peers.py command mlx-lm --model FOLDER)"

`--openblas` (Linux on CPU) preloads the OpenBLAS that Treadle uses; without it the peers compute with what they
install, MLX's reference BLAS. It gets as many threads as Treadle would use at most. Treadle uses fewer while other
processes are busy, and the peers can't: `--threads` gives them another number. OpenBLAS helps float32 weights only: MLX
computes bfloat16, float16 and quantized layers on the CPU without any BLAS, and the peers keep the dtype of the weights
where Treadle turns them to float32. `benchmarks/comparable.py` makes a float32 copy, which leaves that difference out.

The peers do not know `ignore_eos`, so their answers may be shorter than Treadle's: `comparable.py --endless` makes a
copy whose answers end at their limit alone. mlx_lm.server caches the last ten prompts: a repeated prompt is not read
again, so each round needs new ones.

Needs nothing but Python 3.11 or newer; `--openblas` asks the Python that Treadle is installed in (.venv, else the one
that runs this).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"

FIND_OPENBLAS = """
import os
from pathlib import Path
from treadle.runner.device import blas
report = blas.prepare()
if report.warning:
    raise SystemExit(report.warning)
cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treadle"
print(cache / blas.which_blas())
print(blas.default_threads())
"""


@dataclass(frozen=True)
class Peer:
    """A server to install. `folder` is the environment's in `.peers/`, `requirement` its packages, `program` the one in
    it, or a script in this folder; `arguments` come before the model's folder and `options` behind it."""

    folder: str
    requirement: str
    program: str
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


# Batch sizes, prefill steps and caches stay as each server has them by default.
# vllm-mlx's default mode also keeps its `fail_fast`: a request that comes while another runs is refused. That is its
# default, and its refusals are counted; `VLLM_MLX_SIMPLE_ENGINE_LOCK_ADMISSION=wait` before the command queues them.
# With continuous batching it writes its prefix cache below HOME as it ends and reads it at the next start, where the
# prompts of the last benchmark would be found: it gets a HOME that nothing can be written to.
_HOME = ("HOME=/dev/null",)
_VLLM_MLX = ("vllm-mlx", "vllm-mlx==0.6.0", "vllm-mlx", ("serve",))
PEERS_BY_NAME = {
    "mlx-lm": Peer("mlx-lm", "mlx-lm==0.32.2", "mlx_lm.server", ("--model",)),
    "vllm-mlx": Peer(*_VLLM_MLX, variables=_HOME),
    "vllm-mlx-batched": Peer(*_VLLM_MLX, options=("--continuous-batching",), variables=_HOME),
    "smg-servicer": Peer(
        "smg-servicer", "smg-grpc-servicer[mlx]==0.14.1 smg-grpc-proto==0.4.28 smg==1.13.0", "servicer.py", ()
    ),
}


def backend() -> tuple[str, ...]:
    """Return MLX's additional requirement: on Linux its wheel has no backend."""
    if sys.platform != "linux":
        return ()
    return ("mlx[cuda13]",) if shutil.which("nvidia-smi") else ("mlx[cpu]",)


def install(peer: Peer) -> None:
    """Make the peer's environment, unless it is complete."""
    folder = PEERS / peer.folder
    requirements = "\n".join((*peer.requirement.split(), *backend()))
    stamp = folder / "installed.txt"
    if stamp.is_file() and stamp.read_text() == requirements:
        print(f"{peer.folder}: is there")
        return
    print(f"{peer.folder}: installing {requirements.replace(chr(10), ' ')} into {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements.split("\n")]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"{peer.requirement} could not be installed: see above")
    stamp.write_text(requirements)


def command(peer: Peer, model: Path, preload: Sequence[str]) -> str:
    """Return the line that serves `model`, with the variables `preload` first."""
    program = PEERS / peer.folder / "bin" / ("python" if peer.program.endswith(".py") else peer.program)
    if not program.is_file():
        sys.exit(f"{peer.folder} is not installed: python benchmarks/peers.py install {peer.folder}")
    if not (model / "config.json").is_file():
        sys.exit(f"{model} is not a model folder: name one that holds config.json, weights and a tokenizer")
    if peer.program.endswith(".py"):
        arguments = [sys.executable, str(Path(__file__).with_name(peer.program)), str(model.resolve()), "--port"]
    else:
        arguments = [
            str(program),
            *peer.arguments,
            str(model.resolve()),
            *peer.options,
            "--host",
            "127.0.0.1",
            "--port",
        ]
    # mlx_lm.server lists what is in the hub's cache before its own model, and nothing at all where there is no cache.
    hub = PEERS / "hub"
    hub.mkdir(parents=True, exist_ok=True)
    variables = [*peer.variables, f"HF_HUB_CACHE={shlex.quote(str(hub))}", "HF_HUB_OFFLINE=1"]
    return " ".join([*preload, *variables, shlex.join(arguments), "{port}"])


def preloaded(threads: int | None) -> list[str]:
    """Return the variables that put Treadle's OpenBLAS before MLX's own BLAS (None: with Treadle's number of
    threads)."""
    if sys.platform != "linux" or backend() != ("mlx[cpu]",):
        sys.exit("--openblas is for Linux without a GPU: elsewhere MLX has its own")
    python = ROOT / ".venv" / "bin" / "python"
    done = subprocess.run(
        [str(python) if python.is_file() else sys.executable, "-c", FIND_OPENBLAS],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        sys.exit(f"Treadle's OpenBLAS was not found ({last}): install Treadle with its cpu extra (make install)")
    library, default_threads = done.stdout.splitlines()
    if not Path(library).is_file():
        sys.exit(f"there is no {library}: Treadle could not keep its copy of OpenBLAS in that folder; make it writable")
    return [f"LD_PRELOAD={shlex.quote(library)}", f"OPENBLAS_NUM_THREADS={threads or default_threads}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    installing = actions.add_parser("install", help="make the peers' environments")
    installing.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS_BY_NAME))
    serving = actions.add_parser("command", help="print the line that serves a model")
    serving.add_argument("name", choices=PEERS_BY_NAME)
    serving.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    serving.add_argument("--openblas", action="store_true", help="preload the OpenBLAS that Treadle uses")
    serving.add_argument("--threads", type=int, metavar="N", help="of that OpenBLAS; Treadle's number by default")
    options = parser.parse_args()
    if options.action == "command":
        preload = preloaded(options.threads) if options.openblas else ()
        print(command(PEERS_BY_NAME[options.name], options.model, preload))
        return
    if unknown := [name for name in options.names if name not in PEERS_BY_NAME]:
        parser.error(f"no peer is called {unknown[0]}: choose from {', '.join(PEERS_BY_NAME)}")
    peers = {peer.folder: peer for peer in (PEERS_BY_NAME[name] for name in options.names or PEERS_BY_NAME)}
    for peer in peers.values():
        install(peer)


if __name__ == "__main__":
    main()

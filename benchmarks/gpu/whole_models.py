"""Whole models of 20 to 30 billion parameters, served on a GPU: throughput, long prompts beside decoding, and prefixes.

    python benchmarks/gpu/whole_models.py OUT [--case qwen3_moe:4 gpt_oss:mxfp4 granitemoehybrid:4] [--folder FOLDER]
        [--memory 24GiB] [--speculate auto] [--peer | --only-peer] [--trace] [--prepare] [--seconds 480] [--small]

Each case is a family of `family_shapes.WHOLE` and the bits of its weights, random and made on the device. The models
are made in FOLDER at the same time, and their servers started at the same time, as both mostly wait for the host. Then
`treadle bench run` measures one server after the other: 1, 8 and 32 clients, a long prompt beside decoders (P3), short
requests beside it (P4), and agents with a common system prompt (P9). With `--peer` mlx_lm.server follows, with 1, 8
and 32 clients. With `--trace` our servers' steps are traced and summed up. JSON files are left in OUT. Nothing new is
begun after `--seconds`. `--prepare` measures nothing: it makes the models and starts each server until it is ready,
so that a run afterwards on the machine finds its kernels compiled. `--small` shows that it works on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.gpu.family_shapes import WHOLE, config_of  # noqa: E402

CONTEXT = 40_960
BEGAN = time.monotonic()
CLIENTS = tuple(f"chat:c={c},each=2,prompt=82,tokens=128" for c in (1, 8, 32))
LONG = ("stall:prompt={words},tokens=8192", "interactive:prompt={words},tokens=8192")
MEMORY = {"granitemoehybrid": "24GiB"}
"""Of caches: the states of 64 sequences take 18 GiB."""
AGENTS = "agents:agents=20,turns=8,system=300,turn=20,tokens=32,every_s=0.1"


@dataclass
class Case:
    """One whole model, and its server while one runs."""

    family: str
    bits: str
    folder: Path
    port: int
    server: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.bits}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def make_folder(folder: Path, family: str, bits: str, *, small: bool) -> None:
    """Make the model's folder: the tests' tokenizer, random weights, and answers of printable ASCII."""
    import mlx.core as mx
    from benchmarks.gpu.families_steps import make
    from benchmarks.gpu.served import PRINTABLE
    from mlx.utils import tree_flatten
    from tests.support.tiny import make_tiny

    made_at = time.monotonic()
    make_tiny(folder, architecture="qwen3", context=CONTEXT, eos=False)
    config = json.loads((folder / "config.json").read_text())
    tokens = {name: value for name, value in config.items() if name.endswith("_token_id")}
    shape = {**config_of(family, small=True), "tie_word_embeddings": False} if small else config_of(family, whole=True)
    module, made = make({**shape, **tokens}, bits, heard=PRINTABLE)
    (folder / "config.json").write_text(json.dumps({**made, "torch_dtype": "bfloat16"}, default=str))
    weights = dict(tree_flatten(module.parameters()))
    size = sum(array.nbytes for array in weights.values()) / 1e9
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    say(f"{family} in {bits} bits: {size:.1f} GB made in {time.monotonic() - made_at:.0f} s")


def say(line: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {line}", flush=True)


def make_all(cases: list[Case], small: bool) -> None:
    command = [sys.executable, __file__, "-", *["--small"] * small, "--make"]
    missing = [case for case in cases if not (case.folder / "model.safetensors").exists()]
    for child in [
        subprocess.Popen([*command, str(case.folder), "--case", f"{case.family}:{case.bits}"]) for case in missing
    ]:
        if child.wait():
            sys.exit("a model could not be made: see above")


def start(case: Case, command: list[str], out: Path) -> None:
    """Start the case's server on its port, with its output in OUT."""
    with (out / f"{case.name}.{Path(command[0]).stem}.log").open("wb") as log:
        module = [] if command[0].endswith(".py") else ["-m"]
        words = [sys.executable, *module, *command, "--port", str(case.port)]
        case.server = subprocess.Popen(words, env=environment(), stdout=log, stderr=subprocess.STDOUT)


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    hub = Path(tempfile.gettempdir(), "treadle-empty-hub")  # mlx_lm.server's list of models fails without one
    hub.mkdir(exist_ok=True)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_CACHE": str(hub)}


def await_ready(case: Case, path: str, limit_s: float) -> bool:
    """Wait until the server answers 200 at `path` (`limit_s` from the start at most). Returns whether it did."""
    while time.monotonic() - BEGAN < limit_s:
        if case.server is None or case.server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(case.url + path, timeout=5) as answer:
                if answer.status == 200:
                    return True
        except OSError:
            pass
        time.sleep(0.5)
    say(f"{case.name}: no server is ready, see its log")
    return False


def status(case: Case) -> dict[str, Any]:
    with urllib.request.urlopen(f"{case.url}/v1/status", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def stop(case: Case) -> None:
    if case.server is not None:
        case.server.terminate()
        case.server.wait()
        case.server = None


def bench(case: Case, target: str, model: str, loads: list[str], out: Path) -> None:
    """Run workloads against the case's server and print their tables."""
    words = [word for load in loads for word in ("--workload", load)]
    words += ["--url", case.url, "--name", f"{case.name} {target}", "--model", model, "--rounds", "1", "--max-lag", "1"]
    words += ["--json", str(out / f"{case.name}.{target}.json")]
    subprocess.run([sys.executable, "-m", "treadle", "bench", "run", *words], env=environment(), check=False)


def serve_ours(cases: list[Case], options: argparse.Namespace) -> None:
    kernels = [] if options.small else ["--kernels", "require"]
    for case in cases:
        program = ["treadle", "serve"]
        if options.trace:
            program = [str(ROOT / "benchmarks" / "traced_serve.py"), str(trace_of(case, options.out))]
        memory = options.memory or MEMORY.get(case.family, "12GiB")
        limits = ["--memory", memory, "--max-running", "64", "--speculate", options.speculate]
        serve = [*program, str(case.folder), *limits, *kernels]
        start(case, serve, options.out)
    words = "20" if options.small else "5000"
    loads = [*CLIENTS, *(load.format(words=words) for load in LONG), AGENTS]
    for case in [case for case in cases if await_ready(case, "/health/ready", options.seconds)]:
        say(f"{case.name} is ready: {status(case)['compute']['summary']}")
        if options.prepare:
            stop(case)
            continue
        if time.monotonic() - BEGAN > options.seconds:
            say(f"{case.name}: no time is left")
            continue
        bench(case, "treadle", case.folder.name, loads[:1] if options.small else loads, options.out)
        (options.out / f"{case.name}.status.json").write_text(json.dumps(status(case)))
    for case in cases:
        stop(case)
        if options.trace and (trace := trace_of(case, options.out)).exists():
            say(f"{case.name}: steps")
            subprocess.run([sys.executable, str(ROOT / "benchmarks" / "step_trace.py"), str(trace)], check=False)


def trace_of(case: Case, out: Path) -> Path:
    return out / f"{case.name}.steps.jsonl"


def serve_theirs(cases: list[Case], options: argparse.Namespace) -> None:
    for case in cases:
        if time.monotonic() - BEGAN > options.seconds:
            return
        start(case, ["mlx_lm", "server", "--model", str(case.folder)], options.out)
        if await_ready(case, "/v1/models", options.seconds + 60) and load_theirs(case):
            bench(case, "mlx-lm", str(case.folder), list(CLIENTS[: 1 if options.small else 3]), options.out)
        stop(case)


def load_theirs(case: Case) -> bool:
    """Ask for two tokens, as mlx_lm.server loads its model with the first request. Returns whether it answered."""
    body = {"model": str(case.folder), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{case.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return bool(answer.status == 200)
    except OSError as error:
        say(f"{case.name}: mlx_lm.server does not answer: {error}")
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--case", nargs="*", default=["qwen3_moe:4", "gpt_oss:mxfp4", "granitemoehybrid:4"])
    parser.add_argument("--folder", type=Path, help="where the models are, or are to be made")
    parser.add_argument("--memory", help="each server's, for keys, values and states (12GiB; Granite 24GiB)")
    parser.add_argument("--speculate", choices=["auto", "off"], default="auto", help="of our servers")
    parser.add_argument("--peer", action="store_true", help="mlx_lm.server afterwards")
    parser.add_argument("--only-peer", action="store_true", help="mlx_lm.server alone")
    parser.add_argument("--trace", action="store_true", help="trace our servers' steps")
    parser.add_argument("--prepare", action="store_true", help="start the servers alone, so that kernels are compiled")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--small", action="store_true", help="see that it works, on a CPU")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    pairs = [(family, bits) for family, _, bits in (case.partition(":") for case in options.case)]
    if unknown := [family for family, _ in pairs if family not in WHOLE]:
        parser.error(f"no whole model of {', '.join(unknown)}: there are {', '.join(WHOLE)}")
    if options.make:
        make_folder(options.make, *pairs[0], small=options.small)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.folder or Path(tempfile.mkdtemp())
    cases = [Case(family, bits, folder / f"{family}-{bits}", 8101 + i) for i, (family, bits) in enumerate(pairs)]
    make_all(cases, options.small)
    if not options.only_peer:
        serve_ours(cases, options)
    if options.peer or options.only_peer:
        serve_theirs(cases, options)


if __name__ == "__main__":
    main()

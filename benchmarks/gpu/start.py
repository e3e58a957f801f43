"""Starts of models on a GPU: seconds of loads with and without compiled kernels on disk, and with MLX's compilation.

    python benchmarks/gpu/start.py [--family llama ...] [--bits 16 4] [--warm-up] [--json OUT] [--small]

Each family has few layers of its real sizes (`family_shapes`), with random weights made in memory, and is loaded as
`treadle serve` does, self-tests included, three times in fresh processes: with nothing on disk, again with what the
first load left there, and with all custom kernels compiled by MLX, whose own kernels are on disk by then. Printed are
the seconds of the load (making the weights does not count), the programs by their origin, and the host's time for a
launch of a matrix product, before it is evaluated. The logits of prompts and decode steps must be those of the first
load. With `--warm-up` the passes of the warm-up run, too, after the load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.gpu.families_steps import MODES, load_made, make  # noqa: E402
from benchmarks.gpu.family_shapes import SHAPES, config_of  # noqa: E402

WAYS = {"empty": "first start", "filled": "restart", "mlx": "restart, by MLX"}
LENGTHS = (5, 40, 333)
LAUNCHES = 2000


def load_once(options: argparse.Namespace, way: str, family: str, bits: str) -> dict[str, Any]:
    """Load one model in this process. Returns the figures; the logits go to a file."""
    import mlx.core as mx
    import numpy as np

    from treadle.runner.device.nvrtc import NvrtcMissing
    from treadle.runner.device.programs import programs_so_far

    if way == "mlx":
        mock.patch("treadle.runner.device.programs.find_nvrtc", side_effect=NvrtcMissing("asked for")).start()
    module, config = make(config_of(family, small=options.small), bits)
    began = time.perf_counter()
    model = load_made(module, config, int(options.memory * 2**30), options.rows)
    found: dict[str, Any] = {"family": family, "bits": bits, "way": way, "load_s": time.perf_counter() - began}
    found["path"] = model.compute.summary()
    found["failed"] = [f"{one.name}: {one.reason}" for one in model.compute.kernels if one.state == "failed"]
    if options.warm_up:
        found["warm_s"] = warm_up_s(model)
    found["programs"] = programs_so_far().summary()
    np.savez(options.json.with_suffix(".npz"), *logits_of(model))
    found["launch_us"] = launch_us() if mx.default_device() != mx.cpu else 0.0
    return found


def warm_up_s(model: Any) -> float:
    """Seconds of the warm-up, which runs passes of all sizes."""
    from treadle.runner.model_runner import ModelRunner

    began = time.perf_counter()
    runner = ModelRunner(model)
    runner.warm_up()
    runner._backend.close()
    return time.perf_counter() - began


def logits_of(model: Any) -> list[Any]:
    """Logits behind prompts of some lengths, and behind a token more of each, in float32."""
    import mlx.core as mx
    import numpy as np
    from benchmarks.gpu.steps import prompt

    from treadle.runner.forward.segments import KvSequence, RowSegment

    live: dict[str, Any] = {}
    backend, found = model.choice.config.build(model.module, live, time.monotonic), []
    for length in LENGTHS:
        tokens = prompt(length, length + 1, model.vocabulary)
        live["row"] = row = KvSequence("row", "", tokens)
        backend.admit(row)
        for start, end in ((0, length), (length, length + 1)):
            done = backend.compute([RowSegment(row, tokens[start:end], start, wants=1)], None)
            mx.eval(done.logits, done.arrays)
            found.append(np.array(done.logits.astype(mx.float32)))
        backend.release(row)
        live.clear()
    backend.close()
    return found


def launch_us() -> float:
    """The host's microseconds to put a launch of a matrix product into a graph, the best of five rounds."""
    import mlx.core as mx

    from treadle.runner.fused.skinny_gemm import SkinnyGemm

    x, product = mx.zeros((8, 2048), mx.bfloat16), SkinnyGemm(mx.zeros((2048, 2048), mx.bfloat16))
    mx.eval(x, product(x))
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            product(x)
        rounds.append((time.perf_counter() - began) / LAUNCHES * 1e6)
    return min(rounds)


def run(options: argparse.Namespace, way: str, family: str, bits: str, folder: Path) -> dict[str, Any]:
    """Run one load in a process of its own, whose caches are in `folder`. Returns its figures, or what went wrong."""
    file = folder / f"{way}.json"
    words = ["--child", way, "--family", family, "--bits", bits, "--json", str(file)]
    words += ["--rows", str(options.rows), "--memory", str(options.memory)]
    words += [flag for flag, on in (("--small", options.small), ("--warm-up", options.warm_up)) if on]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "MLX_PTX_CACHE_DIR": str(folder / "mlx")}
    try:
        done = subprocess.run([sys.executable, __file__, *words], env=environment, timeout=options.limit, check=False)
        wrong = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        wrong = f"stopped after {options.limit} s"
    if not file.exists():
        return {"family": family, "bits": bits, "way": way, "wrong": wrong}
    return json.loads(file.read_text()) | {"difference": difference(folder, way)}


def difference(folder: Path, way: str) -> float:
    """The largest difference of a load's logits from those of the first one, over their largest; NaN where one of the
    two has none."""
    import numpy as np

    try:
        first, own = (np.load(folder / f"{name}.npz") for name in ("empty", way))
    except OSError:
        return float("nan")
    return max(float(np.abs(first[name] - own[name]).max() / np.abs(first[name]).max()) for name in first.files)


def shown(line: dict[str, Any]) -> str:
    """One row of the table."""
    cells = [line["family"], line["bits"], WAYS[line["way"]]]
    if "wrong" in line:
        return f"| {' | '.join([*cells, line['wrong']])} |"
    cells += [f"{line['load_s']:.1f}", f"{line['warm_s']:.1f}" if "warm_s" in line else "", line["programs"]]
    cells += [f"{line['launch_us']:.1f}", "equal" if line["difference"] == 0 else f"{line['difference']:.1e} apart"]
    return f"| {' | '.join([*cells, line['path'], '; '.join(line['failed'])])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=SHAPES, nargs="*", default=["llama", "qwen3_moe", "qwen3_next"])
    parser.add_argument("--bits", nargs="*", choices=["16", "4", "8", *MODES], default=["4"])
    parser.add_argument("--rows", type=int, default=32, help="sequences at once")
    parser.add_argument("--memory", type=float, default=2.0, help="GiB for caches")
    parser.add_argument("--limit", type=int, default=240, help="seconds for a load")
    parser.add_argument("--warm-up", action="store_true", help="run the passes of the warm-up, too")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--small", action="store_true", help="see that it works, on a CPU")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        found = load_once(options, options.child, options.family[0], options.bits[0])
        options.json.write_text(json.dumps(found))
        return
    print("| family | bits | kernels | load, s | warm-up, s | programs | launch, us | logits | path | failed |")
    print(f"|{'---|' * 10}", flush=True)
    lines: list[dict[str, Any]] = []
    for family, bits in itertools.product(options.family, options.bits):
        with tempfile.TemporaryDirectory() as folder:
            for way in WAYS:
                lines.append(run(options, way, family, bits, Path(folder)))
                print(shown(lines[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(lines, indent=1))
    sys.exit(1 if any("wrong" in line or line["difference"] != 0 for line in lines) else 0)


if __name__ == "__main__":
    main()

"""Images beside running sequences, in the engine alone: gaps between tokens, first tokens, and second questions.

    python benchmarks/gpu/images.py OUT.json [--case gemma3 qwen3_vl] [--limit SECONDS] [--small]

Models have the shapes of Gemma-3-4B and Qwen3-VL-8B, towers included, and random bf16 weights, made on the device when
the loader reads them: nothing is written. Each image is 1024 x 1024 pixels, or what the family makes of it.

In turn: the start; eight rows decode alone; the first image of all comes in beside them, then more, and then text; a
question about an image at an idle engine, a second one, and the same for a text as long; 32 image requests at once;
requests of text alone beside images. Rows take a token a step: nothing is drafted for them. Beside gaps stand the
longest turns of the engine's loop: their milliseconds, those of its thread's processor, and the two plans under way.
Each figure is printed, and written to OUT.json, as soon as there is one. The program ends at the first figure or step
behind `--limit` seconds. `--small` shows that it works on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import mlx.core as mx  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from tests.support.shared_pixels import SharedPixels, shared_pixels  # noqa: E402
from tests.support.tiny_vision import config_of, pixels_of  # noqa: E402

from treadle.core.image import Image  # noqa: E402
from treadle.core.messages import Cancel, FromOwner, StepReport, Submit  # noqa: E402
from treadle.core.plan import StepPlan  # noqa: E402
from treadle.engine.loop import EngineLoop  # noqa: E402
from treadle.engine.mailbox import Mailbox  # noqa: E402
from treadle.engine.owner import OwnerLimits, scheduler_of  # noqa: E402
from treadle.runner.build import build  # noqa: E402
from treadle.runner.mlxvlm import connect, family_of  # noqa: E402

TOWER = {"hidden_size": 1152, "intermediate_size": 4304}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_scaling": {"type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
        "vision_config": {
            **TOWER,
            "depth": 27,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "gemma3": {
        "hidden_size": 2560,
        "vocab_size": 262208,
        "text_config": {
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 40960,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "mm_tokens_per_image": 256,
            "query_pre_attn_scalar": 256,
        },
        "vision_config": {
            **TOWER,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 896,
        },
    },
}
PIXELS: dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...], int]] = {
    "qwen3_vl": ((4096, 3 * 16 * 16), ((1, 64, 64),), 1024),
    "gemma3": ((1, 3, 896, 896), (), 256),
}
"""Shape of the pixels of an image, its grid, and its tokens."""
ROWS = 8
MAX_RUNNING = 32
WEIGHTS = "model.safetensors"


class OutOfTime(Exception):
    """The program has taken as long as it may."""


class Progress:
    """Figures of all cases, each printed as it comes and written to `out`, until `limit` seconds have passed. `family`
    is the case."""

    def __init__(self, out: Path, limit: float) -> None:
        self._out, self._limit, self._began = out, limit, time.monotonic()
        self._results: dict[str, dict[str, Any]] = {}
        self.family = ""

    def __call__(self, name: str, value: Any) -> None:
        self._results.setdefault(self.family, {})[name] = value
        seconds = time.monotonic() - self._began
        print(f"[{seconds:5.1f} s] {self.family}: {name}: {json.dumps(value)}", flush=True)
        self._out.write_text(json.dumps(self._results, indent=1))
        self.check()

    def check(self) -> None:
        if time.monotonic() - self._began > self._limit:
            raise OutOfTime


def config_for(family: str, *, small: bool) -> dict[str, Any]:
    """The configuration of a family's model."""
    config = config_of(family)
    if not small:
        for name, value in SHAPES[family].items():
            config[name] = {**config[name], **value} if isinstance(value, dict) else value
    return config


@contextmanager
def made_folder(config: dict[str, Any]) -> Iterator[Path]:
    """A folder with a configuration, whose weights are random arrays that are made when they are computed: 17 GB would
    take a minute to be written and read."""
    found = family_of(config)
    assert found is not None
    shapes = {name: array.shape for name, array in tree_flatten(connect(found).new_model(config).parameters())}
    own = mx.load

    def load(path: Any, *args: Any, **named: Any) -> Any:
        if Path(str(path)).name != WEIGHTS:
            return own(path, *args, **named)
        return {name: made_weights(name, shape) for name, shape in shapes.items()}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / WEIGHTS).touch()
        mx.load = load
        try:
            yield folder
        finally:
            mx.load = own


def made_weights(name: str, shape: tuple[int, ...]) -> mx.array:
    """Random weights of a layer; ones and zeros where it has one for each of its outputs."""
    if len(shape) < 2:
        return mx.full(shape, float(name.endswith("weight")), mx.bfloat16)
    bound = shape[-1] ** -0.5
    return mx.random.uniform(-bound, bound, shape, mx.bfloat16)


class Engine:
    """The engine's loop over a runner, stepped by this script; times are when tokens were heard."""

    def __init__(self, family: str, shared: SharedPixels, progress: Progress, *, small: bool) -> None:
        config = config_for(family, small=small)
        began = time.monotonic()
        with made_folder(config) as folder:
            self.runner = build(folder, max_running=MAX_RUNNING)
            can = self.runner.capabilities()
        assert "image" in can.modalities, can.no_images
        progress("device", can.details.get("device"))
        progress("load_s", round(time.monotonic() - began, 1))
        began = time.monotonic()
        self.runner.warm_up()
        progress("warm_up_s", round(time.monotonic() - began, 1))
        gc.collect()
        gc.freeze()  # as the server's engine does
        self.heard: dict[str, list[float]] = {}
        self.ended: set[str] = set()
        self.cached: dict[str, int] = {}
        self._drawn: dict[int, Image] = {}
        self._progress = progress
        self._family, self._shared, self._small = family, shared, small
        self._token = config.get("image_token_id", config.get("image_token_index"))
        self._mailbox = Mailbox()
        limits = OwnerLimits(max_running=MAX_RUNNING, prefill_tokens=2048)
        self._loop = EngineLoop(self.runner, scheduler_of(self.runner, limits), self._mailbox, self._hear)
        self._plans: deque[StepPlan] = deque(maxlen=2)
        self._turns: list[tuple[float, float, list[str]]] = []
        self._start = self.runner.start
        self.runner.start = self._noted  # type: ignore[method-assign]

    def _noted(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._start(plan)

    def _hear(self, message: FromOwner) -> None:
        assert isinstance(message, StepReport), message
        now = time.monotonic()
        for output in message.outputs:
            self.heard[output.id] += [now] * len(output.tokens)
            if output.cached_tokens is not None:
                self.cached[output.id] = output.cached_tokens
            if output.finish is not None:
                assert not output.finish.message, output.finish
                self.ended.add(output.id)

    def ask(
        self,
        id_: str,
        *seeds: int,
        text: int = 64,
        tail: int = 32,
        tokens: int = 16,
        salt: int = 0,
        speculate: bool = True,
    ) -> float:
        """Send a request with an image for each of `seeds`; the time."""
        chance = np.random.default_rng(salt)
        prompt, images = chance.integers(1, 200, text).tolist(), []
        for seed in seeds:
            image = self.draw(seed)
            images.append(msgspec.structs.replace(image, start=len(prompt)))
            prompt += [self._token] * image.count
            prompt += chance.integers(1, 200, tail).tolist()
        self.heard[id_] = []
        request = Submit(
            id=id_,
            prompt=tuple(prompt),
            max_tokens=tokens,
            images=tuple(images),
            max_wait_s=1e9,
            speculate=speculate,
        )
        self._mailbox.put(request)
        return time.monotonic()

    def draw(self, seed: int) -> Image:
        """The image of `seed`, drawn once: that takes longer than a step, and counts where rows are running."""
        if seed not in self._drawn:
            levels, grid, count = self._pixels(seed)
            memory = self._shared.put(np.concatenate([levels.reshape(-1), TABLE.view(np.uint8)]))
            hash_ = hashlib.sha256(str(seed).encode()).digest()
            self._drawn[seed] = Image(0, count, hash_, memory, levels.shape, "uint8", grid)
        return self._drawn[seed]

    def _pixels(self, seed: int) -> tuple[np.ndarray, tuple[tuple[int, ...], ...], int]:
        shape, grid, count = PIXELS[self._family]
        if self._small:
            pixels, grid, count = pixels_of(self._family, seed)
            shape = pixels.shape
        return np.random.default_rng(seed).integers(0, 256, shape, np.uint8), grid, count

    def until(self, ids: Sequence[str]) -> None:
        while not self.ended.issuperset(ids):
            self.steps(1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            began, busy = time.monotonic(), time.thread_time()
            self._loop.run_once()
            took, busy = (round(1e3 * seconds, 1) for seconds in (time.monotonic() - began, time.thread_time() - busy))
            self._turns.append((took, busy, [summary(plan) for plan in self._plans]))
            self._progress.check()

    def longest(self, most: int = 5) -> list[tuple[float, float, list[str]]]:
        """Milliseconds of the longest turns of the loop since the last call, those in which the thread was running, and
        the plans then under way."""
        found, self._turns = sorted(self._turns, reverse=True)[:most], []
        return found

    def cancel(self, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._mailbox.put(Cancel(id=id_))
        self.steps(3)

    def first_ms(self, id_: str, sent: float) -> float:
        return round(1e3 * (self.heard[id_][0] - sent), 1)

    def firsts(self, sent: dict[str, float]) -> list[float]:
        """Milliseconds to the first tokens of requests that are done then."""
        self.until(list(sent))
        return sorted(self.first_ms(id_, at) for id_, at in sent.items())


TABLE = np.tile((np.arange(256, dtype=np.float32) - 127.5) / 127.5, 3)
"""Values of the levels of each channel."""


def summary(plan: StepPlan) -> str:
    """A plan for people: rows that decode, prompts' tokens in chunks, and images that are encoded."""
    chunks = "+".join(str(chunk.count) for chunk in plan.prefill)
    return f"{len(plan.decode)} rows, chunks {chunks or 0}, {len(plan.admit)} admitted, {len(plan.encode)} encoded"


def gaps(heard: Sequence[float]) -> dict[str, float]:
    """Milliseconds between tokens."""
    found = sorted(1e3 * float(gap) for gap in np.diff(heard))
    return {
        "median": round(statistics.median(found), 2),
        "p99": round(found[int(0.99 * (len(found) - 1))], 2),
        "longest": round(found[-1], 2),
        "tokens_per_s": round(1e3 * len(found) / sum(found), 1),
    }


def measure(engine: Engine, progress: Progress, *, small: bool) -> None:
    beside_rows(engine, progress, small=small)
    second_questions(engine, progress)
    many, few = (4, 2) if small else (32, 16)
    for seed in (*range(100, 100 + many), *range(200, 200 + few)):
        engine.draw(seed)
    sent = {f"many {i}": engine.ask(f"many {i}", 100 + i) for i in range(many)}
    progress("first tokens of many", engine.firsts(sent))
    pictures = [f"picture {i}" for i in range(few)]
    for i, id_ in enumerate(pictures):
        engine.ask(id_, 200 + i)
    sent = {f"text {i}": engine.ask(f"text {i}", text=128, salt=100 + i) for i in range(4 if small else 16)}
    progress("first tokens of text beside", engine.firsts(sent))
    engine.until(pictures)
    now = engine.runner.statistics()
    progress("features", {"held": now.features.held, "bytes": now.features.held_bytes})


def beside_rows(engine: Engine, progress: Progress, *, small: bool) -> None:
    """Gaps of rows that decode alone, beside the first image of all, beside prompts of text, and beside images."""
    tokens, alone, count = (300, 20, 2) if small else (4000, 200, 8)
    for seed in range(10, 11 + count):
        engine.draw(seed)
    rows = [f"row {i}" for i in range(ROWS)]
    for i, id_ in enumerate(rows):
        engine.ask(id_, salt=i, tokens=tokens, speculate=False)
    engine.steps(alone)
    engine.longest()
    heard = engine.heard[rows[0]]
    progress("alone", gaps(heard[-alone // 2 :]))
    others = [f"beside {i}" for i in range(count)]
    for name, seed, ids in (("the first image", 10, ["first"]), ("images", 11, others)):
        before = len(heard) - 1
        found = engine.firsts({id_: engine.ask(id_, seed + i) for i, id_ in enumerate(ids)})
        progress(f"beside {name}", {"gaps": gaps(heard[before:]), "turns": engine.longest(), "first tokens": found})
    before = len(heard) - 1
    length = 96 + engine.draw(10).count
    sent = {f"plain {i}": engine.ask(f"plain {i}", text=length, salt=500 + i) for i in range(count)}
    found = engine.firsts(sent)
    progress(
        "beside as long prompts of text",
        {"gaps": gaps(heard[before:]), "turns": engine.longest(), "first tokens": found},
    )
    engine.cancel(rows)


def second_questions(engine: Engine, progress: Progress) -> None:
    """First tokens of two questions about an image, and about a text as long."""
    length, parts = 544 + engine.draw(10).count, list[float]()
    for turn in range(3):
        ids = [f"{name} {turn}" for name in ("one", "second", "long", "again")]
        salt, seed = 1000 + turn, 50 + turn
        first = engine.firsts({ids[0]: engine.ask(ids[0], seed, text=512, salt=salt)})
        second = engine.firsts({ids[1]: engine.ask(ids[1], seed, text=512, tail=40, salt=salt)})
        plain = engine.firsts({ids[2]: engine.ask(ids[2], text=length, salt=salt + 50)})
        again = engine.firsts({ids[3]: engine.ask(ids[3], text=length + 8, salt=salt + 50)})
        found = {"image": [*first, *second, engine.cached[ids[1]]], "text": [*plain, *again, engine.cached[ids[3]]]}
        progress(f"first, second, and tokens cached ({turn})", found)
        parts.append(second[0] / first[0])
    progress("second of first", round(statistics.median(parts), 3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", nargs="*", default=["gemma3", "qwen3_vl"], choices=list(SHAPES))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for all")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    progress = Progress(options.out, options.limit)
    try:
        for progress.family in options.case:
            with shared_pixels() as shared:
                engine = Engine(progress.family, shared, progress, small=options.small)
                measure(engine, progress, small=options.small)
                engine.runner.close()
                del engine
    except OutOfTime:
        print(f"stopped after {options.limit:.0f} s", flush=True)


if __name__ == "__main__":
    main()

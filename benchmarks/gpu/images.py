"""Images beside running sequences, in the engine alone: gaps between tokens, first tokens, and second questions.

    python benchmarks/gpu/images.py OUT.json [--case qwen3_vl gemma3] [--folder FOLDER] [--small]

Models have the shapes of Qwen3-VL-8B and Gemma-3-4B, towers included, and random bf16 weights, made on the device. Each
image is 1024 x 1024 pixels, or what the family makes of it. In turn: eight rows decode alone; images come in beside
them; one image request at an idle engine, and a second question about the image; 32 image requests at once; requests
of text alone beside images. `--small` shows that it works on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from tests.support.shared_pixels import SharedPixels, shared_pixels  # noqa: E402
from tests.support.tiny_vision import config_of, pixels_of  # noqa: E402

from treadle.core.image import Image  # noqa: E402
from treadle.core.messages import Cancel, FromOwner, StepReport, Submit  # noqa: E402
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
    "qwen3_vl": ((4096, 3 * 2 * 16 * 16), ((1, 64, 64),), 1024),
    "gemma3": ((1, 3, 896, 896), (), 256),
}
"""Shape of the pixels of an image, its grid, and its tokens."""


def make_folder(folder: Path, family: str, *, small: bool) -> dict[str, Any]:
    """Make the model's folder, unless it is there. Return its configuration."""
    config = config_of(family)
    if not small:
        for name, value in SHAPES[family].items():
            config[name] = {**config[name], **value} if isinstance(value, dict) else value
    if (folder / "config.json").exists():
        return config
    found = family_of(config)
    assert found is not None
    model = connect(found).new_model(config)
    model.set_dtype(mx.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return config


class Engine:
    """The engine's loop over a runner, stepped by this script; times are when tokens were heard."""

    def __init__(self, folder: Path, family: str, config: dict[str, Any], shared: SharedPixels, *, small: bool) -> None:
        self.runner = build(folder, max_running=64)
        self.runner.warm_up()
        self.heard: dict[str, list[float]] = {}
        self.ended: set[str] = set()
        self.cached: dict[str, int] = {}
        self._family, self._shared, self._small = family, shared, small
        self._token = config.get("image_token_id", config.get("image_token_index"))
        self._mailbox = Mailbox()
        limits = OwnerLimits(max_running=64, prefill_tokens=2048)
        self._loop = EngineLoop(self.runner, scheduler_of(self.runner, limits), self._mailbox, self._hear)

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

    def ask(self, id_: str, *seeds: int, text: int = 64, tail: int = 32, tokens: int = 16, salt: int = 0) -> float:
        """Send a request with an image for each of `seeds`; the time."""
        chance = np.random.default_rng(salt)
        prompt, images = chance.integers(1, 200, text).tolist(), []
        for seed in seeds:
            pixels, grid, count = self._pixels(seed)
            start = len(prompt)
            prompt += [self._token] * count
            hash_ = hashlib.sha256(str(seed).encode()).digest()
            images.append(Image(start, count, hash_, self._shared.put(pixels), pixels.shape, grid=grid))
            prompt += chance.integers(1, 200, tail).tolist()
        self.heard[id_] = []
        request = Submit(id=id_, prompt=tuple(prompt), max_tokens=tokens, images=tuple(images), max_wait_s=1e9)
        self._mailbox.put(request)
        return time.monotonic()

    def _pixels(self, seed: int) -> tuple[np.ndarray, tuple[tuple[int, ...], ...], int]:
        if self._small:
            return pixels_of(self._family, seed)
        shape, grid, count = PIXELS[self._family]
        return np.random.default_rng(seed).standard_normal(shape, np.float32), grid, count

    def until(self, ids: Sequence[str]) -> None:
        while not self.ended.issuperset(ids):
            self._loop.run_once()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._loop.run_once()

    def cancel(self, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._mailbox.put(Cancel(id=id_))
        self.steps(3)


def gaps(heard: Sequence[float]) -> dict[str, float]:
    """Milliseconds between tokens."""
    found = sorted(1e3 * float(gap) for gap in np.diff(heard))
    return {
        "median": round(statistics.median(found), 2),
        "p99": round(found[int(0.99 * (len(found) - 1))], 2),
        "longest": round(found[-1], 2),
        "tokens_per_s": round(1e3 * len(found) / sum(found), 1),
    }


def first_ms(engine: Engine, id_: str, sent: float) -> float:
    return round(1e3 * (engine.heard[id_][0] - sent), 1)


def measure(engine: Engine, *, small: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tokens, alone, images = (60, 20, 2) if small else (4000, 200, 8)
    for seed in (900, 901):  # kernels are compiled with the first images
        engine.ask(f"warm {seed}", seed)
        engine.until([f"warm {seed}"])
    rows = [f"row {i}" for i in range(8)]
    for i, id_ in enumerate(rows):
        engine.ask(id_, salt=i, tokens=tokens)
    engine.steps(alone)
    found["alone"] = gaps(engine.heard[rows[0]][-alone // 2 :])
    before = len(engine.heard[rows[0]])
    sent = {f"beside {i}": engine.ask(f"beside {i}", i) for i in range(images)}
    engine.until(list(sent))
    found["beside images"] = gaps(engine.heard[rows[0]][before:] or engine.heard[rows[0]])
    found["first tokens beside"] = [first_ms(engine, id_, at) for id_, at in sent.items()]
    engine.cancel(rows)
    at = engine.ask("one", 50, text=512, salt=1)
    engine.until(["one"])
    found["first token"] = first_ms(engine, "one", at)
    at = engine.ask("second", 50, text=512, tail=40, salt=1)
    engine.until(["second"])
    found["first token of a second question"] = first_ms(engine, "second", at)
    found["cached tokens of a second question"] = engine.cached["second"]
    sent = {f"many {i}": engine.ask(f"many {i}", 100 + i) for i in range(4 if small else 32)}
    engine.until(list(sent))
    found["first tokens of many"] = sorted(first_ms(engine, id_, at) for id_, at in sent.items())
    pictures = [f"picture {i}" for i in range(2 if small else 16)]
    for i, id_ in enumerate(pictures):
        engine.ask(id_, 200 + i)
    sent = {f"text {i}": engine.ask(f"text {i}", text=128, salt=100 + i) for i in range(4 if small else 16)}
    engine.until([*pictures, *sent])
    found["first tokens of text beside"] = sorted(first_ms(engine, id_, at) for id_, at in sent.items())
    now = engine.runner.statistics()
    found["features"] = {"held": now.features.held, "bytes": now.features.held_bytes}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", nargs="*", default=list(SHAPES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "treadle-images"))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for family in options.case:
        folder = options.folder / f"{family}{'-small' * options.small}"
        config = make_folder(folder, family, small=options.small)
        with shared_pixels() as shared:
            engine = Engine(folder, family, config, shared, small=options.small)
            can = engine.runner.capabilities()
            assert "image" in can.modalities, can.no_images
            results[family] = {"device": can.details.get("device"), **measure(engine, small=options.small)}
            engine.runner.close()
        print(json.dumps({family: results[family]}, indent=1), flush=True)
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""The text runner on a GPU: is it correct there, and how long is its step beside mlx-lm's BatchGenerator?

    python benchmarks/gpu/text_runner.py [--rows 1 8 32] [--layers 28]

Makes a Qwen3 0.6B shape with random bf16 weights, checks greedy tokens of the engine on a thread against mlx-lm's own
generation, and prints step times. Needs MLX with a GPU, mlx-lm and msgspec; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import qwen3
from mlx_lm.utils import save_model

from treadle.core.messages import Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.engine.client import Admission, EngineClient
from treadle.engine.owner import OwnerLimits
from treadle.engine.thread import ThreadOwner
from treadle.runner.build import build

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


def make(folder: Path, layers: int) -> None:
    mx.random.seed(0)
    config = {**SHAPE, "num_hidden_layers": layers}
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    model.update({"lm_head": {"weight": model.lm_head.weight * 20}})
    mx.eval(model.parameters())
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))


def prompts(count: int, length: int) -> list[tuple[int, ...]]:
    return [tuple((7 * i + 13 * j) % 150000 + 5 for j in range(length + 3 * i)) for i in range(count)]


def plain(runner: object, prompt: tuple[int, ...], count: int) -> list[int]:
    module = runner._model.module  # type: ignore[attr-defined]
    steps = generate_step(mx.array(prompt), module, max_tokens=count)
    return [int(token) for token, _ in steps]


async def served(folder: Path, wanted: list[tuple[int, ...]], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts at once, through the engine on a thread of its own."""
    owner = ThreadOwner(lambda progress: build(folder, max_running=16), OwnerLimits(max_running=16, prefill_tokens=512))
    client = EngineClient(lambda: owner, Admission(16, 16, 30.0))
    await client.start()

    async def one(prompt: tuple[int, ...]) -> list[int]:
        with client.reserve(rows=1, prompt_tokens=1, completion_tokens=1, kind="gpu", tag="gpu") as reservation:
            (generation,) = reservation.submit([Submit(id="", prompt=prompt, max_tokens=count)])
            return [token async for delta in generation for token in delta.tokens]

    try:
        return list(await asyncio.gather(*map(one, wanted)))
    finally:
        await client.stop()


def step_ms(runner: object, rows: int, length: int, steps: int) -> float:
    wanted = prompts(rows, length)
    ids = [str(i) for i in range(rows)]
    admits = tuple(Admit(request=Submit(id=i, prompt=p, max_tokens=9999)) for i, p in zip(ids, wanted, strict=True))
    chunks = tuple(PrefillChunk(id=i, start=0, tokens=p[:-1]) for i, p in zip(ids, wanted, strict=True))
    last = {i: p[-1] for i, p in zip(ids, wanted, strict=True)}
    times = []
    for n in range(steps):
        decode = tuple(DecodeRow(id=i, token=last[i], position=n) for i in ids)
        plan = StepPlan(step=n, admit=admits if n == 0 else (), prefill=chunks if n == 0 else (), decode=decode)
        result = runner.execute(plan)  # type: ignore[attr-defined]
        times.append(result.decode_s * 1e3)
        last = {row.id: row.tokens[-1] for row in result.rows}
    for i in ids:
        runner.release(i)  # type: ignore[attr-defined]
    return statistics.median(times[5:])


def generator_ms(runner: object, rows: int, length: int, steps: int) -> float:
    module = runner._model.module  # type: ignore[attr-defined]
    generator = BatchGenerator(module, max_tokens=steps + 50, completion_batch_size=max(rows, 8), prefill_batch_size=8)
    generator.insert([list(p) for p in prompts(rows, length)])
    times, began = [], time.perf_counter()
    while len(times) < steps:
        _, gained = generator.next()
        now = time.perf_counter()
        if len(gained) == rows:
            times.append((now - began) * 1e3)
        began = now
    generator.close()
    return statistics.median(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), options.layers)
        runner = build(folder, max_running=16)
        print(runner.capabilities())
        runner.warm_up()
        wanted, count = prompts(8, 40), 24
        expected = [plain(runner, prompt, count) for prompt in wanted]
        got = asyncio.run(served(Path(folder), wanted, count))
        same = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(expected, got, strict=True)]
        print(f"greedy tokens equal to mlx-lm's, of {count}: {same}")
        for rows in options.rows:
            ours, theirs = step_ms(runner, rows, options.length, 40), generator_ms(runner, rows, options.length, 40)
            print(f"B={rows:<4} step {ours:7.2f} ms, BatchGenerator {theirs:7.2f} ms, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()

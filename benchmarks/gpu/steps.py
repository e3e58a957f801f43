"""Decode steps on a GPU: correctness of the tokens, and times beside mlx-lm's BatchGenerator and the floor.

    python benchmarks/gpu/steps.py [--shape 8B] [--bits 16] [--rows 1 8 32 128] [--length 640] [--long] [--ways ...]
        [--kv-bits 8] [--sampled]

Makes a Qwen3 shape with random weights in memory. First greedy tokens of rows of many lengths at once, prompts beside
decoding, are compared with mlx-lm's own generation of each alone; at the first difference the gap between the two best
logits is printed. Then step times: medians of pipelined steps of both engines, in one run. The floor is
the bytes of weights and of the rows' keys and values at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache, qwen3

from treadle.core.messages import Sampling, Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.runner.device.readback import readback
from treadle.runner.kv.cost import KvCost
from treadle.runner.loading import candidates
from treadle.runner.loading.backend_choice import BackendChoice
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampling.mask_kernel import mask_kernel
from treadle.runner.sampling.sampling_kernel import sampling_kernel

BANDWIDTH = 4.3e12
GREEDY = Sampling()
USUAL = Sampling(temperature=0.6, top_p=0.95, top_k=20, seed=1)
"""Qwen3's own defaults."""
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36},
}


def make(shape: str, bits: int) -> Any:
    """Return the module, random and in memory; with a louder head, so that the best tokens are not nearly equal."""
    mx.random.seed(0)
    config = {
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    module = qwen3.Model(qwen3.ModelArgs.from_dict({**config, **SHAPES[shape]}))
    module.set_dtype(mx.bfloat16)
    module.update({"lm_head": {"weight": module.lm_head.weight * 20}})
    if bits < 16:
        nn.quantize(module, group_size=64, bits=bits)
    mx.eval(module.parameters())
    return module


def loaded(module: Any, kind: str, tokens: int, kv_bits: int = 16) -> LoadedModel:
    """Return `module` as the loader would, with cache memory for `tokens` tokens in 16 bits."""
    library = connect()
    args = module.args
    token_bytes = args.num_hidden_layers * 2 * args.num_key_value_heads * args.head_dim * 2
    reference = Reference(library, module, args.max_position_embeddings)
    config = candidates.paged(reference, tokens * token_bytes, [], keep_prefixes=True, bits=kv_bits)
    if not config.fused:
        raise SystemExit("the layers are not fused: see the warnings above")
    if kind == "plain":
        config = replace(config, decoder=None)
    print(f"# {kind}: backend {config.name}, fused {config.fused}", flush=True)
    return LoadedModel(
        name="random",
        module=module,
        library=library,
        architecture="qwen3",
        vocabulary=args.vocab_size,
        context=args.max_position_embeddings,
        device="cuda",
        dtype="bfloat16",
        parameters=0,
        weight_bytes=0,
        choice=BackendChoice(config, KvCost(token_bytes, 0), tokens * token_bytes),
        kv_dtype="bfloat16",
        draws=sampling_kernel(args.vocab_size, mx.bfloat16).required(),
        lands=readback().required(),
        masks=mask_kernel(args.vocab_size, mx.bfloat16).required(),
    )


def prompt(i: int, length: int, vocabulary: int = 150_005) -> tuple[int, ...]:
    return tuple((7919 * i + 104729 * j * j + 31 * j) % (vocabulary - 5) + 5 for j in range(length))


class Rows:
    """Rows of a runner, driven as the engine does: each step is started before the last one is finished, where
    possible. `first` is the number of the first one's prompt."""

    def __init__(
        self,
        runner: ModelRunner,
        lengths: Sequence[int],
        chunk: int,
        sampling: Sampling = GREEDY,
        *,
        vocabulary: int = 150_005,
        first: int = 0,
    ) -> None:
        self.runner = runner
        self.sampling = sampling
        self.ahead = runner.capabilities().steps.lookahead
        self.tokens: list[list[int]] = [[] for _ in lengths]
        self.prompts = [prompt(first + i, length, vocabulary) for i, length in enumerate(lengths)]
        self.cached = [0] * len(lengths)
        self.flying = 0
        self.position = [0] * len(lengths)
        self.chunk = chunk
        self.admitted = False
        self.seconds: list[float] = []
        self.starting: list[float] = []
        self.whole: list[bool] = []
        self._last = 0.0

    def start(self, limit: int) -> None:
        """Start one more step; prompts in turn, a chunk a step, beside the rows that decode (no more than `limit`
        tokens)."""
        admit: tuple[Admit, ...] = ()
        if not self.admitted:
            some: dict[str, Any] = {"max_tokens": 9999, "sampling": self.sampling}
            wanted = [Admit(request=Submit(id=str(i), prompt=p, **some)) for i, p in enumerate(self.prompts)]
            self.cached = [self.runner.match_prefix(one) for one in wanted]
            admit = tuple(Admit(one.request, cached_tokens=n) for one, n in zip(wanted, self.cached, strict=True))
            self.admitted = True
        prefill, decode, left = [], [], self.chunk
        for i, p in enumerate(self.prompts):
            need = len(p) - 1 - self.cached[i]
            if need > 0:
                take = min(need, left)
                left -= take
                if take:
                    prefill.append(PrefillChunk(str(i), self.cached[i], take))
                    self.cached[i] += take
                need -= take
            if need <= 0 and self.position[i] < limit:
                decode.append(DecodeRow(str(i), self.position[i]))
                self.cached[i] += 1
                self.position[i] += 1
        began = time.perf_counter()
        self.runner.start(StepPlan(step=1, admit=admit, prefill=tuple(prefill), decode=tuple(decode)))
        self.starting.append(time.perf_counter() - began)
        self.whole.append(not prefill and len(decode) == len(self.prompts))
        self.flying += 1

    def finish(self) -> None:
        result = self.runner.finish()
        assert not result.failures, result.failures
        self.flying -= 1
        for row in result.rows:
            self.tokens[int(row.id)].extend(row.tokens)
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def run(self, limit: int) -> None:
        while min(self.position) < limit:
            self.start(limit)
            while self.flying > self.ahead:
                self.finish()
        while self.flying:
            self.finish()

    def decode_ms(self) -> float:
        """Return the median of the steps in which all rows decode and no prompt is read, without the first four."""
        return self._median_ms(self.seconds)

    def host_ms(self) -> float:
        """Return the median time that starting such a step takes the host."""
        return self._median_ms(self.starting)

    def _median_ms(self, seconds: Sequence[float]) -> float:
        whole = [one for one, whole in zip(seconds, self.whole, strict=True) if whole]
        return statistics.median(whole[4:]) * 1e3

    def release(self) -> None:
        for i in range(len(self.prompts)):
            self.runner.release(str(i))


def alone(module: Any, tokens: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Generate with mlx-lm's caches, one row, greedy. Returns its tokens, and the gap of the two best logits each
    time."""
    caches = cache.make_prompt_cache(module)
    logits = module(mx.array([tokens]), cache=caches)[:, -1]
    found: list[int] = []
    gaps: list[float] = []
    for _ in range(count):
        best: Any = mx.sort(logits[0].astype(mx.float32))[-2:]
        token: Any = mx.argmax(logits, axis=-1)
        gaps.append((best[1] - best[0]).item())
        found.append(int(token.item()))
        logits = module(token[:, None], cache=caches)[:, -1]
    return found, gaps


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int:
    """Return the first position at which the tokens differ; their number if they don't."""
    return next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(expected))


def fidelity(module: Any, runner: ModelRunner, lengths: Sequence[int], count: int) -> None:
    rows = Rows(runner, lengths, 200)
    rows.run(count)
    rows.release()
    again = Rows(runner, lengths, 4096)  # from the prefix cache
    again.run(count)
    again.release()
    held = runner.statistics().prefix
    for i, length in enumerate(lengths):
        expected, gaps = alone(module, prompt(i, length), count)
        for name, got in (("computed", rows.tokens[i]), ("reused", again.tokens[i])):
            same = first_difference(got, expected)
            note = "" if same == count else f", then the two best logits are {gaps[same]:.4f} apart"
            print(f"row of {length:5} {name}: {same} of {count} tokens equal{note}", flush=True)
    print(f"# prefixes: {held}", flush=True)


@contextmanager
def peak() -> Iterator[list[float]]:
    mx.clear_cache()
    mx.reset_peak_memory()
    found: list[float] = []
    yield found
    found.append(mx.get_peak_memory() / 1e9)


def ours(model: LoadedModel, lengths: Sequence[int], steps: int, sampling: Sampling) -> float:
    runner = ModelRunner(model)
    rows = Rows(runner, lengths, 4096, sampling)
    rows.run(1)
    rows.run(max(rows.position) + steps)
    rows.release()
    runner._backend.close()
    return rows.decode_ms()


def theirs(module: Any, lengths: Sequence[int], steps: int) -> float:
    generator = BatchGenerator(module, max_tokens=steps + 60, completion_batch_size=max(len(lengths), 8))
    generator.insert([list(prompt(i, length)) for i, length in enumerate(lengths)])
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < steps:
        _, gained = generator.next()
        now = time.perf_counter()
        if len(gained) == len(lengths):
            times.append((now - began) * 1e3)
        began = now
    generator.close()
    return statistics.median(times[4:])


def floor_ms(module: Any, lengths: Sequence[int], kv_bits: int = 16) -> float:
    args = module.args
    weights = sum(a.nbytes for name, a in tree_flatten(module.parameters()) if "embed_tokens" not in name)
    kv = sum(lengths) * args.num_hidden_layers * 2 * args.num_key_value_heads * args.head_dim * kv_bits / 8
    return (weights + kv) / BANDWIDTH * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--length", type=int, default=640)
    parser.add_argument("--long", action="store_true", help="8 and 32 rows of 8k, and one of 32k beside seven of 1k")
    parser.add_argument("--ways", nargs="+", default=["fused", "generator"], help="of fused, plain, generator")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kv-bits", type=int, default=16, choices=(16, 8), help="of keys and values in pages")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.6, top_p 0.95, top_k 20")
    parser.add_argument("--no-fidelity", action="store_true")
    options = parser.parse_args()
    module = make(options.shape, options.bits)
    cases = [[options.length - options.steps] * rows for rows in options.rows]
    if options.long:
        cases += [[8192] * 8, [8192] * 32, [32768, *[1024] * 7]]
    kinds = [way for way in options.ways if way != "generator"]
    if not options.no_fidelity:
        for kind in kinds:
            runner = ModelRunner(loaded(module, kind, 1 << 14, options.kv_bits))
            fidelity(module, runner, (5, 40, 333, 7, 64, 1000, 17, 2), 24)
            runner._backend.close()
            del runner
    for lengths in cases:
        least = floor_ms(module, lengths, options.kv_bits)
        line = f"{options.shape} {options.bits} bits, {len(lengths)} x {lengths[0]}: floor {least:.2f} ms"
        found: dict[str, float] = {}
        for way in options.ways:
            with peak() as memory:
                if way == "generator":
                    found[way] = theirs(module, lengths, options.steps)
                else:
                    model = loaded(module, way, sum(lengths) + 96 * len(lengths), options.kv_bits)
                    found[way] = ours(model, lengths, options.steps, USUAL if options.sampled else GREEDY)
                    del model
            line += f"; {way} {found[way]:.2f} ms = {least / found[way] * 100:.0f} %, peak {memory[0]:.1f} GB"
        if "generator" in found and len(found) > 1:
            line += f"; ratio {found[kinds[0]] / found['generator']:.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()

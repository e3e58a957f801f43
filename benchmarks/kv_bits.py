"""Effect of quantized keys and values on a model's predictions, on any machine, without kernels for them.

    python benchmarks/kv_bits.py MODEL [--tokens 1024] [--text FILE]

Runs a text through the model in chunks with a cache that rounds keys and values: 8 bits as the pages keep them
(`--kv-bits 8`: one factor for each token and head), 4 bits the same way and with a factor and an offset for every 32
dimensions. Prints, against exact ones, the rate of equal likeliest next tokens, the mean divergence (KL) of the
distributions, and the text's perplexity.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treadle.runner.device import blas

blas.prepare()

import mlx.core as mx  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from treadle.models import demo  # noqa: E402
from treadle.runner.mlxlm import connect  # noqa: E402

CHUNK = 128
Round = Callable[[Any], Any]


def by_head(bits: int) -> Round:
    most = (1 << (bits - 1)) - 1

    def rounded(values_in: Any) -> Any:
        factor = mx.maximum(mx.abs(values_in).max(axis=-1, keepdims=True) / most, 1e-12)
        return mx.round(values_in / factor) * factor

    return rounded


def by_group(bits: int, group: int) -> Round:
    def rounded(values_in: Any) -> Any:
        parts = values_in.reshape(*values_in.shape[:-1], -1, group)
        low, high = parts.min(axis=-1, keepdims=True), parts.max(axis=-1, keepdims=True)
        factor = mx.maximum((high - low) / ((1 << bits) - 1), 1e-12)
        return (mx.round((parts - low) / factor) * factor + low).reshape(values_in.shape)

    return rounded


class Rounding:
    """Cache that rounds keys and values before it stores them."""

    def __init__(self, inner: Any, rounded: Round) -> None:
        self._inner = inner
        self._rounded = rounded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        return self._inner.update_and_fetch(self._rounded(keys), self._rounded(values))


def distributions(library: Any, module: Any, tokens: list[int], rounded: Round) -> Any:
    """Return log-probabilities (T, V) of each next token."""
    caches = [Rounding(cache, rounded) for cache in library.new_caches(module)]
    parts = []
    for start in range(0, len(tokens), CHUNK):
        logits = module(mx.array([tokens[start : start + CHUNK]]), cache=caches)[0].astype(mx.float32)
        parts.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--text", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "structure.md")
    options = parser.parse_args()
    folder = demo.folder(print) if options.model == "demo" else Path(options.model)
    library = connect()
    module, _ = library.load(folder)
    module.set_dtype(mx.float32)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(options.text.read_text()).ids[: options.tokens]
    exact = distributions(library, module, tokens, lambda values_in: values_in)
    following = mx.array(tokens[1:])[:, None]
    for name, rounded in (
        ("exact", lambda values_in: values_in),
        ("8 bits, a factor a head", by_head(8)),
        ("4 bits, a factor a head", by_head(4)),
        ("4 bits, groups of 32", by_group(4, 32)),
    ):
        found = distributions(library, module, tokens, rounded)
        same = (found.argmax(axis=-1) == exact.argmax(axis=-1)).mean().item()
        divergence = (mx.exp(exact) * (exact - found)).sum(axis=-1).mean().item()
        perplexity = mx.exp(-mx.take_along_axis(found[:-1], following, axis=-1).mean()).item()
        print(f"{name}: likeliest token the same {same:.1%}, divergence {divergence:.5f}, perplexity {perplexity:.2f}")


if __name__ == "__main__":
    main()

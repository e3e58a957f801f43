"""Tiny embedding models, in folders as sentence-transformers writes them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, processors

from tests.support.tiny import BOS, EOS, make_tiny

HIDDEN = 64
_TYPES = "sentence_transformers.models."


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def change_json(path: Path, **fields: Any) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | fields)


def make_qwen3_embedding(folder: Path) -> Path:
    """A Qwen3 without a head, pooled at the <eos> that its tokenizer appends, as Qwen3-Embedding is."""
    make_tiny(folder, architecture="qwen3")
    _rename(folder)
    _append(folder, "$A <eos>", EOS, "<eos>")
    change_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    write_modules(folder, "pooling_mode_lasttoken", dense=0)
    return folder


def make_gemma_embedding(folder: Path, *, sliding_window: int = 32, dense: int = 2) -> Path:
    """A bidirectional Gemma 3 with a mean and two Dense layers behind it, as EmbeddingGemma is."""
    make_tiny(folder, architecture="gemma3", sliding_window=sliding_window, layers=4)
    _rename(folder)
    _append(folder, "<bos> $A <eos>", EOS, "<eos>", BOS, "<bos>")
    change_json(folder / "config.json", use_bidirectional_attention=True, architectures=["Gemma3TextModel"])
    write_modules(folder, "pooling_mode_mean_tokens", dense=dense)
    return folder


def _rename(folder: Path) -> None:
    """Name the weights as those of the decoder alone, without a head."""
    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    kept = {name.removeprefix("model."): np.array(value) for name, value in weights.items() if "lm_head" not in name}
    mx.save_safetensors(path, {name: mx.array(value) for name, value in kept.items()}, {"format": "pt"})


def _append(folder: Path, template: str, *specials: Any) -> None:
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    pairs = list(zip(specials[1::2], specials[::2], strict=True))
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    tokenizer.save(path)


def write_modules(folder: Path, mode: str, *, dense: int = 0) -> None:
    """Describe the folder as one of sentence-transformers, pooled by `mode`, with so many Dense layers behind it."""
    kinds = ["Transformer", "Pooling", *["Dense"] * dense, "Normalize"]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": _TYPES + kind}
            for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ],
    )
    write_json(
        folder / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, mode: True, "include_prompt": True}
    )
    sizes = [HIDDEN, 96, 48][: dense + 1]
    dice = np.random.default_rng(7)
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        inner = folder / f"{i + 2}_Dense"
        identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
        write_json(inner / "config.json", {"in_features": inputs, "out_features": outputs, **identity})
        weight = dice.standard_normal((outputs, inputs)).astype(np.float32) / inputs**0.5
        mx.save_safetensors(str(inner / "model.safetensors"), {"linear.weight": mx.array(weight)}, {"format": "pt"})

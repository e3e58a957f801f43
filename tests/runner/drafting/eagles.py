"""Tiny models with EAGLE-3 heads, loaded, and references for what their heads draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.runner.drafting.headed import OPTIONS
from tests.support.architectures import ARCHITECTURES
from tests.support.eagle_models import LAYERS, VOCABULARY, EagleReference
from tests.support.mtp_models import random_tensors
from tests.support.mtp_reference import Array
from treadle.runner.loading.draft import DraftModel
from treadle.runner.loading.eagle import load_eagle
from treadle.runner.loading.headed import HeadedModel
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel


def make_target(folder: Path, family: str, *, without_layers: bool = False, seed: int = 0) -> Path:
    """Write a random model of four layers, which add nothing where it is to be `without_layers`; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**ARCHITECTURES[family], "model_type": family, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    weights = random_tensors(config, seed)
    if without_layers:
        adding = ("o_proj.weight", "down_proj.weight")
        weights = {name: value * (not name.endswith(adding)) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_eagle(plain: LoadedModel, folder: Path) -> HeadedModel:
    """Return a model with the head in `folder`."""
    return load_eagle(plain, DraftModel(folder, folder.name, is_head=True), OPTIONS)


@dataclass
class Eagle:
    """A tiny model, as it was loaded, and the folder of its head."""

    plain: LoadedModel
    folder: Path

    @classmethod
    def of(cls, target: Path, head: Path) -> Eagle:
        return cls(load(target, **OPTIONS), head)

    @cached_property
    def model(self) -> HeadedModel:
        return with_eagle(self.plain, self.folder)

    @cached_property
    def reference(self) -> EagleReference:
        return EagleReference(self.folder, self.plain.module.model.embed_tokens.weight)

    def states(self, tokens: Sequence[int]) -> Array:
        """Return the hidden states (n, 3 D) that the head takes of `tokens`, computed by mlx-lm's layers alone."""
        inner, found = self.plain.module.model, list[Any]()
        x, causal = inner.embed_tokens(mx.array([list(tokens)])), mx.tri(len(tokens), dtype=mx.bool_)
        for layer, cache in zip(inner.layers, self.plain.library.new_caches(self.plain.module), strict=True):
            found.append(x[0])
            x = layer(x, causal, cache)
        return np.array(mx.concatenate([found[layer] for layer in LAYERS], axis=-1), np.float64)

    def drafts(self, tokens: Sequence[int], count: int, start: int = 0) -> list[int]:
        """Return what a new head drafts behind `tokens`, having seen states from that of token `start` on."""
        return self.reference.drafts(self.states(tokens[:-1])[start:], tokens[start:], count)

"""Vectors of prompts with images: equal to the hidden states of mlx-vlm's own modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.looped import Looped
from tests.runner.test_pooling import close, vector
from tests.runner.vision.asked import Asked, Picture, VisionModel
from tests.support.embedding_models import change_json, write_json, write_modules
from tests.support.shared_pixels import SharedPixels
from tests.support.tiny_vision import config_of, make_vision
from treadle.core.messages import Pooling
from treadle.errors import ModelError
from treadle.runner.build import build

CAT, DOG = Picture(1), Picture(2, 1)
FAMILY = "qwen3_vl"
ModelOf = Callable[[str], VisionModel]


def inputs(model: VisionModel, pooling: Pooling) -> list[Asked]:
    """Inputs with an image, with two, with the same one behind a longer text, and of text alone."""
    pooled: dict[str, Any] = {"tokens": 0, "pooling": pooling}
    return [
        model.ask("one", CAT, text=1, **pooled),
        model.ask("two", CAT, DOG, text=2, **pooled),
        model.ask("again", CAT, text=1, head=40, **pooled),
        model.ask("text", text=3, head=30, **pooled),
    ]


def expected(model: VisionModel, asked: Asked) -> Any:
    """The hidden states of mlx-vlm's language model, pooled."""
    reference, submit = model.reference, asked.submit
    ids = mx.array([submit.prompt])
    pixels = mx.array(np.concatenate(asked.pixels)) if asked.pixels else None
    grids = [list(size) for image in submit.images for size in image.grid]
    given = reference.get_input_embeddings(ids, pixels, image_grid_thw=mx.array(grids) if grids else None)
    fields = ("inputs_embeds", "position_ids", "visual_pos_masks", "deepstack_visual_embeds")
    states = reference.language_model.model(ids, **{name: getattr(given, name) for name in fields})[0]
    return np.array(states[-1] if submit.pooling is Pooling.LAST else states.mean(axis=0))


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
@pytest.mark.parametrize("prefill_tokens", [16, 512])
def test_vectors_are_those_of_mlx_vlm_s_modules(pooling: Pooling, prefill_tokens: int, model_of: ModelOf) -> None:
    """Text and images in one batch, beside a stream, in short chunks and in long ones."""
    model = model_of(FAMILY)
    model.runner.forget_prefixes()
    loop = Looped(model.runner, prefill_tokens=prefill_tokens)
    stream, some = model.ask("stream", DOG, text=4), inputs(model, pooling)
    loop.submit(stream.submit, *(asked.submit for asked in some))
    loop.run()
    for asked in some:
        assert close(vector(loop, asked.submit.id), expected(model, asked)), asked.submit.id
    assert loop.tokens("stream") == model.expected(stream)
    assert model.runner.statistics().features.needed_bytes == 0


def test_a_vector_behind_a_cached_image_skips_its_tower(model_of: ModelOf) -> None:
    model = model_of(FAMILY)
    model.runner.forget_prefixes()
    first, again = (
        model.ask(name, CAT, text=1, head=36, tail=tail, tokens=0, pooling=Pooling.LAST)
        for name, tail in (("first", 3), ("again", 9))
    )
    loop = Looped(model.runner, prefill_tokens=512)
    loop.run(first.submit)
    loop.run(again.submit)
    assert loop.cached("again") > first.submit.images[0].end
    assert close(vector(loop, "again"), expected(model, again))


def as_published(folder: Path, **more: Any) -> Path:
    """A model for embeddings of images as Qwen3-VL-Embedding-8B is published: without a head, though not tied."""
    make_vision(folder, FAMILY, without="lm_head", more=more)
    weights: dict[str, Any] = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    names = {"language_model.model.": "model.language_model.", "vision_tower.": "model.visual."}
    renamed = {
        new + name.removeprefix(old): array
        for name, array in weights.items()
        for old, new in names.items()
        if name.startswith(old)
    }
    assert len(renamed) == len(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    return folder


@pytest.mark.parametrize("modules", [True, False])
def test_an_embedding_model_with_a_tower_needs_no_head(
    modules: bool, tmp_path: Path, model_of: ModelOf, shared: SharedPixels
) -> None:
    folder = as_published(tmp_path)
    if modules:
        write_modules(folder, "pooling_mode_lasttoken")
    model = VisionModel(FAMILY, folder, shared)
    can = model.runner.capabilities()
    assert can.modalities == ("text", "image")
    assert (can.embedding.only, can.embedding.dimensions) == (True, 64)
    assert can.embedding.poolings == ((Pooling.LAST,) if modules else tuple(Pooling))
    loop = Looped(model.runner)
    some = inputs(model_of(FAMILY), Pooling.LAST)
    loop.submit(*(asked.submit for asked in some))
    loop.run()
    for asked in some:
        assert close(vector(loop, asked.submit.id), expected(model_of(FAMILY), asked))


def test_a_download_that_lacks_the_shard_of_the_head_is_no_embedding_model(tmp_path: Path) -> None:
    folder = as_published(tmp_path)
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"lm_head.weight": "model-2.safetensors"}})
    with pytest.raises(ModelError):
        build(folder, max_running=2)


def test_a_tied_model_without_a_head_generates_too(tmp_path: Path) -> None:
    text = {**config_of(FAMILY)["text_config"], "tie_word_embeddings": True}
    folder = as_published(tmp_path, text_config=text)
    change_json(folder / "config.json", tie_word_embeddings=True)
    can = build(folder, max_running=2).capabilities()
    assert (can.embedding.only, can.embedding.dimensions) == (False, 64)

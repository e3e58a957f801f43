"""mlx-vlm's own generation for tiny vision models, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.tiny_vision import IMAGE
from treadle.core.image import Image

Pixels = Sequence[np.ndarray]


def generate(
    family: str, model: Any, prompt: Sequence[int], images: Sequence[Image], pixels: Pixels, count: int
) -> list[int]:
    """Greedy tokens of mlx-vlm's `model` behind a prompt whose `images` have these `pixels`."""
    from mlx_vlm.generate.ar import generate_step

    ids = mx.array([list(prompt)])
    if family == "gemma3":
        return _gemma3(model, ids, images, pixels, count)
    given, more = _inputs(family, images, pixels)
    if family == "gemma4":
        more["mm_token_type_ids"] = (ids == IMAGE).astype(mx.int32)
    steps = generate_step(ids, model, given, mx.ones_like(ids), max_tokens=count, temperature=0.0, **more)
    return [int(token) for token, _ in steps][:count]


def _inputs(family: str, images: Sequence[Image], pixels: Pixels) -> tuple[Any, dict[str, Any]]:
    """Pixel values and what else mlx-vlm's processors give."""
    if not images:
        return None, {}
    grids = [list(size) for image in images for size in image.grid]
    match family:
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe":
            return mx.array(np.concatenate(pixels)), {"image_grid_thw": mx.array(grids)}
        case "mistral3" | "pixtral":
            high, wide = np.max(grids, axis=0)
            padded = [
                np.pad(one, ((0, 0), (0, 0), (0, high - one.shape[2]), (0, wide - one.shape[3]))) for one in pixels
            ]
            return mx.array(np.concatenate(padded)), {"image_sizes": mx.array(grids)}
        case "smolvlm" | "idefics3":
            return mx.array(np.concatenate(pixels))[None], {}
        case "lfm2_vl":
            counts = np.prod(grids, axis=1)[:, None]
            mask = (np.arange(pixels[0].shape[1])[None] < counts).astype(np.int32)
            return mx.array(np.concatenate(pixels)), {
                "spatial_shapes": mx.array(grids),
                "pixel_attention_mask": mx.array(mask),
            }
        case "gemma4":
            return [mx.array(one[0]) for one in pixels], {}
    return mx.array(np.concatenate(pixels)), {}


def _gemma3(model: Any, ids: Any, images: Sequence[Image], pixels: Pixels, count: int) -> list[int]:
    """mlx-vlm's modules with the mask that the model was trained with: it generates with a causal one, and lets an
    image's tokens see no others behind them."""
    embeds = model.language_model.model.embed_tokens(ids)
    if images:
        embeds = model.get_input_embeddings(ids, mx.array(np.concatenate(pixels)), mx.ones_like(ids)).inputs_embeds
    length, made = ids.shape[1], list[int]()
    own = np.arange(length)
    mask = own[None] <= own[:, None]
    for image in images:
        mask[image.start : image.end, image.start : image.end] = True
    caches = model.language_model.make_cache()
    logits = model.language_model(ids, inputs_embeds=embeds, mask=mx.array(mask), cache=caches).logits
    while True:
        made.append(int(np.argmax(np.array(logits[0, -1]))))
        if len(made) == count:
            return made
        logits = model.language_model(mx.array([[made[-1]]]), cache=caches).logits

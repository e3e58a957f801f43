"""Towers whose layers are called here one by one, with numbers that the host has counted.

Those that mlx-vlm counts on the device it reads back, which waits for the step in flight. It also masks what an image
by itself has nothing of: other images, and padding. And it calls all layers at once, which takes the host as long as a
step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from .encoded import Grid, Walk


def layers(some: Iterable[Any], x: Any, *args: Any, **kwargs: Any) -> Walk:
    """The layers over `x`, one behind the other. Returns what the last one does."""
    for layer in some:
        x = layer(x, *args, **kwargs)
        yield (x,)
    return x


def siglip(tower: Any, pixels: Any) -> Walk:
    """A tower of SigLIP for views (n, 3, height, width). Returns its last hidden states (n, patches, D)."""
    embedded = tower.embeddings(pixels.transpose(0, 2, 3, 1))
    del pixels
    return tower.post_layernorm((yield from layers(tower.encoder.layers, embedded, mask=None)))


def clip(tower: Any, pixels: Any, kept: Collection[int]) -> Walk:
    """A tower of CLIP or SigLIP for views (n, 3, height, width). Returns its hidden states (n, patches, D), in front of
    its layers and behind each: the `kept` ones, by their places, and None for the others. Those of CLIP begin with a
    class token."""
    x = tower.embeddings(pixels.transpose(0, 2, 3, 1))
    del pixels
    if "pre_layrnorm" in tower:
        x = tower.pre_layrnorm(x)
    return (yield from _keeping(tower.encoder.layers, x, kept, mask=None))


def _keeping(some: Iterable[Any], x: Any, kept: Collection[int], **kwargs: Any) -> Walk:
    """The layers over `x`. Returns the hidden states in front of them and behind each, or None where not `kept`."""
    states = [x if 0 in kept else None]
    for place, layer in enumerate(some, 1):
        x = layer(x, **kwargs)
        states.append(x if place in kept else None)
        yield (x,)
    return states


def gemma4(model: Any, pixels: Any, grid: Grid) -> Walk:
    """The tower of Gemma 4. No patch of an image is padding."""
    tower = model.vision_tower
    views, _, height, width = pixels.shape
    rows, columns = height // tower.patch_size, width // tower.patch_size
    count = rows * columns
    places = np.stack(np.divmod(np.arange(count), columns)[::-1], axis=1).astype(np.int32)
    positions, padding = mx.array(np.tile(places, (views, 1, 1))), mx.zeros((views, count), mx.bool_)
    embedded = tower.patch_embedder(pixels, positions, padding)
    del pixels
    x = yield from layers(tower.encoder.layers, embedded, positions, None)
    pooled, _ = tower.pooler(x, positions, padding, output_length=count // tower.pooling_kernel_size**2)
    if tower.config.standardize:
        pooled = (pooled - tower.std_bias) * tower.std_scale
    return flat(model.embed_vision(flat(pooled)[None]))


def pixtral(model: Any, pixels: Any, kept: Collection[int]) -> Walk:
    """Pixtral's tower for one image (1, 3, height, width). Returns its hidden states (1, patches, D), in front of its
    layers and behind each: the `kept` ones, by their places, and None for the others."""
    tower = model.vision_tower.vision_model
    embedded = tower.patch_conv(pixels.transpose(0, 2, 3, 1).astype(tower.patch_conv.weight.dtype))
    del pixels
    views, rows, columns, width = embedded.shape
    if views != 1:
        raise ValueError(f"an image of {views} views, and this tower takes one")
    x = tower.ln_pre(embedded.reshape(1, rows * columns, width))
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    side = tower.config.image_size // tower.config.patch_size
    turns = tower.patch_positional_embedding(x, mx.array(row * side + column))
    return (yield from _keeping(tower.transformer.layers, x, kept, mask=None, position_embeddings=turns))


def idefics3(model: Any, pixels: Any, grid: Grid) -> Walk:
    """The tower of SmolVLM or Idefics 3, for views that are all full."""
    tower = model.vision_model
    embeddings = tower.embeddings
    patches = embeddings.patch_embedding(pixels.transpose(0, 2, 3, 1))
    del pixels
    _, rows, columns, _ = patches.shape
    side = embeddings.num_patches_per_side  # of the embeddings, over which those of a view are spread
    row, column = (np.arange(count, dtype=np.int32) * side // count for count in (rows, columns))
    places = mx.array((row[:, None] * side + column).reshape(-1))
    x = patches.flatten(1, 2) + embeddings.position_embedding(places)
    x = x.astype(embeddings.patch_embedding.weight.dtype)
    last = yield from layers(tower.encoder.layers, x, mask=None)
    return flat(model.connector(tower.post_layernorm(last)))


def lfm2(model: Any, pixels: Any, grid: Grid) -> Walk:
    """The tower of LFM2-VL, for views with padding behind their patches, which nothing attends to."""
    tower = model.vision_tower
    shapes = np.array([list(size) for size in grid])
    counts = shapes.prod(axis=1)
    padding = np.arange(pixels.shape[1]) >= counts[:, None]
    x = tower.embeddings(pixels, spatial_shapes=shapes).astype(tower.embeddings.patch_embedding.weight.dtype)
    del pixels
    mask = mx.array(np.where(padding, np.float32(-np.inf), np.float32(0))[:, None, None, :]).astype(x.dtype)
    states = tower.post_layernorm((yield from layers(tower.encoder.layers, x, mask=mask)))
    parts = []
    for view, (rows, columns) in enumerate(shapes.tolist()):
        own = states[view, : rows * columns].reshape(1, rows, columns, -1)
        parts.append(flat(model.multi_modal_projector(model.pixel_unshuffle(own))))
    return mx.concatenate(parts)


def flat(rows: Any) -> Any:
    """The rows of all views, one behind the other."""
    return rows.reshape(-1, rows.shape[-1])

"""Towers whose layers are called here, with numbers that the host has counted.

What mlx-vlm calls itself it reads back from the device, which waits for the step in flight. It also masks what an image
by itself has nothing of: other images, and padding.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import mlx.core as mx
import numpy as np

from .encoded import Grid, Walk


def gemma4(model: Any, pixels: Any, grid: Grid) -> Any:
    """Features by the tower of Gemma 4. No patch of an image is padding."""
    tower = model.vision_tower
    views, _, height, width = pixels.shape
    rows, columns = height // tower.patch_size, width // tower.patch_size
    count = rows * columns
    places = np.stack(np.divmod(np.arange(count), columns)[::-1], axis=1).astype(np.int32)
    positions, padding = mx.array(np.tile(places, (views, 1, 1))), mx.zeros((views, count), mx.bool_)
    x = tower.encoder(tower.patch_embedder(pixels, positions, padding), positions, None)
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
    turns, states = tower.patch_positional_embedding(x, mx.array(row * side + column)), [x if 0 in kept else None]
    for place, layer in enumerate(tower.transformer.layers, 1):
        x = layer(x, mask=None, position_embeddings=turns)
        states.append(x if place in kept else None)
        yield (x,)
    return states


def idefics3(model: Any, pixels: Any, grid: Grid) -> Any:
    """Features by the tower of SmolVLM or Idefics 3, of views that are all full."""
    tower = model.vision_model
    embeddings = tower.embeddings
    patches = embeddings.patch_embedding(pixels.transpose(0, 2, 3, 1))
    _, rows, columns, _ = patches.shape
    side = embeddings.num_patches_per_side  # of the embeddings, over which those of a view are spread
    row, column = (np.arange(count, dtype=np.int32) * side // count for count in (rows, columns))
    places = mx.array((row[:, None] * side + column).reshape(-1))
    x = patches.flatten(1, 2) + embeddings.position_embedding(places)
    x = x.astype(embeddings.patch_embedding.weight.dtype)
    last, *_ = tower.encoder(x=x, output_hidden_states=True, mask=None)
    return flat(model.connector(tower.post_layernorm(last)))


def lfm2(model: Any, pixels: Any, grid: Grid) -> Any:
    """Features by the tower of LFM2-VL, of views with padding behind their patches."""
    shapes = np.array([list(size) for size in grid])
    counts = shapes.prod(axis=1)
    real = mx.array(np.arange(pixels.shape[1]) < counts[:, None])
    *_, states = model.vision_tower(pixels, output_hidden_states=True, spatial_shapes=shapes, pixel_attention_mask=real)
    parts = []
    for view, (rows, columns) in enumerate(shapes.tolist()):
        own = states[view, : rows * columns].reshape(1, rows, columns, -1)
        parts.append(flat(model.multi_modal_projector(model.pixel_unshuffle(own))))
    return mx.concatenate(parts)


def flat(rows: Any) -> Any:
    """The rows of all views, one behind the other."""
    return rows.reshape(-1, rows.shape[-1])

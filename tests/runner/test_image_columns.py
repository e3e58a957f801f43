"""Features in place of embeddings, what is added behind first layers, and positions of three axes, in every decoder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.backends import Driven, segment
from tests.runner.columns import HandMade, places
from tests.runner.family_paths import chosen, passes_of
from tests.runner.paged.models import loaded, make, paged
from tests.support.architectures import config_of, new_module
from treadle.runner.forward.segments import Features
from treadle.runner.kv.contiguous.backend import ContiguousConfig
from treadle.runner.kv.cost import KvCost
from treadle.runner.loading.model import LoadedModel
from treadle.runner.mlxlm import RotaryAxes, turning_by
from treadle.runner.mlxlm.injection import embedding_of

SECTIONS = (12, 11, 9)
WAYS = ["fused", "routed", "contiguous"]
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_scaling": {"type": "mrope", "mrope_section": list(SECTIONS)}},
    "qwen3": {"rope_scaling": {"type": "default", "mrope_section": list(SECTIONS), "mrope_interleaved": True}},
    "gemma3": {},
}


@cache
def _module(name: str) -> Any:
    return make(name, **KINDS[name])


def _model(name: str, way: str) -> LoadedModel:
    module = _module(name)
    model = loaded(module, paged(module), fused=way == "fused")
    if way != "contiguous":
        return model
    windows = model.library.windows(module)
    assert windows is not None
    config: Any = ContiguousConfig(windows, model.choice.config.selection, "cpu", KvCost(0, 0))
    return replace(model, choice=replace(model.choice, config=config))


def _image(dice: random.Random, start: int, height: int, width: int, dim: int, levels: int = 0) -> Features:
    """Features of an image at `start`, and what is added behind `levels` layers."""
    count = height * width
    key = mx.random.key(dice.randrange(1 << 20))
    rows = mx.random.normal((1 + levels, count, dim), key=key) * 0.5
    return Features(np.arange(start, start + count, dtype=np.int32), rows[0], [rows[i] for i in range(1, 1 + levels)])


def _axes_of(text: int, height: int, width: int, behind: int) -> Any:
    """Positions (n, 3) of text, an image, and text behind it."""
    y, x = np.divmod(np.arange(height * width), width)
    image = text + np.stack([np.zeros_like(y), y, x], axis=1)
    after = text + max(height, width) + np.arange(behind)
    return np.concatenate([np.repeat(np.arange(text)[:, None], 3, 1), image, np.repeat(after[:, None], 3, 1)]).astype(
        np.int32
    )


class _HandTurned:
    """A rotation by the usual formula: angles of each pair by its axis, halves of a head turned into each other."""

    def __init__(self, dims: int, base: float, interleaved: bool) -> None:
        pairs = np.arange(dims // 2)
        self.frequencies = base ** (-2.0 * pairs / dims)
        ends = np.cumsum(SECTIONS)
        if interleaved:
            self.axes = np.where(pairs < 3 * np.array(SECTIONS)[pairs % 3], pairs % 3, 0)
        else:
            self.axes = np.searchsorted(ends, pairs, side="right")

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        angles = np.array(offset)[:, self.axes] * self.frequencies
        cosines, sines = (mx.array(f(angles).astype(np.float32))[:, None, None] for f in (np.cos, np.sin))
        first, second = mx.split(x, 2, axis=-1)
        return mx.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def _wanted(model: LoadedModel, tokens: Sequence[int], positions: Any, image: Features, *, interleaved: bool) -> Any:
    """Logits (n, V) of mlx-lm's layers called one after the other, with everything else written by hand."""
    inner = model.module.model
    x = inner.embed_tokens(mx.array([tokens]).T)
    x[mx.array(image.places), 0] = image.rows
    if model.architecture == "gemma3":
        x = x * 64**0.5
    last = np.arange(len(tokens), dtype=np.int32)
    windows = model.library.windows(model.module)
    assert windows is not None
    for number, layer in enumerate(inner.layers):
        own = layer.self_attn.rope
        if positions.ndim > 1:
            layer.self_attn.rope = _HandTurned(own.dims, own.base, interleaved)
        made = HandMade(positions, last, windows[number])
        x = layer(x, made.make_mask(), made)
        layer.self_attn.rope = own
        if number < len(image.deepstack):
            x[mx.array(image.places), 0] += image.deepstack[number]
    norm = getattr(inner.norm, "norm", inner.norm)
    return np.array(model.module.lm_head(norm(x))[:, 0])


def _found(model: LoadedModel, tokens: Sequence[int], chunks: Sequence[int], image: Features, positions: Any) -> Any:
    """The same by a backend, in chunks beside a plain sequence."""
    rows = Driven(model.choice.config, model.module)
    rows.admit("a", tokens=tokens)
    rows.admit("plain", tokens=tokens)
    whole = segment("a", tokens, 0, positions=positions, features=image)
    found, start = [], 0
    for count in chunks:
        own = whole.part(start, start + count, wants=count)
        if positions is not None and count == 1:
            own = replace_columns(own)  # text that is decoded follows by itself
        plain = segment("plain", tokens[start : start + count], start)
        found.append(places(rows.compute([own, plain]))["a"])
        start += count
    rows.backend.close()
    return np.concatenate(found)


def replace_columns(row: Any) -> Any:
    return type(row)(row.sequence, row.tokens, row.start, wants=row.wants)


def _dim(model: LoadedModel) -> int:
    return int(model.module.model.embed_tokens.weight.shape[1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_images_stand_at_three_axes(name: str, way: str) -> None:
    """Features, what is added behind the first layer, sections or interleaved pairs; a chunk ends within the image."""
    model, dice = _model(name, way), random.Random(1)
    tokens = [dice.randrange(256) for _ in range(7 + 24 + 13)]
    positions, image = _axes_of(7, 4, 6, 13), _image(dice, 7, 4, 6, _dim(model), levels=1)
    found = _found(model, tokens, [20, 22, 1, 1], image, positions)
    wanted = _wanted(model, tokens, positions, image, interleaved=name == "qwen3")
    np.testing.assert_allclose(found, wanted, atol=2e-3, rtol=2e-3)
    bare = _wanted(model, tokens, positions, image._replace(deepstack=()), interleaved=name == "qwen3")
    other = _wanted(model, tokens, positions, image, interleaved=name == "qwen2")
    assert min(np.abs(wanted - one)[8:].max() for one in (bare, other)) > 0.05


def _of_text(name: str, **changed: Any) -> dict[str, Any]:
    own = config_of(name)
    return {**own, "text_config": {**own["text_config"], **changed}}


QWEN3_VL = _of_text("qwen3_vl", rope_scaling={"type": "default", "mrope_section": list(SECTIONS)})
QWEN3_5 = _of_text(
    "qwen3_5", rope_parameters={"mrope_section": [3, 3, 2], "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
)


def _last(model: LoadedModel, tokens: Sequence[int], chunks: Sequence[int], image: Features, positions: Any) -> Any:
    """Logits (V,) of the last token alone."""
    rows = Driven(model.choice.config, model.module)
    rows.admit("a", tokens=tokens)
    whole, start = segment("a", tokens, 0, positions=positions, features=image), 0
    for count in chunks:
        done = rows.compute([whole.part(start, start + count, wants=1)])
        start += count
    rows.backend.close()
    return places(done)["a"][0]


@pytest.mark.parametrize("config", [QWEN3_VL, QWEN3_5], ids=["qwen3_vl", "qwen3_5"])
def test_any_chunks_give_the_same_in_all_backends(config: dict[str, Any]) -> None:
    """As the loader chooses them: fused in pages; with faster rotations and a narrowed last layer in buffers. Short
    chunks go to the kernel of those that decode; recurrent layers go on beside images."""
    tokens = [random.Random(4).randrange(256) for _ in range(50)]
    positions, logits = _axes_of(9, 4, 8, 9), []
    for device in ("cuda", "cpu"):
        model = chosen(config, device)
        image = _image(random.Random(5), 9, 4, 8, 256, levels=1)
        schedules = ([50], [12, 2, 7, 28, 1])
        logits += [_last(model, tokens, chunks, image, positions) for chunks in schedules]
        plain = _last(model, tokens, [50], image, None)
        assert np.abs(plain - logits[-1]).max() > 0.01
    for found in logits[1:]:
        np.testing.assert_allclose(found, logits[0], atol=3e-3, rtol=3e-3)


def test_compiled_modules_take_features() -> None:
    """Also where only short segments are computed."""
    tokens = [random.Random(6).randrange(256) for _ in range(20)]
    model = chosen(config_of("gpt_neox"), "cuda")
    assert passes_of(model) == "compiled"
    image = _image(random.Random(7), 5, 2, 3, 256)
    found = [_last(model, tokens, chunks, image, None) for chunks in ([20], [8, 2, 2, 8])]
    np.testing.assert_allclose(found[1], found[0], atol=2e-3, rtol=2e-3)
    assert np.abs(_last(model, tokens, [20], image._replace(rows=image.rows * 2), None) - found[0]).max() > 0.01


@pytest.mark.parametrize("way", WAYS)
def test_features_are_multiplied_as_embeddings_are(way: str) -> None:
    model, dice = _model("gemma3", way), random.Random(2)
    model = replace(model, architecture="gemma3")
    tokens = [dice.randrange(256) for _ in range(40)]
    image = _image(dice, 5, 3, 3, _dim(model))
    found = _found(model, tokens, [16, 22, 1, 1], image, None)
    wanted = _wanted(model, tokens, np.arange(40, dtype=np.int32), image, interleaved=False)
    np.testing.assert_allclose(found, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("way", WAYS)
def test_equal_axes_are_plain_positions(way: str) -> None:
    """Bit for bit, and in the same pass as without."""
    model, dice = _model("qwen3", way), random.Random(3)
    tokens = [dice.randrange(256) for _ in range(30)]
    nothing = Features(np.zeros(0, np.int32), mx.zeros((0, _dim(model))))
    axes = np.repeat(np.arange(30, dtype=np.int32)[:, None], 3, axis=1)
    found, plain = (_found(model, tokens, [17, 11, 1, 1], nothing, own) for own in (axes, None))
    assert (found == plain).all()


def test_a_models_axes_are_read() -> None:
    scaling = {"type": "default", "mrope_section": [24, 20, 20]}
    for name, interleaved in (("qwen2_vl", False), ("qwen3_vl", True), ("qwen3_5", True)):
        own = config_of(name)
        own["text_config"] = {**own["text_config"], "rope_scaling": scaling}
        if name == "qwen3_5":
            own["text_config"]["rope_parameters"] = {**scaling, "partial_rotary_factor": 0.25, "rope_theta": 10000.0}
        module = new_module(own)
        assert RotaryAxes.of(module) == RotaryAxes((24, 20, 20), interleaved)
        assert embedding_of(module) is module.language_model.model.embed_tokens
    assert RotaryAxes.of(_module("gemma3")) is None
    inner = new_module(config_of("gemma3n"))
    assert embedding_of(inner) is inner.model.language_model.embed_tokens


@pytest.mark.parametrize("traditional", [False, True])
def test_a_part_of_a_head_turns_by_axes(traditional: bool) -> None:
    """Neighbours or halves, of the first dimensions only: as by the angle of each pair's own position."""
    from mlx import nn

    axes, rotation = RotaryAxes((3, 3, 2), interleaved=True), nn.RoPE(16, traditional=traditional)
    assert axes.of_pairs(8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert RotaryAxes((3, 3, 2)).of_pairs(8).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    x, positions = mx.random.normal((5, 2, 1, 24)), mx.random.randint(0, 90, (5, 3))
    with turning_by(axes, [rotation]):
        found = np.array(rotation(x, offset=positions))
        plain = rotation(x, offset=positions[:, 1])
    assert (plain == rotation(x, offset=positions[:, 1])).all()
    assert type(rotation) is nn.RoPE
    values, wanted = np.array(x), np.array(x)
    for pair, axis in enumerate(axes.of_pairs(8)):
        i, j = (2 * pair, 2 * pair + 1) if traditional else (pair, pair + 8)
        angle = np.array(positions)[:, axis, None, None] * 10000.0 ** (-pair / 8)
        a, b = values[..., i], values[..., j]
        wanted[..., i] = a * np.cos(angle) - b * np.sin(angle)
        wanted[..., j] = b * np.cos(angle) + a * np.sin(angle)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-4)

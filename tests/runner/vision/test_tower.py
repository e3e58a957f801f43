"""Graphs of image features: built without a read from the device, and equal to what mlx-vlm's own towers return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.vision.asked import VisionModel
from tests.support.tiny_vision import FAMILIES, SIDE, pixels_of
from treadle.runner.mlxvlm import LazyImage
from treadle.runner.mlxvlm.qwen import walk

ModelOf = Callable[[str], VisionModel]
READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__")
GRIDS = [[(1, 4, 4)], [(1, 2, 34)], [(1, 10, 14), (1, 6, 2)], [(2, 6, 8)]]


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every way of reading an array of MLX fail."""

    def fail(*args: Any, **named: Any) -> None:
        raise AssertionError("an array is read from the device")

    for name in READS:
        monkeypatch.setattr(mx.array, name, fail)
    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, fail)
    for name in ("array", "asarray", "where", "stack", "concatenate"):
        own = getattr(np, name)
        monkeypatch.setattr(np, name, lambda *args, own=own, **named: _checked(own, fail, args, named))


def _checked(own: Any, fail: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    given = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
    return fail() if any(isinstance(one, mx.array) for one in given) else own(*args, **named)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_of_an_image_is_built_without_a_read(
    family: str, model_of: ModelOf, request: pytest.FixtureRequest
) -> None:
    """Each read would wait for the step in flight."""
    vision = model_of(family).runner._model.vision
    assert vision is not None
    pixels, grid, count = pixels_of(family, 1)
    request.getfixturevalue("no_reads")
    image = vision.tower.image(pixels, grid)
    arrays, features = image.run(vision.tower.pieces)
    assert features is not None
    assert arrays[0].shape[0] == count


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("grid", GRIDS)
def test_features_of_a_qwen_tower_are_those_of_mlx_vlm(
    family: str, grid: list[tuple[int, int, int]], model_of: ModelOf
) -> None:
    """Bit for bit: long ones, several in one array, and several frames."""
    reference = model_of(family).reference
    patches = sum(frames * rows * columns for frames, rows, columns in grid)
    pixels = mx.array(np.random.default_rng(1).standard_normal((patches, 6 * SIDE**2), np.float32))
    layers = len(reference.vision_tower.blocks)
    _, made = LazyImage(walk(reference, pixels, grid), lambda features: features).run(layers + 1)
    found = reference.vision_tower(pixels, mx.array(grid))
    rows, deepstack = found if isinstance(found, tuple) else (found, [])
    assert made is not None
    assert mx.array_equal(made.rows, rows)
    assert len(made.deepstack) == len(deepstack)
    assert all(mx.array_equal(one, other) for one, other in zip(made.deepstack, deepstack, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_called_when_it_is_asked_for(
    family: str, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once take the host as long as a step or two."""
    vision = model_of(family).runner._model.vision
    assert vision is not None
    tower = vision.tower
    first = getattr(tower._model, tower._family.parts[0])
    block = type(reduce(getattr, tower._family.blocks.split("."), first)[0])
    own, calls = block.__call__, list[Any]()

    def noted(self: Any, *args: Any, **named: Any) -> Any:
        calls.append(self)
        return own(self, *args, **named)

    monkeypatch.setattr(block, "__call__", noted)
    pixels, grid, _ = pixels_of(family, 1)
    image = tower.image(pixels, grid)
    called = []
    for count in (1, 2, tower.pieces - 3):
        image.run(count)
        called.append(len(calls))
    assert called == [1, 3, tower.layers]


@pytest.mark.parametrize("grid", [[(1, 4, 4)], [(1, 10, 14)]])
def test_the_frames_of_a_picture_are_the_picture(grid: list[tuple[int, int, int]], model_of: ModelOf) -> None:
    """A front writes each patch once, half of what the tower of Qwen-VL embeds."""
    reference = model_of("qwen3_vl").reference
    _, rows, columns = grid[0]
    once = np.random.default_rng(2).standard_normal((rows * columns, 3, 1, SIDE**2), np.float32)
    layers = len(reference.vision_tower.blocks)
    frames = [once.reshape(len(once), -1), np.repeat(once, 2, axis=2).reshape(len(once), -1)]
    one, other = (
        LazyImage(walk(reference, mx.array(each), grid), lambda features: features).run(layers + 1)[0]
        for each in frames
    )
    assert all(mx.array_equal(*pair) for pair in zip(one, other, strict=True))


def test_what_comes_behind_layers_is_computed_with_them(model_of: ModelOf) -> None:
    """DeepStack's features with their layer, and the projector by itself: else the last piece would be the longest."""
    vision = model_of("qwen3_vl").runner._model.vision
    assert vision is not None
    pixels, grid, _ = pixels_of("qwen3_vl", 1)
    image = vision.tower.image(pixels, grid)
    pieces = [image.run(1) for _ in range(vision.tower.pieces)]
    assert [len(arrays) for arrays, _ in pieces] == [2, 1, 2, 1, 3]
    assert [encoded is not None for _, encoded in pieces] == [False, False, False, False, True]
    behind = [array for arrays, _ in pieces[:-1] for array in arrays[:-1]]
    assert [array is one for array, one in zip(behind, pieces[-1][0][1:], strict=True)] == [True, True]

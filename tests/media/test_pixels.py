"""Pixels of each family equal those of mlx-vlm and transformers, recorded by `record_pixels`; sizes without images."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.media.pictures import picture
from tests.media.record_pixels import FILE, samples, settings_of
from treadle.errors import InvalidRequest
from treadle.media.pixels.families import plan_of, values_of, write_pixels
from treadle.media.pixels.plan import Plan
from treadle.runner.mlxvlm.levels import values_of as mlxvlm_values
from treadle.runner.mlxvlm.qwen import with_frames
from treadle.text.images import Layout
from treadle.text.images.qwen import QwenImages

RECORDED = json.loads(FILE.read_text())
ROUNDING = 1e-6


def pixels_of(settings: Any, width: int, height: int, *, low: bool = False) -> tuple[Any, np.ndarray]:
    plan = plan_of(settings, width, height, low=low)
    levels = np.full(plan.shape, 77, np.uint8)
    write_pixels(settings, plan, picture(width, height), levels)
    values = mlxvlm_values(mx.array(levels), mx.array(values_of(settings)), plan.layout.grid)
    return plan, np.array(values)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['family']}-{'x'.join(map(str, case['size']))}")
def test_pixels_are_those_of_the_libraries(case: dict[str, Any]) -> None:
    settings = settings_of(case["family"], case["settings"])
    plan, pixels = pixels_of(settings, *case["size"])
    if isinstance(settings, QwenImages):
        pixels = np.array(with_frames(mx.array(pixels), 2, settings.patch))
    assert list(pixels.shape) == case["shape"]
    assert samples(pixels) == pytest.approx(case["samples"], abs=ROUNDING)
    assert pixels.mean(dtype=np.float64) == pytest.approx(case["mean"], abs=ROUNDING)
    if "grid" in case:
        assert [list(view) for view in plan.layout.grid] == case["grid"]
    if "tiles" in case:
        assert list(plan.layout.tiles) == case["tiles"]
    if "tokens" in case:
        assert settings.text(plan.layout).count("<image>") == case["tokens"]


FAMILIES: dict[str, dict[str, Any]] = {
    "QwenImages": {},
    "Gemma3Images": {"pan_and_scan": True},
    "Gemma4Images": {},
    "PixtralImages": {"patch": 14, "merge": 2},
    "LlavaImages": {},
    "IdeficsImages": {"edge": 2048, "tile": 512, "tokens": 64},
    "Lfm2Images": {},
}
VIEWS = ("Gemma3Images", "IdeficsImages", "Lfm2Images")


@pytest.mark.parametrize("family", FAMILIES)
@given(width=st.integers(1, 6000), height=st.integers(1, 6000), low=st.booleans())
def test_any_size_has_a_plan_of_bounded_size_or_is_refused(family: str, width: int, height: int, low: bool) -> None:
    settings = settings_of(family, FAMILIES[family])
    plan: Plan | None
    try:
        plan = plan_of(settings, width, height, low=low)
    except InvalidRequest:
        plan = None
    if plan is None:
        assert max(width, height) > 40 * min(width, height)
        return
    assert min(plan.shape) > 0
    assert plan.size_bytes < 100 << 20
    assert settings.text(plan.layout).count("<image>") >= settings.least_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_low_detail_is_never_more_and_mostly_less(family: str) -> None:
    settings = settings_of(family, FAMILIES[family])
    tokens = [settings.text(plan_of(settings, 2000, 900, low=low).layout).count("<image>") for low in (False, True)]
    assert tokens[1] == tokens[0] if family == "LlavaImages" else tokens[1] < tokens[0]


@pytest.mark.parametrize(
    ("family", "width", "height"),
    [
        ("QwenImages", 1, 201),
        ("QwenImages", 2000, 1),
        ("Lfm2Images", 1, 10000),
        ("Lfm2Images", 20000, 40),
        ("LlavaImages", 1, 10000),
        ("LlavaImages", 6000, 10),
    ],
)
def test_a_thread_of_an_image_is_refused(family: str, width: int, height: int) -> None:
    with pytest.raises(InvalidRequest, match="a shape that this model can't read"):
        plan_of(settings_of(family, {}), width, height, low=family == "Lfm2Images")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "height"), [(1, 199), (4900, 25), (25, 4900)])
def test_narrow_images_have_the_pixels_of_their_plan(family: str, width: int, height: int) -> None:
    settings = settings_of(family, FAMILIES[family])
    plan = plan_of(settings, width, height)
    levels = np.empty(plan.shape, np.uint8)
    write_pixels(settings, plan, picture(width, height), levels)
    assert levels.any()


def test_a_thread_is_padded_to_no_more_pixels_than_an_image_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A square of 20,000 pixels took 1.6 GB, for an image of 138 bytes."""
    settings = settings_of("LlavaImages", {"pads": True})
    made, new = list[tuple[int, int]](), Image.new

    def noted(mode: str, size: tuple[int, int], *more: Any) -> Image.Image:
        made.append(size)
        return new(mode, size, *more)

    image, plan = new("RGB", (20_000, 1), (250, 0, 0)), plan_of(settings, 20_000, 1)
    monkeypatch.setattr(Image, "new", noted)
    levels = np.empty(plan.shape, np.uint8)
    write_pixels(settings, plan, image, levels)
    assert (8192, 8192) in made
    assert max(max(size) for size in made) == 8192
    assert np.ptp(levels) > 0, "the line is to be seen"


def test_values_without_scale_and_mean_are_those_of_the_image() -> None:
    settings = settings_of("PixtralImages", {"rescales": False, "normalizes": False, "patch": 2})
    _, pixels = pixels_of(settings, 8, 6)
    assert np.array_equal(pixels[0], np.asarray(picture(8, 6)).transpose(2, 0, 1))


def test_padding_behind_a_views_patches_is_zero() -> None:
    settings = settings_of("Lfm2Images", {"tile": 64, "min_tokens": 4, "max_tokens": 16})
    plan, pixels = pixels_of(settings, 70, 50)
    ((rows, columns),) = plan.layout.grid
    assert plan.layout == Layout(((rows, columns),), (0, 0))
    assert not pixels[0, rows * columns :].any()
    assert pixels[0, : rows * columns].any(axis=1).all()

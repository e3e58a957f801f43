"""Warm-up of models with a vision tower: what it runs, and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from tests.runner.vision.asked import Picture, VisionModel
from tests.support.shared_pixels import SharedPixels, left_over
from tests.support.tiny_vision import FAMILIES, SIDE, pixels_of
from treadle import shared_memory
from treadle.core.chunk_limits import MIN_CHUNK
from treadle.core.image import Image
from treadle.core.plan import StepPlan
from treadle.runner.device.owner_thread import OutOfMemory
from treadle.runner.forward.batch_buckets import PROMPT_SIZES, mixed_bucket
from treadle.runner.kv.backend import WarmLimits
from treadle.runner.kv.paged.warm_passes import compiled_passes, kernel_passes
from treadle.runner.loading import vision as loading
from treadle.runner.loading import warm_images
from treadle.runner.model_runner import ModelRunner

ModelOf = Callable[[str], VisionModel]


def planned(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that the runner executes from now on."""
    plans: list[StepPlan] = []
    own = runner.execute

    def execute(plan: StepPlan) -> Any:
        plans.append(plan)
        return own(plan)

    monkeypatch.setattr(runner, "execute", execute)
    return plans


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_the_warm_up_encodes_an_image_and_leaves_nothing(
    family: str, tmp_path: Path, shared: SharedPixels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = VisionModel.make(tmp_path, family, shared)
    plans = planned(model.runner, monkeypatch)
    model.runner.warm_up()
    encodes = [(one.start, one.count) for plan in plans for one in plan.encode]
    timed = {"qwen3_vl": 2, "gemma3": 1}[family]  # sizes that images have
    assert encodes == [(0, 1), (1, 4), *[(0, 5)] * (2 * timed)]
    image = next(admit.request for plan in plans for admit in plan.admit if admit.request.images).images[0]
    chunks = [chunk for plan in plans for chunk in plan.prefill if plan.admit[-1].request.images]
    hashes = {admit.request.images[0].hash for plan in plans for admit in plan.admit if admit.request.images}
    assert [chunk.count for chunk in chunks] == [image.count]
    found = model.runner.statistics()
    assert (found.features.stored, found.features.held, found.kv_bytes) == (1 + 2 * timed, 0, 0)
    with pytest.raises(FileNotFoundError), shared_memory.attach(image.shm, 1):
        pass
    asked = model.ask("a", Picture(1))
    assert asked.submit.images[0].hash not in hashes


@pytest.mark.parametrize(("seconds", "least"), [([0.4, 0.1], 6), ([0.4, 0.4], 21), ([0.4, 0.5], 21), ([0.4, 0.01], 1)])
def test_what_images_cost_is_measured_with_a_large_one_and_the_smallest(
    seconds: list[float], least: int, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes as long for small ones, so that they are no less work than they take the time of."""
    runner, times = model_of("qwen3_vl").runner, iter(seconds)
    vision = runner._model.vision
    assert vision is not None
    monkeypatch.setattr(warm_images, "_seconds", lambda *_: next(times))
    found = warm_images._measured(runner, vision, WarmLimits(8, 4096, 2048))
    large, small = (warm_images._image(vision, picture, "") for picture in vision.timed)
    assert (vision.capabilities.units(large), vision.capabilities.units(small)) == (21, 1)
    assert (found.least, found.unit_s) == (least, pytest.approx(0.4 / (21 * 5)))
    assert found.units(small) == found.least


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_where_a_large_image_does_not_fit_the_context_none_is_measured(
    family: str, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = model_of(family).runner
    vision = runner._model.vision
    assert vision is not None
    monkeypatch.setattr(warm_images, "_seconds", lambda *_: 0.1)
    assert warm_images._measured(runner, vision, WarmLimits(8, 9, 2048)) == vision.capabilities


def test_where_images_have_one_size_their_work_is_its(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = model_of("gemma3").runner
    vision = runner._model.vision
    assert vision is not None
    monkeypatch.setattr(warm_images, "_seconds", lambda *_: 0.1)
    (picture,) = vision.timed
    units = vision.capabilities.units(warm_images._image(vision, picture, ""))
    found = warm_images._measured(runner, vision, WarmLimits(8, 4096, 2048))
    assert (found.least, found.unit_s) == (0, pytest.approx(0.1 / (5 * units)))


def test_where_there_is_no_shared_memory_it_says_so(
    tmp_path: Path, shared: SharedPixels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(name: str, size: int) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    model = VisionModel.make(tmp_path, "qwen3_vl", shared)
    monkeypatch.setattr(shared_memory, "create", full)
    model.runner.warm_up()
    reason = "there is no shared memory for one (No space left on device)"
    assert caplog.messages == [f"images are not warmed up, and the first one will take longer: {reason}"]
    assert "image" in model.runner.capabilities().modalities


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("a shape"), "an image can't be encoded: a shape"),
        (OutOfMemory("unable to allocate 9 bytes"), "unable to allocate 9 bytes"),
    ],
    ids=["shape", "memory"],
)
def test_a_tower_that_fails_is_told_and_leaves_nothing(
    error: Exception,
    reason: str,
    tmp_path: Path,
    shared: SharedPixels,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Text is served all the same."""

    def fail(*args: Any) -> None:
        raise error

    model = VisionModel.make(tmp_path, "qwen3_vl", shared)
    vision = model.runner._model.vision
    assert vision is not None
    monkeypatch.setattr(vision.tower, "image", fail)
    monkeypatch.setattr(vision.tower, "count", lambda *_: 1)
    model.runner.warm_up()
    (told,) = caplog.messages
    assert told.startswith("images are not warmed up, and the first one will take longer: ")
    assert reason in told
    assert (model.runner.statistics().kv_bytes, len(model.runner._rows)) == (0, 0)
    assert not left_over()


TOKENS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe"), 16),
    **dict.fromkeys(("mistral3", "llava"), 16),
    **dict.fromkeys(("gemma3", "gemma4"), 9),
    **dict.fromkeys(("smolvlm", "idefics3"), 4),
    "pixtral": 64,
    "lfm2_vl": 16,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_usual_images_are_as_a_front_makes_them(family: str, model_of: ModelOf) -> None:
    """Arrays and grids with as many axes, and as many features as tokens stand for 64 x 64 pixels."""
    vision = model_of(family).runner._model.vision
    assert vision is not None
    config = vision.tower._model.config
    picture = vision.tower._family.picture(config, 64)
    pixels, grid, _ = pixels_of(family, 1)
    assert len(picture.shape) == pixels.ndim
    assert {len(size) for size in picture.grid} == {len(size) for size in grid}
    assert vision.tower.count(picture.shape, picture.grid) == TOKENS[family]
    on_gpu = loading._usual(vision.tower._family, config, "cuda")
    assert 1 <= len(on_gpu) <= 2
    assert all(one.patches(SIDE) <= 64 for one in vision.usual)


@pytest.mark.parametrize("most", [1, 16, 64, 96, 256, 384])
def test_chunks_with_an_image_are_warmed_up_beside_as_many_sequences_as_run(most: int) -> None:
    """With each size of a chunk, and no more than once: a start takes no longer than it has to."""
    limits = WarmLimits(most, 32768, 2048)
    text = [
        *kernel_passes(PROMPT_SIZES, 1 << 20, limits),
        *compiled_passes(PROMPT_SIZES, 16, 1 << 16, limits),
    ]
    image = Image(0, 1024, b"a", "", (1,))
    found = warm_images._image_passes(text, image, 1024, whole=False)
    sizes = [size for size in PROMPT_SIZES if MIN_CHUNK <= size <= 1024]
    rows = {0, *(mixed_bucket(count) for count in range(1, most + 1))}
    assert sorted((one.decoding, *one.chunks) for one in found) == [(of, size) for of in sorted(rows) for size in sizes]

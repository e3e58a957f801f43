from __future__ import annotations

import pytest

from treadle.core.image import Image, misplaced
from treadle.core.messages import FinishReason, Submit
from treadle.core.scheduler import Scheduler, SchedulerLimits


def image(start: int, count: int = 2, hash: bytes = b"picture") -> Image:
    return Image(start=start, count=count, hash=hash, shm="pixels", shape=(4,))


def test_images_stand_for_tokens_of_their_prompt_in_its_order() -> None:
    assert misplaced([], 1) is None
    assert misplaced([image(0), image(2), image(6)], 8) is None


@pytest.mark.parametrize(
    "images",
    [
        [image(-1)],
        [image(0, count=0)],
        [image(7)],
        [image(0), image(1)],
        [image(4), image(0)],
        [image(0), image(3, hash=b"")],
    ],
    ids=["before", "empty", "behind", "overlap", "order", "no hash"],
)
def test_an_image_elsewhere_fails_its_request(images: list[Image]) -> None:
    assert misplaced(images, 8) is images[-1]
    scheduler = Scheduler(SchedulerLimits(max_running=1, prefill_tokens=16))
    scheduler.submit(Submit(id="a", prompt=tuple(range(8)), max_tokens=1, images=tuple(images)), now=0.0)
    (output,) = scheduler.flush()
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ERROR
    assert "image" in output.finish.message

from __future__ import annotations

import msgspec
import pytest

from treadle.core.image import Image, fault_of_images, keyed


def image(start: int, count: int = 2, hash: bytes = b"picture") -> Image:
    return Image(start=start, count=count, hash=hash, shm="pixels", shape=(4,))


def test_images_stand_for_tokens_of_their_prompt_in_its_order() -> None:
    assert fault_of_images([], 1) == ""
    assert fault_of_images([image(0), image(2), image(6)], 8) == ""


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
def test_images_elsewhere_are_refused(images: list[Image]) -> None:
    assert "in its order" in fault_of_images(images, 8)


@pytest.mark.parametrize("shape", [(), (3, 0)])
def test_images_have_pixels(shape: tuple[int, ...]) -> None:
    assert "no pixels" in fault_of_images([msgspec.structs.replace(image(0), shape=shape)], 8)


def test_where_an_image_is_computed_at_once_it_has_to_fit_and_not_to_be_the_end() -> None:
    assert fault_of_images([image(0, 4)], 5, most=4) == ""
    assert "4 tokens, and a step computes 3" in fault_of_images([image(0, 4)], 5, most=3)
    assert "has to follow" in fault_of_images([image(1, 4)], 5, most=4)


def test_keys_stand_for_the_picture_and_for_the_place_in_it() -> None:
    prompt = (1, 2, 9, 9, 9, 3, 9, 9, 9, 4)
    one, other = bytes(range(32)), bytes(range(31)) + b"x"
    assert keyed(prompt, ()) is prompt
    keys = keyed(prompt, (image(2, 3, one), image(6, 3, one)))
    assert [key for key in keys if key >= 0] == [1, 2, 3, 4]
    assert keys[2:5] == keys[6:9]
    assert len(set(keys[2:5])) == 3
    assert max(keys[2:5]) < -1
    assert min(keys) >= -(2**63)
    assert keyed(prompt, (image(2, 3, b"short"),))[2] == keyed(prompt, (image(2, 3, b"short"),))[2]
    differs = [a != b for a, b in zip(image(0, 4, one).keys, image(0, 4, other).keys, strict=True)]
    assert differs == [False, False, False, True], "each key holds a part of the hash"

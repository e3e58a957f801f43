"""Features that are kept, and the columns in which they stand."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle.core.image import Image, VisionCapabilities
from treadle.runner.forward.positions import SequencePositions
from treadle.runner.forward.segments import KvSequence, RowSegment
from treadle.runner.image_support import up_to_images
from treadle.runner.mlxvlm import Encoded
from treadle.runner.mlxvlm.levels import values_of
from treadle.runner.vision.features import FeatureStore
from treadle.runner.vision.model import Vision
from treadle.runner.vision.positions import axes_positions, last_visible
from treadle.runner.vision.row_images import KeyedTokens, RowImages

TOKEN = 99


def encoded(rows: int, first: float = 0.0, deepstack: int = 0) -> Encoded:
    made = mx.arange(first, first + rows, dtype=mx.float32)[:, None]
    return Encoded(made, tuple(made + 100 * (i + 1) for i in range(deepstack)))


def image(start: int, count: int, hash: bytes = b"cat", grid: tuple[int, ...] = (1, 4, 6)) -> Image:
    return Image(start=start, count=count, hash=hash, shm="pixels", shape=(24, 3), grid=(grid,))


# What is kept -----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_features_go_first() -> None:
    store = FeatureStore(budget=3 * 4 * 4)
    for name in (b"a", b"b", b"c"):
        store.put(name, encoded(4))
    assert store.get(b"a") is not None
    store.put(b"d", encoded(4))
    assert [name in store for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    statistics = store.statistics()
    assert (statistics.stored, statistics.evicted, statistics.held, statistics.held_bytes) == (4, 1, 3, 48)


def test_needed_features_stay_whatever_they_take() -> None:
    store = FeatureStore(budget=16)
    store.need(b"a")
    store.need(b"a")
    store.put(b"a", encoded(4, deepstack=1))
    store.put(b"b", encoded(4))
    assert b"a" in store
    assert b"b" not in store
    assert store.statistics().needed_bytes == 32
    store.spare([b"a"])
    assert b"a" in store
    store.clear()
    assert b"a" in store, "another sequence needs it"
    store.spare([b"a"])
    assert b"a" not in store
    assert store.statistics().held_bytes == 0


def test_features_that_come_again_are_counted_once() -> None:
    store = FeatureStore(budget=1000)
    store.put(b"a", encoded(4))
    store.put(b"a", encoded(8))
    assert store.statistics().held_bytes == 32
    store.drop(b"a")
    store.drop(b"a")
    assert store.get(b"a") is None
    assert store.statistics().held_bytes == 0
    store.put(b"b", encoded(1))
    store.clear()
    assert b"b" not in store


class Unwalked(dict[bytes, Encoded]):
    """A dictionary for single keys alone."""

    def __iter__(self) -> Any:
        raise AssertionError("walked over all that is kept")

    items = keys = values = __iter__


def test_one_image_costs_nothing_for_all_others_that_are_kept() -> None:
    """Thousands of small ones are, and statistics are made for each step."""
    store = FeatureStore(budget=64)
    store._kept = Unwalked()
    for name in (b"a", b"b", b"c"):
        store.need(name)
        store.put(name, encoded(4))
    store.spare([b"a"])
    assert (store.statistics().held_bytes, store.statistics().needed_bytes) == (48, 32)
    store.need(b"a")
    assert store.statistics().needed_bytes == 48
    store.spare([b"a", b"b"])
    store.put(b"d", encoded(8))
    assert [name in store for name in (b"a", b"b", b"c", b"d")] == [False, True, True, True]
    store.drop(b"c")
    store.clear()
    assert (store.statistics().held_bytes, store.statistics().needed_bytes) == (0, 0)


# Where they stand -------------------------------------------------------------------------------------------------


def test_positions_of_an_image_count_its_rows_and_columns() -> None:
    positions = axes_positions(13, [image(2, 6)], merge=2)
    assert positions[:2].tolist() == [[0] * 3, [1] * 3]
    assert positions[2:8].tolist() == [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    assert positions[8:].tolist() == [[i] * 3 for i in range(5, 10)]
    two = axes_positions(14, [image(0, 6), image(7, 6, grid=(1, 6, 4))], merge=2)
    assert two[6].tolist() == [3] * 3
    assert two[13].tolist() == [7] * 3


def test_tokens_of_an_image_see_the_end_of_their_run() -> None:
    made = last_visible(12, [np.array([2, 3, 4, 6, 7], np.int32), np.array([9], np.int32)])
    assert made.tolist() == [0, 1, 4, 4, 4, 5, 7, 7, 8, 9, 10, 11]


def vision(merge: int = 0, *, whole: bool = False, pads: bool = False) -> Vision:
    return Vision(None, TOKEN, VisionCapabilities(layers=1, whole=whole), 1000, merge, pads)


PROMPT = (1, 2, TOKEN, TOKEN, TOKEN, 3, TOKEN, TOKEN, TOKEN, 4, TOKEN, 5)
IMAGES = (image(2, 7), image(10, 1, b"dog"))
"""The first has a mark between its rows."""


def segment(start: int, end: int) -> RowSegment:
    tokens = (*PROMPT, 6, 7, 8)
    return RowSegment(KvSequence("a", "", tokens), tokens[start:end], start)


def stored(deepstack: int = 0) -> FeatureStore:
    store = FeatureStore(10_000)
    store.put(b"cat", encoded(6, 0, deepstack))
    store.put(b"dog", encoded(1, 50, deepstack))
    return store


def test_features_stand_at_the_placeholders_of_a_chunk() -> None:
    images = RowImages(vision(), PROMPT, IMAGES)
    made = images.columns(segment(3, 11), stored(deepstack=2))
    assert made.features is not None
    assert made.features.places.tolist() == [0, 1, 3, 4, 5, 7]
    assert made.features.rows[:, 0].tolist() == [1, 2, 3, 4, 5, 50]
    assert [level[:, 0].tolist()[0] for level in made.features.deepstack] == [101, 201]
    assert made.positions is None
    assert made.last_visible is None
    assert list(made.tokens) == list(segment(3, 11).tokens)
    one = images.columns(segment(6, 8), stored()).features
    assert one is not None
    assert one.rows[:, 0].tolist() == [3, 4]
    assert images.columns(segment(9, 10), stored()).features is None
    assert images.columns(segment(11, 12), stored()).features is None


def test_what_a_token_sees_and_what_it_is_to_the_model() -> None:
    images = RowImages(vision(whole=True, pads=True), PROMPT, IMAGES)
    made = images.columns(segment(0, 14), stored())
    assert made.last_visible.tolist() == [0, 1, 4, 4, 4, 5, 8, 8, 8, 9, 10, 11, 12, 13]
    assert list(made.tokens) == [1, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 5, 6, 7]
    assert images.columns(segment(13, 14), stored()).last_visible is None


def test_positions_of_the_prompt_are_known_beforehand() -> None:
    assert RowImages(vision(), PROMPT, IMAGES).positions is None
    images = RowImages(vision(merge=2), (1, 2, *[TOKEN] * 6, 3), (image(2, 6),))
    assert images.positions is not None
    known = SequencePositions(images.positions)
    assert known.of(7, 3).tolist() == [[2, 3, 4], [5] * 3, [6] * 3]


def test_features_have_to_be_as_many_as_their_places() -> None:
    images = RowImages(vision(), PROMPT, (image(2, 6),))
    with pytest.raises(ValueError, match="5 tokens stand for an image of 6 features"):
        images.columns(segment(0, 8), stored())


def test_images_are_left_until_their_last_token_is_computed() -> None:
    images = RowImages(vision(), PROMPT, IMAGES)
    store = FeatureStore(1000)
    assert images.lacks(0, 3, store)
    assert not images.lacks(0, 2, store)
    assert list(images.passed(8)) == []
    assert list(images.passed(9)) == [b"cat"]
    assert not images.lacks(0, 9, store)
    assert images.lacks(0, 11, store)
    assert list(images.passed(20)) == [b"dog"]


# What stands for them ---------------------------------------------------------------------------------------------


def test_keys_take_the_place_of_an_image_s_tokens() -> None:
    tokens = list(PROMPT)
    keyed = KeyedTokens(tokens, [(one.start, one.end, one.keys) for one in IMAGES])
    assert len(keyed) == 12
    assert keyed[:3] == [1, 2, IMAGES[0].keys[0]]
    assert keyed[4:11] == [*IMAGES[0].keys[2:], 4, *IMAGES[1].keys]
    assert (keyed[0], keyed[10], keyed[-1], keyed[-2]) == (1, IMAGES[1].keys[0], 5, IMAGES[1].keys[0])
    tokens.append(6)
    assert keyed[-2:] == [5, 6]
    assert list(up_to_images(keyed[:5])) == [1, 2]
    assert list(up_to_images([1, 2])) == [1, 2]


def test_values_of_levels_are_those_of_the_table() -> None:
    """Bit for bit, wherever a family's array has the channel; padding behind a view's patches is 0."""
    chance = np.random.default_rng(0)
    table = chance.standard_normal((3, 256), np.float32)
    given, wide = mx.array(table), mx.array(table).astype(mx.bfloat16)
    pixels = chance.integers(0, 256, (2, 3, 4, 5), np.uint8)
    expected = np.stack([table[channel][pixels[:, channel]] for channel in range(3)], axis=1)
    assert np.array_equal(values_of(mx.array(pixels), given, ()), expected)
    rounded = values_of(mx.array(pixels), wide, ())
    assert mx.array_equal(rounded, mx.array(expected).astype(mx.bfloat16))
    patches = pixels.reshape(2, 60)
    assert np.array_equal(values_of(mx.array(patches), given, ((1, 1, 2),)), expected.reshape(2, 60))
    views = pixels.transpose(0, 2, 3, 1).reshape(2, 4, 15)
    behind = expected.transpose(0, 2, 3, 1).reshape(2, 4, 15).copy()
    behind[0, 2:], behind[1, 3:] = 0.0, 0.0
    assert np.array_equal(values_of(mx.array(views), given, ((1, 2), (3, 1))), behind)

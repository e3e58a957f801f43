"""Passes come in few sizes, none of them much larger than what is computed."""

from __future__ import annotations

import pytest

from treadle.runner.forward.batch_buckets import (
    LONGEST,
    PROMPT_SIZES,
    decode_bucket,
    head_bucket,
    mixed_bucket,
    prompt_bucket,
)


def test_rows_come_in_two_sizes_for_each_that_doubles() -> None:
    sizes = sorted({decode_bucket(count) for count in range(1, 257)})
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]


@pytest.mark.parametrize("count", [*range(1, 300), 511, 512, 513, 2048, 10_000])
def test_a_size_holds_what_it_is_for_and_little_else(count: int) -> None:
    assert count <= decode_bucket(count) <= max(3, 1.5 * count)
    assert decode_bucket(decode_bucket(count)) == decode_bucket(count)
    assert count <= prompt_bucket(count) <= max(count + 31, 1.25 * count)
    assert prompt_bucket(prompt_bucket(count)) == prompt_bucket(count)
    assert count <= mixed_bucket(count) <= count + 63
    assert mixed_bucket(mixed_bucket(count)) == mixed_bucket(count)


def test_rows_beside_prompts_come_in_fewer() -> None:
    assert [mixed_bucket(count) for count in (0, 4, 5, 16, 17, 33, 64, 65)] == [4, 4, 16, 16, 32, 64, 64, 128]


def test_what_the_head_sees_depends_on_who_decodes() -> None:
    """Not on how many prompts there are, or end, while they are few."""
    assert {head_bucket(3, pieces, wanted) for pieces in range(4, 17) for wanted in range(3, pieces + 1)} == {16}
    assert [head_bucket(16, 17, 17), head_bucket(16, 28, 28), head_bucket(64, 65, 65)] == [28, 28, 76]
    assert [head_bucket(4, 17, 4), head_bucket(2, 3, 512), head_bucket(2, 3, 513)] == [32, 512, 640]


def test_prompts_come_in_these() -> None:
    assert PROMPT_SIZES[:11] == (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
    assert PROMPT_SIZES[-2:] == (LONGEST - 128, LONGEST)

"""Passes come in few sizes, none of them much larger than what is computed."""

from __future__ import annotations

import pytest

from treadle.runner.sizes import LONGEST, beside_size, prompt_size, prompt_sizes, rows_size


def test_rows_come_in_two_sizes_for_each_that_doubles() -> None:
    sizes = sorted({rows_size(count) for count in range(1, 257)})
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]


@pytest.mark.parametrize("count", [*range(1, 300), 511, 512, 513, 2048, 10_000])
def test_a_size_holds_what_it_is_for_and_little_else(count: int) -> None:
    assert count <= rows_size(count) <= max(3, 1.5 * count)
    assert rows_size(rows_size(count)) == rows_size(count)
    assert count <= prompt_size(count) <= max(32, count + 31, 1.25 * count)
    assert prompt_size(prompt_size(count)) == prompt_size(count)


def test_rows_beside_prompts_come_in_fewer() -> None:
    assert [beside_size(count) for count in (1, 4, 5, 16, 17, 64, 65)] == [4, 4, 16, 16, 64, 64, 256]


def test_prompts_come_in_these() -> None:
    assert prompt_sizes(700) == (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640)
    assert prompt_sizes(31) == ()
    assert prompt_sizes(1 << 20)[-1] == LONGEST

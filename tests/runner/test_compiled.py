"""What was compiled is kept for the shapes that are used, and for no more of them than fit."""

from __future__ import annotations

from collections.abc import Callable

from treadle.runner.forward.compiled import CompiledPasses


class Made:
    """Makes functions that say what they were made for, and counts."""

    def __init__(self) -> None:
        self.shapes: list[int] = []

    def __call__(self, shapes: int) -> Callable[[], Callable[[], int]]:
        def make() -> Callable[[], int]:
            self.shapes.append(shapes)
            return lambda: shapes

        return make


def test_a_program_is_made_once() -> None:
    made, programs = Made(), CompiledPasses(3)
    assert [programs.get(n, made(n))() for n in (1, 2, 1, 3, 2, 1)] == [1, 2, 1, 3, 2, 1]
    assert made.shapes == [1, 2, 3]


def test_the_one_that_was_not_used_for_longest_goes() -> None:
    made, programs = Made(), CompiledPasses(3)
    for n in (1, 2, 3, 1, 4, 1, 3, 2):
        programs.get(n, made(n))
    assert made.shapes == [1, 2, 3, 4, 2]
    assert len(programs) == 3


def test_none_is_left_after_clearing() -> None:
    made, programs = Made(), CompiledPasses()
    programs.get(1, made(1))
    programs.clear()
    assert len(programs) == 0
    programs.get(1, made(1))
    assert made.shapes == [1, 1]

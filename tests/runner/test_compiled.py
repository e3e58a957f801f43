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


def summed(called: list[int]) -> Callable[[], Callable[..., list[int]]]:
    """Make a program that counts its calls."""

    def program(one: Number, more: list[Number | None]) -> list[int]:
        called.append(one.value)
        return [one.value + sum(other.value for other in more if other is not None)]

    return lambda: program


class Number:
    """An input, which is equal to any other."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def noting() -> CompiledPasses:
    programs = CompiledPasses()
    programs.note(True)
    return programs


def test_a_call_takes_what_was_made_ahead_of_its_inputs() -> None:
    called: list[int] = []
    programs, one, two, last = noting(), Number(1), Number(2), Number(4)
    assert programs.call("shape", summed(called), one, [two, None]) == [3]
    programs.prepare({id(two): last})
    assert called == [1, 1]
    assert programs.call("shape", summed(called), one, [last, None]) == [5]
    assert called == [1, 1]
    assert programs.call("shape", summed(called), one, [last, None]) == [5]
    assert called == [1, 1, 1], "once"


def test_a_call_of_other_inputs_or_shapes_is_its_own() -> None:
    called: list[int] = []
    programs, one, two = noting(), Number(1), Number(2)
    for shape, inputs in (("shape", (one, [Number(2)])), ("other", (one, [two])), ("third", (two, [two, None]))):
        programs.call("shape", summed(called), one, [two])
        programs.prepare({id(one): one})
        before = len(called)
        programs.call(shape, summed(called), *inputs)
        assert len(called) == before + 1
        programs.call("shape", summed(called), one, [two])
        assert len(called) == before + 2, "what was made ahead is for the next call alone"


def test_calls_that_are_not_noted_leave_the_noted_one() -> None:
    called: list[int] = []
    programs, one, two = noting(), Number(1), Number(2)
    programs.call("shape", summed(called), one, [])
    programs.note(False)
    programs.call("other", summed(called), two, [])
    for _ in range(2):
        programs.prepare({id(one): two})
        assert called.pop() == 2
        assert programs.call("shape", summed(called), two, []) == [2]
        assert called == [1, 2]


def test_nothing_is_made_ahead_of_no_call_or_for_no_inputs() -> None:
    called: list[int] = []
    programs, one = noting(), Number(1)
    programs.prepare({id(one): one})
    programs.call("shape", summed(called), one, [])
    programs.prepare({})
    assert called == [1]
    programs.clear()
    programs.prepare({id(one): one})
    assert called == [1]

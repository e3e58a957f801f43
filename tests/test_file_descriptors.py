"""Descriptors in reserve: there when all others are taken, and there again afterwards."""

from __future__ import annotations

import errno
import os

import pytest

from treadle.file_descriptors import DescriptorReserve

OPEN = os.open


def opened(spare: DescriptorReserve) -> list[int]:
    return list(spare._held)


def test_they_are_lent_for_a_while() -> None:
    spare = DescriptorReserve(3)
    held = opened(spare)
    assert len(spare) == 3
    with spare.released():
        assert len(spare) == 0
        for descriptor in held:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(descriptor)
    assert len(spare) == 3
    spare.close()
    assert len(spare) == 0


def test_those_that_cannot_be_had_again_are_tried_for_at_the_next_end(monkeypatch: pytest.MonkeyPatch) -> None:
    spare, left = DescriptorReserve(4), 1

    def scarce(*args: object) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.EMFILE, "too many")
        left -= 1
        return OPEN(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(os, "open", scarce)
    with spare.released():
        pass
    assert len(spare) == 1
    left = 100
    with pytest.raises(ValueError, match="the work failed"), spare.released():
        raise ValueError("the work failed")
    assert len(spare) == 4
    spare.close()


def test_children_do_not_inherit_them() -> None:
    spare = DescriptorReserve(1)
    assert not os.get_inheritable(opened(spare)[0])
    spare.close()

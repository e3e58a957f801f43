"""The limit of open files: raised as far as the system lets us, and what it leaves for connections."""

from __future__ import annotations

import resource

import pytest

from treadle.cli.files import ENOUGH, MODEST, RESERVED, most_connections, raise_open_files

NO_LIMIT = resource.RLIM_INFINITY


class System:
    """A system that takes no limit over `most`."""

    def __init__(self, soft: int, hard: int, most: int) -> None:
        self.limits = (soft, hard)
        self.most = most

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.limits

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        if limits[0] > self.most:
            raise ValueError("over the maximum")
        self.limits = limits


@pytest.mark.parametrize(
    ("soft", "hard", "most", "after"),
    [
        (256, 4096, 4096, 4096),
        (1024, 1048576, 1048576, ENOUGH),
        (256, NO_LIMIT, MODEST, MODEST),
        (256, NO_LIMIT, 300, 256),
        (200_000, 200_000, 200_000, 200_000),
        (NO_LIMIT, NO_LIMIT, ENOUGH, ENOUGH),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(
    soft: int, hard: int, most: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(soft, hard, most)
    monkeypatch.setattr(resource, "getrlimit", system.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", system.setrlimit)
    assert raise_open_files() == after
    assert system.limits[1] == hard
    assert soft == NO_LIMIT or system.limits[0] == after


def test_connections_leave_files_for_the_engine() -> None:
    assert most_connections(1024) == 1024 - RESERVED
    assert most_connections(80) == 40

"""The limit of open files: raised as far as the system lets us, and what it leaves for connections."""

from __future__ import annotations

import resource

import pytest

from treadle.cli.files import (
    MACHINE_CONNECTIONS,
    MACOS_FILES,
    MAX_GRPC_CONNECTIONS,
    RESERVED_FILES,
    TARGET_FILES,
    connection_limits,
    raise_open_files,
)
from treadle.fronts.connections import ConnectionLimits

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
        (1024, 1048576, 1048576, TARGET_FILES),
        (256, NO_LIMIT, MACOS_FILES, MACOS_FILES),
        (256, NO_LIMIT, 300, 256),
        (200_000, 200_000, 200_000, 200_000),
        (NO_LIMIT, NO_LIMIT, TARGET_FILES, TARGET_FILES),
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
    assert connection_limits(1024, grpc=False, slots=32) == ConnectionLimits(1024 - RESERVED_FILES, 320)
    assert connection_limits(80, grpc=False, slots=32).http == 40


def test_grpc_gets_a_quarter_up_to_a_bound() -> None:
    limits = connection_limits(512, grpc=True, slots=32)
    assert (limits.http, limits.grpc) == (288, 96)
    assert connection_limits(65536, grpc=True, slots=32).grpc == MAX_GRPC_CONNECTIONS


@pytest.mark.parametrize(
    ("open_files", "slots", "share"),
    [
        (65536, 32, (65536 - RESERVED_FILES) // 4),
        (1024, 32, MACHINE_CONNECTIONS),
        (1024, 512, 640),
        (300, 32, 129),
        (4, 1, 1),
    ],
)
def test_one_address_gets_what_a_machine_needs_or_a_quarter_but_not_all(
    open_files: int, slots: int, share: int
) -> None:
    limits = connection_limits(open_files, grpc=False, slots=slots)
    assert limits.http_per_peer == share
    assert limits.http is not None
    assert share < limits.http or limits.http < 4

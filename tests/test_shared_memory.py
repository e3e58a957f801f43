"""Named shared memory: written by one process and read by others, with one owner of the names."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle import shared_memory as shm


@pytest.fixture
def name() -> Iterator[str]:
    name = shm.name_of(os.getpid(), 7)
    yield name
    shm.unlink(name)


def test_another_process_reads_what_was_written(name: str) -> None:
    with shm.create(name, 5) as view:
        view[:] = b"hello"
    code = f"from treadle.shared_memory import attach\nwith attach({name!r}, 5) as v: print(bytes(v).decode())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "hello\n"


def test_readers_write_nothing(name: str) -> None:
    with shm.create(name, 4):
        pass
    with shm.attach(name, 4) as view, pytest.raises(TypeError):
        view[0] = 1


def test_a_name_is_given_once_and_removed_any_number_of_times(name: str) -> None:
    with shm.create(name, 4), pytest.raises(FileExistsError), shm.create(name, 4):
        pass
    shm.unlink(name)
    shm.unlink(name)
    with pytest.raises(FileNotFoundError), shm.attach(name, 4):
        pass


def test_nothing_is_left_where_it_was_not_written_to_the_end(name: str) -> None:
    with pytest.raises(RuntimeError), shm.create(name, 4):
        raise RuntimeError
    with pytest.raises(FileNotFoundError), shm.attach(name, 4):
        pass


def test_more_than_the_machine_has_is_an_error_not_a_signal(name: str) -> None:
    with pytest.raises(OSError, match=r"."), shm.create(name, 1 << 50):
        pass


def test_a_reader_that_expects_more_is_refused(name: str) -> None:
    with shm.create(name, 4):
        pass
    with pytest.raises(ValueError, match=r"."), shm.attach(name, 1 << 20):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the objects")
def test_other_users_cannot_read_it(name: str) -> None:
    with shm.create(name, 4):
        pass
    assert stat.S_IMODE((shm.FOLDER / name[1:]).stat().st_mode) == 0o600


def test_what_killed_servers_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, other = shm.name_of(ended.pid, 1), shm.name_of(1, 1)
    for given in (left, name):
        with shm.create(given, 4):
            pass
    listed = [entry.removeprefix("/") for entry in (left, name, other)] + ["treadle-1", "sem.mp-x"]
    for entry in listed:
        (tmp_path / entry).touch()
    monkeypatch.setattr(shm, "FOLDER", tmp_path)
    assert shm.remove_left_over() == 1
    with pytest.raises(FileNotFoundError), shm.attach(left, 4):
        pass
    with shm.attach(name, 4):
        pass


def test_no_folder_of_objects_is_nothing_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "FOLDER", tmp_path / "none")
    assert shm.remove_left_over() == 0

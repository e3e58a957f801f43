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
from treadle.file_locks import try_lock


@pytest.fixture
def name() -> Iterator[str]:
    owner = shm.Owner()
    name = owner.new_name()
    yield name
    shm.unlink(name)
    owner.close()


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


def test_an_error_while_views_of_the_memory_are_held_stays_what_it_is(name: str) -> None:
    def write(part: memoryview) -> None:
        raise MemoryError

    with pytest.raises(MemoryError), shm.create(name, 4) as view:
        write(view[:2])
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


def test_names_are_short_enough_for_macos_and_never_the_same() -> None:
    """Two engines of a program have owners of their own."""
    owners = [shm.Owner(), shm.Owner()]
    names = [owner.new_name() for owner in owners for _ in range(100)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 31
    for owner in owners:
        owner.close()
        owner.close()


class Owners:
    """Processes that own shared memory, as servers do."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._started: list[subprocess.Popen[str]] = []

    def start(self, end: str = "") -> subprocess.Popen[str]:
        """Start one that creates an object, and runs `end` when its input is closed."""
        code = "import os, signal, sys\nfrom treadle import shared_memory as shm\n"
        code += "owner = shm.Owner()\nname = owner.new_name()\n"
        code += f"with shm.create(name, 4): pass\nprint(name, flush=True)\nsys.stdin.read()\n{end}"
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
        self._started.append(process)
        assert process.stdout is not None
        self.names.append(process.stdout.readline().strip())
        return process

    @property
    def marks(self) -> list[str]:
        return [name.rpartition("-")[0] for name in self.names]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        for name in (*self.names, *self.marks):
            shm.unlink(name)


@pytest.fixture
def others(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owners]:
    """Nothing but their objects and the one of this name are listed: those of other tests are left alone."""
    owners, listed = Owners(), shm._listed

    def of_this_test() -> list[str]:
        marks = [mark.removeprefix("/") for mark in (name.rpartition("-")[0], *owners.marks)]
        return [entry for entry in listed() if any(entry == mark or entry.startswith(f"{mark}-") for mark in marks)]

    monkeypatch.setattr(shm, "_listed", of_this_test)
    yield owners
    owners.end()


def is_there(name: str) -> bool:
    try:
        with shm.attach(name, 0):
            return True
    except FileNotFoundError:
        return False
    except ValueError:  # a mark is empty
        return True


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the objects")
def test_what_killed_owners_left_is_removed_and_nothing_of_the_living(name: str, others: Owners) -> None:
    """A container that starts again has the process ids of the killed one, and two containers may share the memory."""
    with shm.create(name, 4):
        pass
    dead, _ = others.start(KILLED), others.start()
    left, alive = others.names
    assert shm.remove_left_over() == 0
    dead.communicate()
    assert shm.remove_left_over() == 1
    assert [is_there(one) for one in (left, others.marks[0], alive, name)] == [False, False, True, True]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the objects")
def test_an_owner_that_is_closed_leaves_no_mark(others: Owners) -> None:
    others.start("shm.unlink(name); owner.close()").communicate()
    assert not is_there(others.marks[0])
    assert shm.remove_left_over() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the objects")
def test_a_mark_that_was_taken_for_a_dead_owners_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its creation and its lock. Nor is one that another owner has."""
    first = shm.Owner()
    taken, removed, free = first.new_name().rpartition("-")[0][-6:], "0" * 6, "1" * 6
    tokens, lock = iter([taken, removed, free]), try_lock

    def too_late(handle: int) -> bool:
        shm.unlink(f"{shm.PREFIX}{os.getpid():x}.{removed}")
        return lock(handle)

    monkeypatch.setattr("secrets.token_hex", lambda count: next(tokens))
    monkeypatch.setattr(shm, "try_lock", too_late)
    second = shm.Owner()
    assert second.new_name().endswith(f".{free}-1")
    first.close()
    second.close()


def test_no_folder_of_objects_is_nothing_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "FOLDER", tmp_path / "none")
    assert shm.remove_left_over() == 0

"""The cache of compiled kernels on disk: whole files alone, in a folder of this user alone, within its limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from treadle.runner.device.cubin_cache import CacheUnusable, CubinCache

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def kept(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "cache" / "treadle" / "kernels")


def file_of(kept: CubinCache, key: str = KEY) -> Path:
    return kept.folder / f"{key}.cubin"


def test_what_one_process_keeps_another_finds(kept: CubinCache) -> None:
    assert kept.get(KEY) is None
    kept.put(KEY, b"machine code")
    assert CubinCache(kept.folder).get(KEY) == b"machine code"
    assert kept.get(OTHER) is None
    assert [path.name for path in kept.folder.iterdir()] == [f"{KEY}.cubin"]


def test_the_folder_and_its_files_are_closed_to_others(kept: CubinCache) -> None:
    old = os.umask(0)
    try:
        kept.put(KEY, b"machine code")
    finally:
        os.umask(old)
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(kept).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:20],
        lambda whole: b"",
        lambda whole: whole[:-1] + b"!",
        lambda whole: b"\x7fELF" + whole[4:],
    ],
    ids=["torn", "torn in its head", "empty", "changed", "of another kind"],
)
def test_a_damaged_file_is_no_hit_and_is_replaced(damage: Any, kept: CubinCache) -> None:
    kept.put(KEY, b"machine code")
    file_of(kept).write_bytes(damage(file_of(kept).read_bytes()))
    assert kept.get(KEY) is None
    kept.put(KEY, b"machine code")
    assert kept.get(KEY) == b"machine code"


def test_a_file_under_another_name_is_no_hit(kept: CubinCache) -> None:
    kept.put(KEY, b"machine code")
    file_of(kept).rename(file_of(kept, OTHER))
    assert kept.get(OTHER) is None


def test_a_link_or_a_pipe_is_no_hit(kept: CubinCache, tmp_path: Path) -> None:
    kept.put(KEY, b"machine code")
    file_of(kept).rename(tmp_path / "elsewhere")
    os.mkfifo(file_of(kept, OTHER))
    assert kept.get(OTHER) is None
    file_of(kept).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheUnusable):
        kept.get(KEY)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused(mode: int, kept: CubinCache) -> None:
    kept.put(KEY, b"machine code")
    kept.folder.chmod(mode)
    with pytest.raises(CacheUnusable, match="can be written by other users"):
        kept.get(KEY)
    with pytest.raises(CacheUnusable, match="can be written by other users"):
        kept.put(OTHER, b"more")
    kept.folder.chmod(0o755)
    assert kept.get(KEY) == b"machine code"


def test_a_folder_and_files_of_another_user_are_refused(kept: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.put(KEY, b"machine code")
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    with pytest.raises(CacheUnusable, match="belongs to another user"):
        kept.get(KEY)
    asked = iter([mine, mine + 1])  # of the folder, of the file
    monkeypatch.setattr("os.geteuid", lambda: next(asked))
    assert kept.get(KEY) is None


def test_a_place_that_can_not_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheUnusable, match="file/kernels: Not a directory"):
        CubinCache(tmp_path / "file" / "kernels").get(KEY)


def test_a_full_disk_leaves_no_part_behind(kept: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    with pytest.raises(CacheUnusable, match="No space left on device"):
        kept.put(KEY, b"machine code")
    assert list(kept.folder.iterdir()) == []


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    kept = CubinCache(tmp_path / "kernels", most_bytes=3 * 1100)
    for used, key in enumerate("abc"):
        kept.put(key, bytes(1000))
        os.utime(kept.folder / f"{key}.cubin", (used, used))
    assert kept.get("a") == bytes(1000)
    kept.put("d", bytes(1000))
    assert {path.stem for path in kept.folder.iterdir()} == {"a", "c", "d"}


def test_parts_of_killed_processes_go_and_young_ones_stay(kept: CubinCache) -> None:
    kept.put(KEY, b"machine code")
    for name, used in ((".old.1", 1.0), (".young.2", None), ("note", 1.0)):
        (kept.folder / name).write_text("")
        if used:
            os.utime(kept.folder / name, (used, used))
    kept.put(OTHER, b"more")
    assert {path.name for path in kept.folder.iterdir()} == {
        *(".young.2", "note"),
        *(f"{key}.cubin" for key in (KEY, OTHER)),
    }

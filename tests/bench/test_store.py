"""The result file: whole or not at all, and read back only if it is ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treadle.bench.errors import BenchError
from treadle.bench.store import check_writable, load, save, write_text

from .results import burst


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "result.json"
    save(burst(a=[0.1, 0.2], b=0.3), path)
    assert load(path) == burst(a=[0.1, 0.2], b=0.3)
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_torn_file_is_told_from_a_foreign_one(tmp_path: Path, part: float) -> None:
    path = tmp_path / "torn.json"
    save(burst(a=0.1), path)
    whole = path.read_bytes().rstrip()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(BenchError, match=r"torn\.json is not whole JSON .*: copy it again, or run"):
        load(path)


@pytest.mark.parametrize(
    "data",
    [b"[]", b"{}", b'{"format": 1}', b'{"format": "1"}', b"null", b'{"format":1,"started":7}', b"[" * 100_000],
    ids=["list", "empty", "no more than a format", "text for format", "null", "wrong type", "deep"],
)
def test_other_json_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(data)
    with pytest.raises(BenchError, match=r"other\.json is not .*: "):
        load(path)


def test_another_format_is_named(tmp_path: Path) -> None:
    """Also where nothing else of it can be read any more."""
    path = tmp_path / "next.json"
    path.write_bytes(b'{"format": 2, "targets": "elsewhere"}')
    with pytest.raises(BenchError, match="has format 2 and this Treadle reads 1"):
        load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.json"
    path.write_bytes(b'{"format": 1, "started": "\xff\xfe"}')
    with pytest.raises(BenchError, match=r"binary\.json is not"):
        load(path)


def test_no_file_and_a_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"there is no .*none\.json: name a file"):
        load(tmp_path / "none.json")
    with pytest.raises(BenchError, match=r"can't be read .*directory.*: name a file"):
        load(tmp_path)


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BenchError, match=r"page\.html can't be written \(No space left on device\): name another file"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "page.html", "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [check_writable, lambda path: write_text(path, ""), lambda path: save(burst(), path)])
def test_a_place_that_can_t_be_written_is_told(tmp_path: Path, write: object) -> None:
    assert callable(write)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below.json"):
        with pytest.raises(BenchError, match=r"can't be written .*: name another file"):
            write(path)


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    (tmp_path / "full.json").write_text("{}")
    for name in ("empty.json", "full.json", "new.json"):
        check_writable(tmp_path / name)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty.json", "full.json"]
    assert (tmp_path / "full.json").read_text() == "{}"


def test_a_device_is_written_to_and_not_replaced() -> None:
    """As with `--json /dev/stdout` on a terminal."""
    reader, writer = os.openpty()
    device = Path(os.ttyname(writer))
    try:
        check_writable(device)
        write_text(device, "{}")
        assert os.read(reader, 2) == b"{}"
        assert device.is_char_device()
    finally:
        os.close(reader)
        os.close(writer)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to(tmp_path / "elsewhere" / "page.html")
    check_writable(link)
    write_text(link, "here")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "page.html").read_text() == "here"


def test_text_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    """A command line may hold bytes that are not UTF-8."""
    write_text(tmp_path / "page.html", "caf\udce9 ✓")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "caf? ✓"


def test_who_reads_meanwhile_has_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old and whole")
    with path.open() as reader:
        write_text(path, "new")
        assert reader.read() == "old and whole"

"""A cached folder is either whole or not there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from treadle.errors import ModelError
from treadle.models import cache


class Builder:
    """Builder that writes one file and counts its calls."""

    def __init__(self, content: bytes = b"weights") -> None:
        self.calls = 0
        self.content = content

    def __call__(self, part: Path) -> dict[str, str]:
        self.calls += 1
        (part / "data").write_bytes(self.content)
        return {}


def silent(line: str) -> None:
    pass


def build(folder: Path, builder: Builder, version: str = "1") -> Path:
    return cache.build_once(folder, version, builder, silent)


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()} - {folder.name, f"{folder.name}.lock"}


def test_it_is_built_once(tmp_path: Path) -> None:
    builder = Builder()
    for _ in range(3):
        folder = build(tmp_path / "root" / "model", builder)
    assert builder.calls == 1
    assert (folder / "data").read_bytes() == b"weights"
    assert not leftovers(folder)


def test_the_manifest_names_sizes_and_digests(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", Builder())
    manifest = json.loads((folder / cache.MANIFEST).read_text())
    assert manifest["files"]["data"] == {"bytes": 7, "sha256": cache.file_sha256(folder / "data")}
    assert cache.verify(folder) == []


def test_verify_finds_a_flipped_byte(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", Builder())
    (folder / "data").write_bytes(b"weighty")
    assert cache.is_whole(folder, "1")
    assert cache.verify(folder) == ["data"]


@pytest.mark.parametrize("damage", ["shorter", "gone", "no manifest", "torn manifest", "manifest of nothing", "older"])
def test_a_damaged_folder_is_built_again(tmp_path: Path, damage: str) -> None:
    builder = Builder()
    folder = build(tmp_path / "model", builder)
    manifest = folder / cache.MANIFEST
    if damage == "shorter":
        (folder / "data").write_bytes(b"wei")
    elif damage == "gone":
        (folder / "data").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:20])
    elif damage == "manifest of nothing":
        manifest.write_text('{"version": "1", "files": {}}')
    else:
        manifest.write_text(manifest.read_text().replace('"version": "1"', '"version": "0"'))
    build(folder, builder)
    assert builder.calls == 2
    assert (folder / "data").read_bytes() == b"weights"
    assert not leftovers(folder)


def test_a_build_that_fails_leaves_nothing_and_keeps_its_error(tmp_path: Path) -> None:
    def broken(part: Path) -> dict[str, str]:
        (part / "data").write_bytes(b"half")
        raise ZeroDivisionError

    folder = tmp_path / "model"
    with pytest.raises(ZeroDivisionError):
        cache.build_once(folder, "1", broken, silent)
    assert not folder.exists()
    assert not leftovers(folder)


def test_a_failed_rebuild_keeps_the_old_folder(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", Builder())

    def broken(part: Path) -> dict[str, str]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.build_once(folder, "2", broken, silent)
    assert cache.is_whole(folder, "1")


def test_what_a_killed_build_left_is_swept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (tmp_path / ".model-killed" / "new").mkdir(parents=True)
    build(folder, Builder())
    assert not leftovers(folder)


def test_two_at_once_build_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    inside, go_on = threading.Event(), threading.Event()
    said: list[str] = []
    waits = threading.Event()
    builder = Builder()

    def slow(part: Path) -> dict[str, str]:
        inside.set()
        assert go_on.wait(60)
        return builder(part)

    def progress(line: str) -> None:
        said.append(line)
        waits.set()

    first = threading.Thread(target=cache.build_once, args=(folder, "1", slow, silent))
    second = threading.Thread(target=cache.build_once, args=(folder, "1", builder, progress))
    first.start()
    assert inside.wait(60)
    second.start()
    assert waits.wait(60)
    go_on.set()
    first.join(60)
    second.join(60)
    assert builder.calls == 1
    assert said == ["another process is building model: waiting for it"]


def test_the_wait_for_the_lock_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def nested(part: Path) -> dict[str, str]:
        with pytest.raises(ModelError, match=r"has held .*model\.lock for 0 s"):
            cache.build_once(folder, "1", Builder(), silent, lock_s=0)
        return Builder()(part)

    cache.build_once(folder, "1", nested, silent)


def test_an_unusable_cache_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match="can't write the model cache") as caught:
        build(tmp_path / "file" / "model", Builder())
    assert "XDG_CACHE_HOME" in caught.value.message


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    def full(part: Path) -> dict[str, str]:
        raise OSError(28, "No space left on device", str(part / "model.safetensors"))

    with pytest.raises(ModelError, match="No space left on device"):
        cache.build_once(tmp_path / "model", "1", full, silent)
    assert not leftovers(tmp_path / "model")


def test_the_cache_folder_follows_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_root() == tmp_path / "treadle"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_root() == tmp_path / "home" / ".cache" / "treadle"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache.default_root() == tmp_path / "home" / "Library" / "Caches" / "treadle"


KILLED = """
import os, sys
from pathlib import Path
from treadle.models import cache

def die(part):
    (part / "data").write_bytes(b"half")
    os._exit(3)

cache.build_once(Path(sys.argv[1]), "1", die, print)
"""


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    """A builder killed in mid-build must not lock others out."""
    folder = tmp_path / "model"
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], timeout=60).returncode == 3
    assert leftovers(folder)
    builder = Builder()
    cache.build_once(folder, "1", builder, silent, lock_s=0)
    assert builder.calls == 1
    assert not leftovers(folder)

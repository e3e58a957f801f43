"""The keys of a running server follow their file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.aio import in_loop
from treadle.errors import ConfigError
from treadle.keys import Key, KeySource, digest
from treadle.keys.file import add, remove


async def aside(work: Callable[[], tuple[Key, ...] | None]) -> tuple[Key, ...] | None:
    return work()


def test_without_keys_none_are_asked_for() -> None:
    source = KeySource()
    assert (source.configured, len(source.ring)) == (False, 0)


def test_both_ways_of_giving_keys_hold_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"a")))
    source = KeySource("single", path)
    assert source.configured
    assert [key.name for key in source.ring] == ["api-key", "alice"]


def test_a_server_that_nobody_could_use_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match=f"nobody could come in: treadle keys add NAME --api-keys {path}"):
        KeySource(None, path)
    assert len(KeySource("single", path).ring) == 1
    with pytest.raises(ConfigError, match="does not exist"):
        KeySource("single", tmp_path / "none")


@in_loop
async def test_one_key_in_both_places_is_refused_so_that_its_removal_revokes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `use` in the file and with all rights as --api-key, it would get the latter when it is removed."""
    path = tmp_path / "keys.toml"
    add(path, Key("carol", digest(b"c")))
    with pytest.raises(ConfigError, match=f"`api_key` is 'carol' of {path}, .* unset it, or remove 'carol' with"):
        KeySource("c", path)
    add(path, Key("alice", digest(b"a")))
    remove(path, "carol")
    source = KeySource("c", path)
    add(path, Key("carol", digest(b"c")))
    remove(path, "alice")
    await source.reload_if_changed(aside)
    assert [key.name for key in source.ring] == ["api-key", "alice"], "the keys read before"
    (line,) = caplog.messages
    assert "until it is mended: the key of --api-key is 'carol' of" in line


@in_loop
async def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"a")))
    source = KeySource("single", path)
    ring = source.ring
    await source.reload_if_changed(aside)
    assert source.ring is ring, "nothing has changed"
    add(path, Key("bob", digest(b"b")))
    remove(path, "alice")
    await source.reload_if_changed(aside)
    assert source.ring.find(b"a") is None
    assert all(source.ring.find(key) for key in (b"b", b"single"))
    (line,) = caplog.records
    assert line.__dict__["fields"] == {"keys": 1, "added": "bob", "removed": "alice"}
    remove(path, "bob")
    await source.reload_if_changed(aside)
    assert source.ring.find(b"b") is None, "the last one is revoked too"


@in_loop
async def test_a_broken_file_changes_nothing_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"a")))
    source = KeySource(None, path)
    for text in ("[keys.", None):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        for _ in range(3):
            await source.reload_if_changed(aside)
        assert source.ring.find(b"a") is not None
    told = [record.getMessage() for record in caplog.records]
    head = "the keys file can't be used, so the keys read before stay valid until it is mended: "
    assert all(line.startswith((f"{head}the keys file {path}", f"{head}{path}")) for line in told)
    assert "does not exist" in told[1]
    add(path, Key("bob", digest(b"b")))
    await source.reload_if_changed(aside)
    assert source.ring.find(b"a") is None
    assert source.ring.find(b"b") is not None


@in_loop
async def test_what_fails_in_any_other_way_changes_nothing_and_the_file_is_read_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"a")))
    source = KeySource(None, path)
    remove(path, "alice")
    add(path, Key("bob", digest(b"b")))
    looks: list[int] = []

    async def fails_twice(work: Callable[[], tuple[Key, ...] | None]) -> tuple[Key, ...] | None:
        looks.append(1)
        if len(looks) <= 2:
            assert source.ring.find(b"a") is not None
            raise ArithmeticError("no digits left")
        return work()

    async def sleep(_: float) -> None:
        await asyncio.sleep(0)

    task = asyncio.create_task(source.watch(fails_twice, sleep))
    while source.ring.find(b"b") is None and not task.done():
        await asyncio.sleep(0)
    assert (task.done(), source.ring.find(b"a")) == (False, None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.exc_info is not None for record in errors] == [True], "told once, with its place"
    assert errors[0].getMessage().endswith(f"until it is mended: {path}: ArithmeticError: no digits left")


@in_loop
async def test_a_file_that_comes_back_as_it_was_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a line the error before would be the log's last word."""
    caplog.set_level("INFO")
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"a")))
    source = KeySource(None, path)
    path.rename(tmp_path / "away")
    await source.reload_if_changed(aside)
    (tmp_path / "away").rename(path)
    for _ in range(2):
        await source.reload_if_changed(aside)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert caplog.records[-1].getMessage() == "keys file read again"


@in_loop
async def test_it_looks_again_and_again_until_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"a")))
    source = KeySource(None, path)
    looks = asyncio.Event()

    async def sleep(_: float) -> None:
        await asyncio.sleep(0)
        add(path, Key("bob", digest(b"b"))) if not looks.is_set() else None
        looks.set()

    task = asyncio.create_task(source.watch(aside, sleep))
    await looks.wait()
    while source.ring.find(b"b") is None:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await KeySource("single").watch(aside)  # nothing to watch: returns at once

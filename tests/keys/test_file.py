"""The keys file: read, added to, taken from, and refused where it is wrong."""

from __future__ import annotations

import os
import resource
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treadle.errors import ConfigError
from treadle.keys import ALL, Key, KeyLimits, Scope, digest
from treadle.keys import file as files
from treadle.keys.file import add, parse, read, remove

A, B = digest(b"a"), digest(b"b")
ALICE = f'[keys.alice]\nsha256 = "{A.hex()}"\n'


def test_a_key_has_its_scopes_and_limits() -> None:
    text = ALICE + f'[keys.bob]\nsha256 = "{B.hex().upper()}"\nscopes = ["admin"]\nrequests_per_minute = 60\n'
    alice, bob = parse(text + "tokens_per_minute = 9000\nmax_running = 2\n", "keys.toml")
    assert alice == Key("alice", A, frozenset({Scope.USE}))
    assert bob == Key("bob", B, ALL, KeyLimits(60, 9000, 2)), "admin includes use"
    assert parse("", "keys.toml") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[keys.a", "is not valid TOML"),
        ("a = " + "[" * 10_000, "is not valid TOML"),
        ('sha256 = "00"', "holds 'sha256': it may hold tables"),
        ("keys = 1", "may hold tables"),
        ("[keys.a]", r"\[keys.a\] needs sha256, 64 hexadecimal digits: treadle keys add"),
        ('[keys.a]\nsha256 = "00"', "needs sha256"),
        ("[keys.a]\nsha256 = 7", "needs sha256"),
        ("[keys]\na = 7", "is no table"),
        (ALICE + 'key = "clear"', "unknown field 'key'; known: sha256"),
        (ALICE + 'scope = ["use"]', "unknown field 'scope'; did you mean 'scopes'"),
        (ALICE + 'scopes = ["root"]', "scopes must be a list of use and admin, not"),
        (ALICE + 'scopes = "use"', "scopes must be a list"),
        (ALICE + "scopes = []", "scopes must be a list"),
        (ALICE + "scopes = [1]", "scopes must be a list"),
        (ALICE + "max_running = 0", "max_running must be a whole number from 1"),
        (ALICE + "max_running = true", "max_running must be a whole number"),
        (ALICE + "max_running = 1.5", "max_running must be a whole number"),
        (ALICE + "requests_per_minute = -1", "requests_per_minute must be"),
        (ALICE + f'[keys.bob]\nsha256 = "{A.hex()}"', "'alice' and 'bob' are the same key"),
        ('[keys."a b"]', "'a b' can't name a key"),
        ('[keys."ü"]', "can't name a key"),
        (f"[keys.{'a' * 65}]", "can't name a key"),
        ("[keys.api-key]", "is the name of the key of --api-key"),
        (ALICE + f"max_running = {'1' * 5000}", "holds a value that can't be read, such as a number of thousands of"),
        (ALICE + f"max_running = 0x{'f' * 9000}", "from 1 to 1000000000000, not a number of thousands of digits"),
        (ALICE + f"scopes = [0x{'f' * 9000}]", "scopes must be a list of use and admin, not a number of thousands"),
    ],
)
def test_a_wrong_file_says_where_and_what(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        parse(text, "keys.toml")
    assert "\n" not in raised.value.message or "TOML" in raised.value.message


def test_a_file_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_KEYS", 1)
    with pytest.raises(ConfigError, match="holds 2 keys: 1 at most"):
        parse(ALICE + f'[keys.bob]\nsha256 = "{B.hex()}"', "keys.toml")
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    path = tmp_path / "keys.toml"
    path.write_text(ALICE)
    with pytest.raises(ConfigError, match="bytes: 10 at most"):
        read(path)


def test_a_file_that_can_t_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: make it with treadle keys add NAME"):
        read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is no file"):
        read(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="is no file"):
        read(fifo)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        read(binary)


def test_a_file_that_any_user_may_write_is_refused_and_one_that_all_may_read_is_not(tmp_path: Path) -> None:
    """It holds hashes alone; but whoever writes it makes keys."""
    path = tmp_path / "keys.toml"
    path.write_text(ALICE)
    path.chmod(0o644)
    assert len(read(path)) == 1
    path.chmod(0o646)
    with pytest.raises(ConfigError, match=f"every user of this machine, who could add a key: chmod o-w {path}"):
        read(path)


def test_keys_come_and_go_and_everything_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", A))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("# ours\n" + path.read_text())
    path.chmod(0o640)
    bob = Key("bob", B, ALL, KeyLimits(max_running=3))
    add(path, bob)
    assert read(path) == (Key("alice", A), bob)
    remove(path, "alice")
    assert read(path) == (bob,)
    assert path.read_text().startswith("# ours\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.toml"]
    remove(path, "bob")
    assert read(path) == ()


def test_what_can_t_be_added_or_removed_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", A))
    before = path.read_text()
    for key, says in (
        (Key("alice", B), "has a key named 'alice'"),
        (Key("bob", A), "are the same key"),
        (Key("-", B), "can't name a key"),
        (Key("api-key", B), "the key of --api-key"),
    ):
        with pytest.raises(ConfigError, match=says):
            add(path, key)
    with pytest.raises(ConfigError, match="no key named 'alic'; did you mean 'alice'"):
        remove(path, "alic")
    with pytest.raises(ConfigError, match=r"no key named 'zzz'$"):
        remove(path, "zzz")
    assert path.read_text() == before
    dotted = f'keys.alice.sha256 = "{A.hex()}"\n'
    path.write_text(dotted)
    with pytest.raises(ConfigError, match="take it out by hand"):
        remove(path, "alice")
    assert path.read_text() == dotted
    with pytest.raises(ConfigError, match="can't write"):
        add(path / "keys.toml", Key("alice", A))


def test_a_file_in_a_folder_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    """~/.config/treadle of a new user."""
    path = tmp_path / "config" / "treadle" / "keys.toml"
    add(path, Key("alice", A))
    assert [key.name for key in read(path)] == ["alice"]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    add(real, Key("alice", A))
    link.symlink_to(real)
    add(link, Key("bob", B))
    remove(link, "alice")
    assert link.is_symlink()
    assert [key.name for key in read(real)] == ["bob"]


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", A))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = path.read_text()
    monkeypatch.setattr(os, "fsync", full)
    for edit in (lambda: remove(path, "alice"), lambda: add(path, Key("bob", B))):
        with pytest.raises(ConfigError, match=f"can't write {path}: No space left"):
            edit()
        assert path.read_text() == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["keys.toml"]


def test_a_full_file_system_cuts_no_key_off(tmp_path: Path) -> None:
    """A limit of file sizes fails the write half-way, as a full disk does."""
    path = tmp_path / "keys.toml"
    add(path, Key("alice", A))
    before = path.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(ConfigError, match="can't write"):
            add(path, Key("bob", B))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == before


def _made_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new files seem to belong to another user than the old ones: root's, of a service's file."""
    of = os.fstat

    def fstat(handle: int) -> os.stat_result:
        found = of(handle)
        return os.stat_result((*found[:4], found.st_uid + 1, found.st_gid + 1, *found[6:]))

    monkeypatch.setattr(os, "fstat", fstat)


def test_the_file_keeps_its_owner_so_that_the_server_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo treadle keys remove` on the file of a service's user."""
    path = tmp_path / "keys.toml"
    add(path, Key("alice", A))
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda handle, user, group: given.append((user, group)))
    _made_by_another(monkeypatch)
    add(path, Key("bob", B))
    remove(path, "alice")
    assert given == [(path.stat().st_uid, path.stat().st_gid)] * 2
    assert [key.name for key in read(path)] == ["bob"]


def test_a_file_that_would_change_its_owner_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", A))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    _made_by_another(monkeypatch)
    for edit in (lambda: remove(path, "alice"), lambda: add(path, Key("bob", B))):
        with pytest.raises(ConfigError, match=f"belongs to the user {path.stat().st_uid} .* run this as that user"):
            edit()
    assert [key.name for key in read(path)] == ["alice"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.toml"]


def test_adding_writes_only_what_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    inline = f'keys = {{alice = {{sha256 = "{A.hex()}"}}}}\n'
    path.write_text(inline)
    with pytest.raises(ConfigError, match=r"not edited here: write each key as a table \[keys.NAME\]"):
        add(path, Key("bob", B))
    monkeypatch.setattr(files, "MAX_KEYS", 1)
    with pytest.raises(ConfigError, match="holds 1 keys, as many as it may: remove one first"):
        add(path, Key("bob", B))
    assert path.read_text() == inline


def test_ends_of_lines_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(b"# ours\r\n" + ALICE.replace("\n", "\r\n").encode())
    add(path, Key("bob", B))
    remove(path, "alice")
    assert path.read_bytes().startswith(b"# ours\r\n[keys.bob]\n")


def test_keys_added_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: add(path, Key(f"k{i}", digest(b"%d" % i))), range(40)))
    assert {key.name for key in read(path)} == {f"k{i}" for i in range(40)}

"""Downloads that break off in every way go on where they were, against a hub on the loopback that breaks them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from tests.support.hub import HubServer, etag_of, files_of, wait_for_partial
from tests.support.tiny import make_tiny
from treadle.errors import ModelError
from treadle.models import fetch, hub
from treadle.models.cache_paths import locks_of, repository
from treadle.models.transfer import Transfer

MODEL = "owner/tiny"
WEIGHTS = "model.safetensors"


def silent(line: object) -> None:
    pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "RETRY_DELAYS_S", (0.0,) * 3)
    monkeypatch.setattr(fetch, "SHORT_RETRY_DELAYS_S", (0.0,) * 2)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(make_tiny(tmp_path_factory.mktemp("source"), vocabulary_extra=4000))


@pytest.fixture
def server(content: dict[str, bytes]) -> Iterator[HubServer]:
    with HubServer(MODEL, content) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def download(server: HubServer, cache: Path, watch: hub.Watch = silent) -> Path:
    return hub.download(MODEL, silent, cache_dir=cache, endpoint=server.url, watch=watch)


def blobs(cache: Path) -> set[str]:
    return {path.name for path in (repository(cache, MODEL) / "blobs").iterdir()}


def partial(cache: Path, content: dict[str, bytes]) -> Path:
    folder = repository(cache, MODEL) / "blobs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{etag_of(WEIGHTS, content[WEIGHTS])}.incomplete"


def assert_whole(folder: Path, cache: Path, content: dict[str, bytes]) -> None:
    assert files_of(folder) == content
    assert blobs(cache) == {etag_of(name, data) for name, data in content.items()}


@pytest.mark.parametrize("sign", [1, -1], ids=["closed", "reset"])
def test_a_connection_that_is_cut_is_mended_without_fetching_twice(
    server: HubServer, cache: Path, content: dict[str, bytes], sign: int
) -> None:
    server.cuts = [sign * 300_000, sign * 200_000, sign * 100_000]
    folder = download(server, cache)
    assert_whole(folder, cache, content)
    assert len(server.ranges(WEIGHTS)) == 4
    if sign > 0:  # a reset may lose what was on its way
        assert server.ranges(WEIGHTS) == [None, "bytes=300000-", "bytes=500000-", "bytes=600000-"]
        assert server.sent[WEIGHTS] == len(content[WEIGHTS])


def test_a_connection_that_is_cut_again_and_again_ends_the_download_and_the_next_one_goes_on(
    server: HubServer, cache: Path, content: dict[str, bytes]
) -> None:
    server.cuts = [300_000]
    server.broken_after = 300_000
    with pytest.raises(ModelError, match=r"the hub answers 503 for owner/tiny; what was fetched is kept") as caught:
        download(server, cache)
    assert "\n" not in caught.value.message
    assert partial(cache, content).stat().st_size == 300_000
    assert len(server.ranges(WEIGHTS)) == 1 + 3
    server.broken_after = 0
    assert_whole(download(server, cache), cache, content)
    assert server.ranges(WEIGHTS)[-1] == "bytes=300000-"
    assert server.sent[WEIGHTS] == len(content[WEIGHTS])


def test_a_process_that_is_killed_leaves_what_it_had(server: HubServer, cache: Path, content: dict[str, bytes]) -> None:
    server.stall.set()
    command = [sys.executable, "-m", "treadle", "pull", MODEL]
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert server.stalled.wait(60)
        wait_for_partial(repository(cache, MODEL))
        process.kill()
        process.communicate(timeout=60)
    had = partial(cache, content).stat().st_size
    assert had > 0
    server.stall.clear()
    server.released.set()
    assert_whole(download(server, cache), cache, content)
    assert server.ranges(WEIGHTS) == [None, f"bytes={had}-"]


def test_a_server_that_knows_no_ranges_is_asked_for_everything(
    server: HubServer, cache: Path, content: dict[str, bytes]
) -> None:
    server.ignore_ranges = True
    partial(cache, content).write_bytes(content[WEIGHTS][:1000])
    assert_whole(download(server, cache), cache, content)


@pytest.mark.parametrize("damage", ["wrong", "longer", "whole but wrong"])
def test_a_partial_file_that_is_damaged_is_fetched_again(
    server: HubServer, cache: Path, content: dict[str, bytes], damage: str
) -> None:
    data = content[WEIGHTS]
    left = {"wrong": b"x" * 1000, "longer": data + b"x", "whole but wrong": b"x" * len(data)}[damage]
    partial(cache, content).write_bytes(left)
    assert_whole(download(server, cache), cache, content)


def test_a_partial_file_that_is_whole_is_not_fetched(server: HubServer, cache: Path, content: dict[str, bytes]) -> None:
    partial(cache, content).write_bytes(content[WEIGHTS])
    assert_whole(download(server, cache), cache, content)
    assert server.ranges(WEIGHTS) == []


def test_bytes_that_were_changed_on_the_way_are_never_taken(
    server: HubServer, cache: Path, content: dict[str, bytes]
) -> None:
    server.corrupt = 1
    assert_whole(download(server, cache), cache, content)
    assert server.ranges(WEIGHTS) == [None, None]


def test_a_hub_that_has_other_bytes_than_it_says_is_given_up(server: HubServer, cache: Path) -> None:
    server.corrupt = 99
    with pytest.raises(ModelError, match=r"model\.safetensors does not have the content that the hub names"):
        download(server, cache)
    assert server.ranges(WEIGHTS) == [None, None]


def test_orphans_of_the_librarys_own_downloads_are_removed(
    server: HubServer, cache: Path, content: dict[str, bytes]
) -> None:
    name = partial(cache, content).name.removesuffix(".incomplete")
    partial(cache, content).with_name(f"{name}.0123abcd.incomplete").write_bytes(b"left")
    partial(cache, content).with_name(f"{'c' * 64}.incomplete").write_bytes(b"of another revision")
    assert_whole(download(server, cache), cache, content)


def test_a_file_that_another_process_writes_is_left_alone(
    server: HubServer, cache: Path, content: dict[str, bytes]
) -> None:
    other = partial(cache, content).with_name(f"{'c' * 64}.incomplete")
    other.write_bytes(b"being written")
    locks = locks_of(cache, MODEL)
    locks.mkdir(parents=True)
    with WeakFileLock(locks / f"{'c' * 64}.lock"):
        download(server, cache)
    assert other.exists()


def test_two_downloads_at_once_fetch_every_byte_once(server: HubServer, cache: Path, content: dict[str, bytes]) -> None:
    server.rate = 2_000_000
    command = [sys.executable, "-m", "treadle", "pull", MODEL]
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache)}
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert_whole(Path(said[0][0].decode().strip()), cache, content)
    assert server.sent[WEIGHTS] == len(content[WEIGHTS])


def test_who_waits_for_another_download_shows_its_progress(
    server: HubServer, cache: Path, content: dict[str, bytes]
) -> None:
    partial(cache, content).write_bytes(content[WEIGHTS][:5000])
    locks = locks_of(cache, MODEL)
    locks.mkdir(parents=True)
    waits, done = threading.Event(), threading.Event()

    def watch(transfer: Transfer) -> None:
        if "another process" in transfer.note and transfer.done_bytes >= 5000:
            waits.set()

    def run() -> None:
        download(server, cache, watch)
        done.set()

    with WeakFileLock(locks / f"{etag_of(WEIGHTS, content[WEIGHTS])}.lock"):
        threading.Thread(target=run, daemon=True).start()
        assert waits.wait(60)
        assert not done.is_set()
    assert done.wait(60)


def test_a_busy_hub_is_asked_again_after_the_time_it_names() -> None:
    error = Exception()
    error.response = SimpleNamespace(headers={"Retry-After": "7"})  # type: ignore[attr-defined]
    assert fetch._delay_s(error, 1.0) == 7.0
    assert fetch._delay_s(Exception(), 1.0) == 1.0


def test_a_hub_that_is_busy_for_a_moment_is_asked_again(
    server: HubServer, cache: Path, content: dict[str, bytes]
) -> None:
    server.statuses = [503, 429, 500]
    assert_whole(download(server, cache), cache, content)


def test_a_token_is_not_sent_to_the_host_that_the_files_lie_on(
    server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.token = "hf_secret"
    download(server, cache)
    assert server.sent[WEIGHTS]
    assert server.leaked == ""


def test_too_little_room_is_said_before_the_first_byte(
    server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "free_bytes", lambda folder: 1000)
    with pytest.raises(ModelError, match=r"owner/tiny needs \d\.\d MiB more and 1000 B are free in .*treadle rm"):
        download(server, cache)
    assert not server.fetched()


def test_a_disk_that_fills_up_is_said_and_what_there_is_is_kept(
    server: HubServer, cache: Path, content: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(part: fetch._PartialFile, block: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch._PartialFile, "write", write)
    with pytest.raises(ModelError, match=r"the disk is full: .* are free in .*; what was fetched is kept"):
        download(server, cache)


def test_a_cache_that_can_not_be_written_is_one_line(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file")
    with pytest.raises(ModelError, match=r"can't write the hub's cache: .*set HF_HOME") as caught:
        download(server, tmp_path / "hub")
    assert "\n" not in caught.value.message


def test_a_file_that_plain_http_does_not_serve_is_left_to_the_library_at_the_default_hub(
    server: HubServer, cache: Path, content: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    monkeypatch.setattr("huggingface_hub.constants._HF_DEFAULT_ENDPOINT", server.url)
    with pytest.raises(ModelError, match="too large to be downloaded using the regular download method"):
        hub.download(MODEL, said.append, cache_dir=cache, endpoint=server.url)
    assert any("begins again when it is cut off: model.safetensors" in line for line in said)


def test_any_other_hub_gets_no_say_in_paths_for_the_largest_files_either(
    server: HubServer, cache: Path, content: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    server.late_etags = {WEIGHTS: "../../../../outside"}
    assert_whole(download(server, cache), cache, content)


@pytest.mark.parametrize("percent", [0, 100])
def test_a_cache_that_is_removed_meanwhile_is_said(server: HubServer, cache: Path, percent: int) -> None:
    def remove(transfer: Transfer) -> None:
        if transfer.percent >= percent:
            shutil.rmtree(cache, ignore_errors=True)

    with pytest.raises(ModelError, match=r"was removed meanwhile \(.*\): start the download again"):
        download(server, cache, remove)

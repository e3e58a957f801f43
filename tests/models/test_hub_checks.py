"""Hubs that send names, checksums, sizes and commits meant to harm: each is refused, and nothing leaves the cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import COMMIT, HubServer, etag_of, files_of
from tests.support.tiny import make_tiny
from treadle.cli import hub_check
from treadle.config import Settings
from treadle.errors import ModelError
from treadle.models import fetch, hub, hub_checks

MODEL = "owner/tiny"
WEIGHTS = "model.safetensors"
ETAGS: list[Any] = [
    "../../../../outside",
    "/outside",
    "A" * 40,
    "a" * 39,
    "a" * 41,
    "a" * 40 + "\n",
    "a" * 5000,
    "",
    "..",
    "a\0b",
    None,
    7,
    ["a" * 40],
]
NAMES = [
    "../outside.json",
    "../../../../outside.json",
    "a/../../outside.json",
    "/outside.json",
    "..",
    ".",
    "a//b.json",
    "a/",
    "./a.json",
    "",
    "a\\b.json",
    "C:a.json",
    "a\0b.json",
    "a\nb\x1b[31m.json",
    "x" * 256 + ".json",
    "model/../../outside.safetensors",
    "config.json/inner.json",
]
SIZES: list[Any] = [-1, "12", 2**70, 1.5, None, True, [1]]
COMMITS: list[Any] = ["../../../../outside", "/outside", "main", "a" * 39, "A" * 40, "a" * 40 + "\n", "", None, 5]
DESCRIBE_NO_MODEL = [b"[1, null]", b"{}", b"null", b'{"id":"o/t","siblings":5}']
ANSWERS = [*DESCRIBE_NO_MODEL, b'{"a":[', b"<html>", b"[" * 100_000]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SHORT_RETRY_DELAYS_S", (0.0,) * 2)
    monkeypatch.setattr(fetch, "RETRY_DELAYS_S", (0.0,) * 2)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(make_tiny(tmp_path_factory.mktemp("source")))


def listed(folder: Path) -> set[str]:
    return {os.path.join(at, name) for at, folders, files in os.walk(folder) for name in folders + files}


def refused(server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error of a refused pull, after checking that it wrote nothing and that the doctor reports the same."""
    cache = root / "a" / "b" / "c" / "hub"
    (root / "scratch").mkdir()
    before = listed(root)
    with pytest.raises(ModelError) as caught:
        hub.download(MODEL, lambda line: None, cache_dir=cache, endpoint=server.url)
    assert listed(root) == before
    assert not server.asked
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("treadle.models.remote.HfApi", _at(server.url))
    found, drawn = hub_check.examine(Settings(model=MODEL), root / "scratch")
    assert ([finding.value for finding in found], drawn) == ([caught.value.message], False)
    assert listed(root) == before
    assert caught.value.message.isprintable()
    return caught.value.message


def _at(url: str) -> Any:
    from huggingface_hub import HfApi

    return lambda endpoint=None: HfApi(endpoint=endpoint or url)


@pytest.mark.parametrize("etag", ETAGS, ids=repr)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_checksum_that_is_no_hex_is_refused(
    content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, etag: Any
) -> None:
    with HubServer(MODEL, content) as server:
        server.etags[name] = etag
        said = refused(server, tmp_path, monkeypatch)
    assert f"as the checksum (etag) of {MODEL}'s file {name}" in said
    assert "use another hub or mirror" in said


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_no_plain_path_is_refused(
    content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with HubServer(MODEL, {**content, name: b"{}"}) as server:
        said = refused(server, tmp_path, monkeypatch)
    assert said.startswith("the hub lists ")
    assert "use another hub or mirror" in said


@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_a_size_that_is_none_is_refused(
    content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: Any
) -> None:
    with HubServer(MODEL, content) as server:
        server.sizes[WEIGHTS] = size
        assert f"as the size of {MODEL}'s file {WEIGHTS}" in refused(server, tmp_path, monkeypatch)


@pytest.mark.parametrize("commit", COMMITS, ids=repr)
def test_a_commit_that_is_none_is_refused(
    content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: Any
) -> None:
    with HubServer(MODEL, content) as server:
        server.info = json.dumps({"id": MODEL, "sha": commit, "siblings": []}).encode()
        assert f"as the commit of {MODEL}, not 40 hex digits" in refused(server, tmp_path, monkeypatch)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: repr(answer[:20]))
def test_an_answer_that_is_no_model_info_is_one_line(
    content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    with HubServer(MODEL, content) as server:
        server.info = answer
        said = refused(server, tmp_path, monkeypatch)
    why = "it describes no model" if answer in DESCRIBE_NO_MODEL else "it is not JSON"
    assert said == f"the hub's answer about {MODEL} can't be read: {why}; is HF_ENDPOINT a Hugging Face hub?"


def test_a_file_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ModelError, match="twice"):
        hub_checks.check_names(MODEL, ["a.json", "a.json"])


def test_another_commit_than_the_pinned_one_is_refused(content: dict[str, bytes], tmp_path: Path) -> None:
    with HubServer(MODEL, content) as server:
        server.info = json.dumps({"id": MODEL, "sha": COMMIT, "siblings": []}).encode()
        with pytest.raises(ModelError, match=r"answers with commit aaaa.* instead of dddd"):
            hub.download(MODEL, lambda line: None, revision="d" * 40, cache_dir=tmp_path / "hub", endpoint=server.url)


@pytest.mark.parametrize("revision", ["../../main", "/main", "a\0b"], ids=repr)
def test_a_revision_that_leaves_the_cache_is_refused(tmp_path: Path, revision: str) -> None:
    with pytest.raises(ModelError, match="is no revision"):
        hub.download(MODEL, lambda line: None, revision=revision, cache_dir=tmp_path / "hub")
    assert not listed(tmp_path)


def test_what_the_hub_says_after_the_listing_is_no_path(content: dict[str, bytes], tmp_path: Path) -> None:
    cache = tmp_path / "a" / "b" / "hub"
    with HubServer(MODEL, content) as server:
        server.late_etags = dict.fromkeys(content, "../../../../outside")
        folder = hub.download(MODEL, lambda line: None, cache_dir=cache, endpoint=server.url)
        assert not [path for _, path, _ in server.requests if "/tree/" in path]
    assert files_of(folder) == content
    outside = {path for path in listed(tmp_path) if not path.startswith(str(cache))}
    assert outside == {str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    assert {path.name for path in cache.glob("models--*/blobs/*")} == {etag_of(*item) for item in content.items()}


def test_the_kept_listing_is_the_library_s(content: dict[str, bytes], tmp_path: Path) -> None:
    from huggingface_hub import get_cached_repo_tree

    with HubServer(MODEL, {**content, "README.md": b"# hello"}) as server:
        hub.download(MODEL, lambda line: None, cache_dir=tmp_path, endpoint=server.url)
    tree = get_cached_repo_tree(MODEL, revision=COMMIT, cache_dir=tmp_path)
    assert {file.path: file.size for file in tree} == {name: len(data) for name, data in content.items()} | {
        "README.md": 7
    }

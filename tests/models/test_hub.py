"""Hub ids, against the hub's own client and a hub on the loopback. Nothing here leaves the machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.models.fakehub import COMMIT, FakeHub
from tests.support.tiny import make_tiny
from treadle.errors import ModelError
from treadle.models import hub, trust

MODEL = "owner/tiny"
UNWANTED = {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "README.md": b"# hello"}


def files(tmp_path: Path, vocabulary_extra: int = 0) -> dict[str, bytes]:
    folder = make_tiny(tmp_path / "source", vocabulary_extra=vocabulary_extra)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | UNWANTED


def silent(line: str) -> None:
    pass


def test_a_download_is_a_model_folder(tmp_path: Path) -> None:
    with FakeHub(MODEL, files(tmp_path)) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert trust.check(folder)["model_type"] == "llama"


def test_code_and_pickles_are_not_even_fetched(tmp_path: Path) -> None:
    with FakeHub(MODEL, files(tmp_path)) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        assert fake.fetched() == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert not {path.name for path in folder.iterdir()} & set(UNWANTED)


def test_what_is_cached_needs_no_hub(tmp_path: Path) -> None:
    with FakeHub(MODEL, files(tmp_path)) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert hub.download(MODEL, silent, offline=True, cache_dir=tmp_path / "hub") == folder
    assert hub.download(MODEL, silent, revision=COMMIT, offline=True, cache_dir=tmp_path / "hub") == folder


def test_a_second_start_fetches_nothing_again(tmp_path: Path) -> None:
    with FakeHub(MODEL, files(tmp_path)) as fake:
        for _ in range(2):
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        gets = [path for method, path, _ in fake.requests if method == "GET" and path.endswith("model.safetensors")]
    assert len(gets) == 1


def test_a_download_that_breaks_off_goes_on_where_it_was(tmp_path: Path) -> None:
    content = files(tmp_path, vocabulary_extra=24_000)
    chunk = 10 * 1024 * 1024  # what the hub's client writes at once
    with FakeHub(MODEL, content, cut=chunk + 1000) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        ranges = [
            span for method, path, span in fake.requests if method == "GET" and path.endswith("model.safetensors")
        ]
    assert (folder / "model.safetensors").read_bytes() == content["model.safetensors"]
    assert ranges == [None, f"bytes={chunk}-"]


def test_progress_names_the_model_and_its_bytes(tmp_path: Path) -> None:
    said: list[str] = []
    with FakeHub(MODEL, files(tmp_path)) as fake:
        hub.download(MODEL, said.append, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert said[0] == f"looking up {MODEL} on the hub"
    assert any(line.startswith(f"downloading {MODEL}: ") for line in said[1:])


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ModelError, match=r"can't reach the hub for owner/tiny, and it is not cached") as caught:
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=endpoint)
    assert "\n" not in caught.value.message


def test_offline_and_not_cached_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not wholly in the local cache and offline is set"):
        hub.download(MODEL, silent, offline=True, cache_dir=tmp_path / "hub")


def test_an_unknown_model_and_an_unknown_revision_are_told_apart(tmp_path: Path) -> None:
    with FakeHub(MODEL, files(tmp_path)) as fake:
        with pytest.raises(ModelError, match="no such model on the hub"):
            hub.download("owner/other", silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        with pytest.raises(ModelError, match="has no revision v9"):
            hub.download(MODEL, silent, revision="v9", cache_dir=tmp_path / "hub", endpoint=fake.url)


def test_a_gated_model_says_how_to_get_it(tmp_path: Path) -> None:
    with FakeHub(MODEL, files(tmp_path)) as fake:
        fake.status, fake.error_code = 403, "GatedRepo"
        with pytest.raises(ModelError, match=r"owner/tiny is gated: accept its terms on the hub.*hf auth login"):
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)


def test_a_hub_in_trouble_is_one_clear_line(tmp_path: Path) -> None:
    with FakeHub(MODEL, files(tmp_path)) as fake:
        fake.status = 418
        with pytest.raises(ModelError, match="owner/tiny") as caught:
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["mlx-community/Qwen3-0.6B-4bit", "a/b", "Org_1/model.v2"])
def test_hub_ids(text: str) -> None:
    assert hub.is_id(text)


@pytest.mark.parametrize(
    "text",
    [
        "gpt2",
        "a/b/c",
        "../b",
        "a/..",
        "a/.b",
        "/a/b",
        "a/b/",
        "a b/c",
        "a/b--c",
        "é/b",
        "a/b\n",
        "",
        "a/b.",
        "-a/b",
        "a/\0",
    ],
)
def test_what_is_no_hub_id(text: str) -> None:
    assert not hub.is_id(text)

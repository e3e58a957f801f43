"""Hub ids, against the hub's own client and a hub on the loopback. Nothing here leaves the machine."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path

import pytest

from tests.support.eagle_models import make_eagle
from tests.support.hub import COMMIT, HubServer, files_of
from tests.support.tiny import make_tiny
from treadle.errors import ModelError
from treadle.models import fetch, folder_checks, hub
from treadle.models.cache_paths import repository
from treadle.models.transfer import Transfer

MODEL = "owner/tiny"
UNWANTED = {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "README.md": b"# hello"}


def files(tmp_path: Path, vocabulary_extra: int = 0) -> dict[str, bytes]:
    return files_of(make_tiny(tmp_path / "source", vocabulary_extra=vocabulary_extra)) | UNWANTED


def silent(line: str) -> None:
    pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SHORT_RETRY_DELAYS_S", (0.0,) * 2)


def test_a_download_is_a_model_folder(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert folder_checks.check(folder)["model_type"] == "llama"


def test_code_and_pickles_are_not_even_fetched(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        assert fake.fetched() == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert not {path.name for path in folder.iterdir()} & set(UNWANTED)


def test_what_is_cached_needs_no_hub(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert hub.download(MODEL, silent, offline=True, cache_dir=tmp_path / "hub") == folder
    assert hub.download(MODEL, silent, revision=COMMIT, offline=True, cache_dir=tmp_path / "hub") == folder


def test_a_second_start_fetches_nothing_again(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        for _ in range(2):
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        assert fake.ranges("model.safetensors") == [None]


def test_progress_names_the_model_and_its_bytes(tmp_path: Path) -> None:
    said: list[str] = []
    with HubServer(MODEL, files(tmp_path)) as fake:
        hub.download(MODEL, said.append, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert said[0] == f"looking up {MODEL} on the hub"
    assert any(line.startswith(f"downloading {MODEL}: ") for line in said[1:])


def test_a_watch_gets_transfers_up_to_the_last_byte(tmp_path: Path) -> None:
    seen: list[Transfer] = []
    with HubServer(MODEL, files(tmp_path)) as fake:
        hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url, watch=seen.append)
    assert seen[-1].percent == 100
    assert (
        seen[-1].done_bytes
        == seen[-1].total_bytes
        == sum(len(data) for name, data in files(tmp_path).items() if name not in UNWANTED)
    )


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(
            ModelError, match=r"can't reach the hub for owner/tiny, and it is not wholly cached"
        ) as caught:
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=endpoint)
    assert "\n" not in caught.value.message


def test_offline_and_not_cached_says_so(tmp_path: Path) -> None:
    said = "owner/tiny is not wholly in the local cache and offline is set: 'treadle pull owner/tiny' fetches it"
    with pytest.raises(ModelError) as caught:
        hub.download(MODEL, silent, offline=True, cache_dir=tmp_path / "hub")
    assert caught.value.message == said
    blobs = repository(tmp_path / "hub", MODEL) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "piece.incomplete").touch()
    with pytest.raises(ModelError) as caught:
        hub.download(MODEL, silent, offline=True, cache_dir=tmp_path / "hub")
    assert caught.value.message == f"{said}; what was fetched is kept"
    with pytest.raises(ModelError, match=r"'treadle pull owner/tiny --revision v2' fetches it"):
        hub.download(MODEL, silent, revision="v2", offline=True, cache_dir=tmp_path / "hub")


def test_a_model_cached_at_another_commit_alone_says_which_and_takes_its_beginning(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    cached = partial(hub.download, MODEL, silent, offline=True, cache_dir=cache)
    with HubServer(MODEL, files(tmp_path)) as fake:
        folder = hub.download(MODEL, silent, revision=COMMIT, cache_dir=cache, endpoint=fake.url)
    hint = f"; cached at {COMMIT[:7]}: give --revision {COMMIT[:7]} for that"
    for revision in (None, "v2", "b" * 40, "b" * 7):
        with pytest.raises(ModelError, match=rf"is not wholly in the local cache .* fetches it{hint}$"):
            cached(revision=revision)
    for revision in (COMMIT[:7], COMMIT[:39], COMMIT):
        assert cached(revision=revision) == folder
    for other in ("a" * 8 + "b" * 32, "c" * 40):  # one that begins alike, and one that is not whole
        (folder.parent / other).mkdir()
    with pytest.raises(ModelError, match=hint):
        cached(revision=COMMIT[:7])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        cached()
    assert "cached at" not in caught.value.message


def test_a_branch_whose_name_looks_like_a_commit_is_that_branch(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    with HubServer(MODEL, files(tmp_path)) as fake:
        hub.download(MODEL, silent, revision=COMMIT, cache_dir=cache, endpoint=fake.url)
    refs = repository(cache, MODEL) / "refs"
    refs.mkdir(exist_ok=True)
    (refs / COMMIT[:7]).write_text("d" * 40)
    with pytest.raises(ModelError, match="is not wholly in the local cache"):
        hub.download(MODEL, silent, revision=COMMIT[:7], offline=True, cache_dir=cache)


def test_an_unknown_model_and_an_unknown_revision_are_told_apart(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        with pytest.raises(ModelError, match="no such model on the hub"):
            hub.download("owner/other", silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        with pytest.raises(ModelError, match="has no revision v9"):
            hub.download(MODEL, silent, revision="v9", cache_dir=tmp_path / "hub", endpoint=fake.url)


def test_a_gated_model_says_how_to_get_it(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        fake.status, fake.error_code = 403, "GatedRepo"
        with pytest.raises(ModelError, match=r"owner/tiny is gated: accept its terms on the hub.*hf auth login"):
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)


def test_a_hub_in_trouble_is_one_clear_line(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        fake.status = 418
        with pytest.raises(ModelError, match="owner/tiny") as caught:
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert "\n" not in caught.value.message


def test_a_head_for_drafts_is_fetched_like_a_model_and_found_without_the_hub(tmp_path: Path) -> None:
    head = make_eagle(tmp_path / "source")
    with HubServer(MODEL, files_of(head)) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        folder_checks.check_head(folder)
        fake.status = 500
        assert hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url) == folder


@pytest.mark.parametrize("status", [500, 401, 403])
def test_a_hub_that_does_not_help_leaves_what_is_cached(tmp_path: Path, status: int) -> None:
    said: list[str] = []
    with HubServer(MODEL, files(tmp_path)) as fake:
        folder = hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        fake.status = status
        assert hub.download(MODEL, said.append, cache_dir=tmp_path / "hub", endpoint=fake.url) == folder
    assert any("using the cached owner/tiny" in line for line in said)


def test_a_hub_that_is_back_after_a_moment_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with HubServer(MODEL, files(tmp_path)) as fake:
        fake.status = 503

        def back(seconds: float) -> None:
            fake.status = 0

        monkeypatch.setattr("treadle.models.hub.time.sleep", back)
        hub.download(MODEL, said.append, cache_dir=tmp_path / "hub", endpoint=fake.url)
    assert "the hub answers 503: trying again in 0 s" in said


def test_a_token_that_the_hub_refuses_is_said(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        fake.status = 401
        with pytest.raises(ModelError, match=r"the hub refuses the token for owner/tiny \(401\).*HF_TOKEN"):
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)


def test_a_name_that_is_nearly_a_cached_one_is_offered(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        with pytest.raises(ModelError, match="did you mean 'owner/tiny', which is cached"):
            hub.download("owner/tinny", silent, cache_dir=tmp_path / "hub", endpoint=fake.url)


def test_a_model_that_wants_to_run_code_costs_no_weights(tmp_path: Path) -> None:
    content = files(tmp_path)
    content["config.json"] = json.dumps({**json.loads(content["config.json"]), "auto_map": {"a": "b"}}).encode()
    with HubServer(MODEL, content) as fake:
        with pytest.raises(ModelError, match="asks to run code"):
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        assert "model.safetensors" not in fake.fetched()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("m.Q4_K_M.gguf", r"owner/tiny has its weights as GGUF only \(m\.Q4_K_M\.gguf\)"),
        ("pytorch_model.bin", r"owner/tiny has its weights as a pickle \(pytorch_model\.bin\)"),
        ("unet.safetensors", r"owner/tiny has no model\*\.safetensors, only unet\.safetensors"),
        ("README.md", r"owner/tiny has no weights"),
    ],
)
def test_weights_in_another_format_are_refused_before_anything_is_fetched(tmp_path: Path, name: str, says: str) -> None:
    with HubServer(MODEL, {"config.json": b"{}", name: b"x"}) as fake:
        with pytest.raises(ModelError, match=says):
            hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=fake.url)
        assert not fake.fetched()


def test_a_revision_is_fetched_beside_the_other(tmp_path: Path) -> None:
    with HubServer(MODEL, files(tmp_path)) as fake:
        fake.revisions["v1"] = "d" * 40
        folders = [
            hub.download(MODEL, silent, revision=revision, cache_dir=tmp_path / "hub", endpoint=fake.url)
            for revision in (None, "v1")
        ]
        assert [folder.name for folder in folders] == [COMMIT, "d" * 40]
        assert fake.ranges("model.safetensors") == [None]


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

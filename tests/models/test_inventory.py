"""Models on this disk: whole, partial or refused; and their removal, which leaves nothing and takes nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from tests.support.hub import COMMIT, HubServer, files_of
from tests.support.tiny import make_tiny
from treadle.errors import ModelError
from treadle.models import architectures, demo, hub, in_use, inventory
from treadle.models.cache_paths import locks_of, repository
from treadle.models.inventory import State

MODEL = "owner/tiny"


def silent(line: object) -> None:
    pass


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A cache with one complete model of two revisions."""
    content = files_of(make_tiny(tmp_path / "source"))
    with HubServer(MODEL, content) as server:
        hub.download(MODEL, silent, cache_dir=tmp_path / "hub", endpoint=server.url)
        server.revisions["v1"] = "d" * 40
        server.files["config.json"] += b"\n"
        hub.download(MODEL, silent, revision="v1", cache_dir=tmp_path / "hub", endpoint=server.url)
    return tmp_path / "hub"


def entry(hub_cache: Path) -> inventory.Entry:
    found = inventory.find(MODEL, hub_cache)
    assert found is not None
    return found


def config_of(hub_cache: Path, **changed: object) -> None:
    path = repository(hub_cache, MODEL) / "snapshots" / COMMIT / "config.json"
    config = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps({**config, **changed}))


def test_a_whole_model(hub_cache: Path) -> None:
    (found,) = inventory.entries(hub_cache, hub_cache / "no demo")
    assert (found.model, found.state, found.reason) == (MODEL, State.READY, "")
    assert (found.architecture, found.weights) == ("llama", "float32")
    assert found.revisions == (COMMIT, "d" * 40)
    assert found.folder == repository(hub_cache, MODEL) / "snapshots" / COMMIT
    blobs = repository(hub_cache, MODEL) / "blobs"
    assert found.size_bytes == sum(path.stat().st_size for path in blobs.iterdir())


def test_a_model_without_a_commit_of_main_names_the_one_to_ask_for(hub_cache: Path) -> None:
    assert entry(hub_cache).revision == ""
    (repository(hub_cache, MODEL) / "refs" / "main").unlink()
    found = entry(hub_cache)
    assert found.state is State.READY
    assert found.folder is not None
    assert found.revision == found.folder.name
    hub.download(MODEL, silent, revision=found.revision[:7], offline=True, cache_dir=hub_cache)


def test_a_model_without_its_weights_is_partial_and_says_how_much_there_will_be(hub_cache: Path) -> None:
    weights = repository(hub_cache, MODEL) / "snapshots" / COMMIT / "model.safetensors"
    blob = weights.resolve()
    size = blob.stat().st_size
    weights.unlink()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    (repository(hub_cache, MODEL) / "snapshots" / ("d" * 40) / "model.safetensors").unlink()
    found = entry(hub_cache)
    assert (found.state, found.partial_bytes) == (State.PARTIAL, size)
    assert found.reason == "1 file missing: 'treadle pull owner/tiny' fetches the rest"
    assert found.whole_bytes is not None
    assert found.whole_bytes > size


def test_a_download_that_ended_before_any_snapshot_is_partial(tmp_path: Path) -> None:
    blobs = repository(tmp_path, MODEL) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{'a' * 64}.incomplete").write_bytes(b"12345")
    found = entry(tmp_path)
    assert (found.state, found.size_bytes, found.partial_bytes, found.folder) == (State.PARTIAL, 5, 5, None)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model_type": "no_such_model"}, 'config.json: mlx-lm has no model "no_such_model"'),
        ({"auto_map": {"a": "b"}}, "config.json asks to run code"),
    ],
)
def test_a_model_that_can_not_be_served_says_why(hub_cache: Path, changed: dict[str, object], why: str) -> None:
    config_of(hub_cache, **changed)
    found = entry(hub_cache)
    assert found.state is State.REFUSED
    assert found.reason.startswith(why)


def test_what_is_no_model_of_ours_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "datasets--a--b").mkdir()
    (tmp_path / "models--a--b").write_text("a file")
    (tmp_path / "version.txt").write_text("1")
    assert inventory.entries(tmp_path, tmp_path) == []
    assert inventory.entries(tmp_path / "none", tmp_path) == []


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}, "torch_dtype": "bfloat16"}, "4 bits"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"text_config": "x", "dtype": "float16"}, "float16"),
        ({"text_config": [{"dtype": "float16"}]}, ""),
        ({}, ""),
    ],
)
def test_how_weights_are_stored(config: dict[str, object], text: str) -> None:
    assert inventory.weight_format(config) == text


def test_architectures_are_those_of_the_installed_mlx_lm() -> None:
    assert architectures.is_known({"model_type": "llama"})
    assert architectures.is_known({"model_type": "mistral"})  # another name for llama
    assert not architectures.is_known({"model_type": "bert"})
    assert not architectures.is_known({"model_type": "../utils"})
    assert not architectures.is_known({"model_type": "x" * 5000})  # longer than names of files
    assert architectures.is_known({"model_type": "nemotron-nas"})
    assert not architectures.is_known({"model_type": "cache"})  # a part of models


def test_without_mlx_lm_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert architectures.is_known({"model_type": "llama"}) is None


# Removal


def test_a_removed_model_leaves_nothing(hub_cache: Path) -> None:
    (repository(hub_cache, MODEL) / "blobs" / f"{'e' * 64}.incomplete").write_bytes(b"12345")
    found = entry(hub_cache)
    assert inventory.remove(found) >= found.size_bytes
    assert not repository(hub_cache, MODEL).exists()
    assert not locks_of(hub_cache, MODEL).exists()


def test_a_partial_model_can_be_removed(tmp_path: Path) -> None:
    blobs = repository(tmp_path, MODEL) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{'a' * 64}.incomplete").write_bytes(b"12345")
    assert inventory.remove(entry(tmp_path)) == 5
    assert not repository(tmp_path, MODEL).exists()


def test_a_removed_revision_leaves_what_the_other_needs(hub_cache: Path) -> None:
    freed = inventory.remove(entry(hub_cache), "d" * 40)
    assert 0 < freed < 5000  # its config.json alone: the weights are shared
    found = entry(hub_cache)
    assert (found.state, found.revisions) == (State.READY, (COMMIT,))
    inventory.remove(found, COMMIT)
    assert not repository(hub_cache, MODEL).exists()


def test_a_model_in_use_stays(hub_cache: Path) -> None:
    found = entry(hub_cache)
    assert found.folder is not None
    lock = in_use.lock_folder(found.folder)
    assert lock is not None
    with pytest.raises(ModelError, match="owner/tiny can't be removed: a running treadle serves it"):
        inventory.remove(found)
    lock.close()
    lock.close()
    inventory.remove(found)


def test_serving_is_the_last_use_and_listing_is_not(hub_cache: Path) -> None:
    home = repository(hub_cache, MODEL)
    for path in (home, *home.rglob("*")):
        os.utime(path, (2000, 1000))  # read since it was written
    assert (entry(hub_cache).used, entry(hub_cache).modified) == (1000, 1000)
    folder = home / "snapshots" / ("d" * 40)
    before = os.stat(home / "blobs").st_ctime
    in_use.mark_used(folder)
    assert entry(hub_cache).used >= before
    assert entry(hub_cache).modified == 1000


def test_a_model_that_is_being_downloaded_stays(hub_cache: Path) -> None:
    with (
        WeakFileLock(locks_of(hub_cache, MODEL) / "x.lock"),
        pytest.raises(ModelError, match="a running process downloads it"),
    ):
        inventory.remove(entry(hub_cache))


def test_what_is_not_there_can_not_be_held(tmp_path: Path) -> None:
    assert in_use.lock_folder(tmp_path / "none") is None
    assert not in_use.is_locked(tmp_path / "none")


def test_the_demo_can_be_removed(tmp_path: Path) -> None:
    make_tiny(tmp_path / demo.NAME, architecture="gemma3")
    (tmp_path / f"{demo.NAME}.lock").touch()
    found = inventory.find_demo(tmp_path)
    assert found is not None
    assert (found.model, found.state) == ("demo", State.READY)
    assert inventory.remove(found) == found.size_bytes
    assert os.listdir(tmp_path) == []
    assert inventory.find_demo(tmp_path) is None

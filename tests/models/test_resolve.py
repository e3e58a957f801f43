"""From the `model` setting to a checked folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import make_tiny
from treadle.config import Settings
from treadle.errors import ModelError
from treadle.models import Source, demo, hub, resolve


def silent(line: str) -> None:
    pass


def find(model: str, **others: object) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(Settings(model=model, **others), silent)  # type: ignore[arg-type]
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "my-model")
    found = resolve(Settings(model=str(path)), silent)
    assert (found.path, found.name, found.source) == (path, "my-model", Source.FOLDER)
    assert found.config["model_type"] == "llama"


def test_a_relative_folder_with_two_parts_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path / "owner" / "model")
    monkeypatch.chdir(tmp_path)
    found = resolve(Settings(model="owner/model"), silent)
    assert (found.source, found.name) == (Source.FOLDER, "model")


def test_a_dot_is_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_tiny(tmp_path / "here"))
    assert resolve(Settings(model="."), silent).name == "here"


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_tiny(tmp_path / "m")
    assert resolve(Settings(model="~/m"), silent).path == tmp_path / "m"


def test_demo_is_the_demo_whatever_folders_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path / "demo", architecture="qwen3")
    converted = make_tiny(tmp_path / "converted", architecture="gemma3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "folder", lambda progress: converted)
    found = resolve(Settings(model="demo"), silent)
    assert (found.path, found.name, found.source) == (converted, "gemma-3-270m", Source.DEMO)
    assert resolve(Settings(model="./demo"), silent).config["model_type"] == "qwen3"


def test_a_hub_id_keeps_its_name_and_passes_revision_and_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def download(model: str, progress: object, *, revision: str | None, offline: bool, watch: object) -> Path:
        asked.append((model, revision, offline))
        return make_tiny(tmp_path / "snapshot")

    monkeypatch.setattr(hub, "download", download)
    found = resolve(Settings(model="owner/model", revision="v1", offline=True), silent)
    assert (found.name, found.source) == ("owner/model", Source.HUB)
    assert asked == [("owner/model", "v1", True)]


def test_what_is_found_is_checked(tmp_path: Path) -> None:
    (make_tiny(tmp_path / "m") / "model.safetensors").write_bytes(b"torn")
    assert "torn" in find(str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("./missing", "there is no folder"),
        ("../../missing", "there is no folder"),
        ("~nobody-of-that-name/x", "there is no folder"),
        ("gpt2", "not a hub id"),
        ("a/b/c", "not a hub id"),
        ("a\0b", "not a hub id"),
        ("\n", "not a hub id"),
        ("x" * 5000, "not a hub id"),
        ("/" + "x/" * 3000, "there is no folder"),
        (__file__, "is a file: give the folder"),
    ],
)
def test_what_is_no_model_is_one_clear_line(model: str, says: str) -> None:
    message = find(model)
    assert says in message
    assert len(message) < 400


def test_a_draft_model_is_found_like_a_model_and_without_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(model: str, progress: object, *, revision: str | None, offline: bool, watch: object) -> Path:
        asked.append((model, revision))
        return make_tiny(tmp_path / "snapshot")

    monkeypatch.setattr(hub, "download", download)
    found = resolve(Settings(model="owner/model", revision="v1", draft="owner/draft", speculate="draft"), silent)
    assert asked == [("owner/model", "v1"), ("owner/draft", None)]
    assert found.draft is not None
    assert (found.draft.name, found.draft.draft) == ("owner/draft", None)
    assert "`draft` can't be used: there is no folder './missing'" in find(
        str(tmp_path / "snapshot"), draft="./missing"
    )


def test_a_revision_of_a_folder_is_not_swallowed(tmp_path: Path) -> None:
    make_tiny(tmp_path / "m")
    assert "revision is for hub ids" in find(str(tmp_path / "m"), revision="main")
    assert "revision is for hub ids" in find("demo", revision="main")


def test_finding_a_model_loads_no_tensor_library() -> None:
    code = (
        "import sys, treadle.models as m; m.resolve; "
        "print([n for n in ('mlx', 'numpy', 'transformers', 'torch', 'tokenizers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"

"""What a folder must be before anything in it is loaded."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.eagle_models import Layout, make_eagle
from tests.support.tiny import make_tiny
from treadle.errors import ModelError
from treadle.models import folder_checks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    change(value)
    path.write_text(json.dumps(value))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        folder_checks.check(folder)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_weights_without_a_tensor_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "the safetensors files hold no tensors: download the model again" in refusal(folder)


@pytest.mark.parametrize("name", ["base_model_name_or_path", "model"])
def test_an_adapter_is_refused_with_the_name_of_its_model(folder: Path, name: str) -> None:
    """As PEFT and mlx-lm save them."""
    edit(folder / "adapter_config.json", lambda value: value.update({name: "Qwen/Qwen3-0.6B"}))
    assert folder_checks.check(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    assert 'is an adapter of "Qwen/Qwen3-0.6B", not a model: fuse both' in refusal(folder)


def test_a_whole_folder_gives_its_config(folder: Path) -> None:
    assert folder_checks.check(folder)["model_type"] == "llama"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("config.json", {"model_file": "model.py"}),
        ("config.json", {"auto_map": {"AutoModel": "modeling.Model"}}),
        ("config.json", {"text_config": {"auto_map": {"AutoModel": "modeling.Model"}}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}}),
        ("processor_config.json", {"auto_map": {"AutoProcessor": "proc.Proc"}}),
        ("preprocessor_config.json", {"parts": [{"auto_map": {"AutoImageProcessor": "p.P"}}]}),
    ],
)
def test_code_from_the_repository_is_refused_by_name(folder: Path, name: str, entry: dict[str, Any]) -> None:
    edit(folder / name, lambda value: value.update(entry))
    message = refusal(folder)
    assert name in message
    assert "run code" in message
    assert "auto_map" in message or "model_file" in message


@pytest.mark.parametrize("layout", ["speculators", "original"])
def test_a_head_is_checked_as_one_and_is_no_model(tmp_path: Path, layout: Layout) -> None:
    """Nothing of it is run, whatever `auto_map` names; it has no tokenizer."""
    head = make_eagle(tmp_path / "head", layout=layout)
    assert folder_checks.is_head(head)
    folder_checks.check_any(head)
    assert refusal(head).endswith(
        "is an EAGLE-3 head, which drafts tokens of another model: give it as `draft` of the "
        "model that it was trained for"
    )
    edit(head / "config.json", lambda value: value.update({"model_file": "model.py"}))
    with pytest.raises(ModelError, match="run code"):
        folder_checks.check_head(head)
    (head / "config.json").write_text(json.dumps({"architectures": "none", "draft_vocab_size": 9}))
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ModelError, match="has its weights as a pickle"):
        folder_checks.check_any(head)


def test_a_model_is_no_head(folder: Path) -> None:
    assert not folder_checks.is_head(folder)
    folder_checks.check_any(folder)


def test_a_switch_that_is_off_is_harmless(folder: Path) -> None:
    edit(folder / "config.json", lambda value: value.update(auto_map=None, model_file=""))
    assert folder_checks.check(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.pkl", "m.CKPT"])
def test_pickles_as_the_only_weights_are_refused_with_the_reason(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message
    assert "can run code" in message


def test_a_pickle_beside_good_weights_is_not_looked_at(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    assert folder_checks.check(folder)


def test_a_folder_that_may_not_be_searched_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the system's refusal, which the superuser never gets."""

    def is_file(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    assert refusal(folder) == f"can't read {folder / 'adapter_config.json'}: Permission denied"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_configuration_without_end_is_refused_unread(folder: Path, name: str) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(17 << 20)
    with pytest.raises(ModelError, match=f"{name} has 17 MiB, which no configuration has: download it again"):
        folder_checks.check(folder)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", '{"model_type": "lla', "torn or not JSON"),
        ("config.json", "[1]", "JSON object, not list"),
        ("config.json", "\xff", "torn or not JSON"),
        ("config.json", "[" * 100_000, "torn or not JSON"),
        ("config.json", "{}", "no model_type"),
        ("config.json", '{"model_type": 3}', "no model_type"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "", "torn"),
        ("tokenizer.json", '{"version": "1.0", "model": {"vocab', "torn"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", "", "torn"),
        ("tokenizer_config.json", "{", "torn or not JSON"),
    ],
)
def test_what_is_missing_or_torn_is_named(folder: Path, name: str, text: str | None, says: str) -> None:
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text, encoding="latin-1")
    assert says in refusal(folder)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.25, 0.5, 0.99])
def test_a_part_of_a_weight_file_is_found(folder: Path, share: float) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(share * len(whole))])
    assert "torn" in refusal(folder)


def test_the_last_byte_is_missed(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert "ends 1 bytes after the file; download it again" in refusal(folder)


def test_a_tokenizer_that_cannot_be_read_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def denied(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "tokenizer.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", denied)
    assert "tokenizer.json: Permission denied" in refusal(folder)


def test_a_model_in_another_layout_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert "only consolidated.safetensors" in refusal(folder)


def test_a_sentencepiece_file_alone_is_not_enough(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert "only tokenizer.model" in refusal(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b", "..\\x", "", "x\0y"])
def test_an_index_that_points_outside_is_refused(folder: Path, name: object) -> None:
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside the folder" in refusal(folder)


@pytest.mark.parametrize("places", [{"a": 3}, {"a": ["x"]}, {"a": {}}, {"a": None}, ["model.safetensors"], "x", None])
def test_an_index_without_a_file_for_each_tensor_is_broken(folder: Path, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "model.safetensors.index.json is broken: weight_map does not give a file" in refusal(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refusal(folder)


def test_an_index_of_what_is_there_passes(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert folder_checks.check(folder)


@pytest.mark.parametrize("kind", ["no_such_model", "../../evil", "os.path", "\x1b[31mllama"])
def test_an_architecture_that_mlx_lm_lacks(folder: Path, kind: str) -> None:
    """mlx-lm imports a module by this name."""
    edit(folder / "config.json", lambda value: value.update(model_type=kind))
    message = refusal(folder)
    assert "mlx-lm has no model" in message
    assert "model_type" in message
    assert "\x1b" not in message


@pytest.mark.parametrize("place", ["", "text_config"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"])
def test_more_layers_than_tensors_are_not_built(folder: Path, name: str, place: str) -> None:
    """A million of them took minutes, and gigabytes of memory."""
    layers = {name: 1_000_000}
    edit(folder / "config.json", lambda value: value.update({place: layers} if place else layers))
    assert f"{name} is 1000000" in refusal(folder)


def test_sizes_by_the_layer_are_no_numbers_of_layers(folder: Path) -> None:
    edit(
        folder / "config.json", lambda value: value.update(hidden_size_per_layer_input=10_000, max_window_layers=9_999)
    )
    assert folder_checks.check(folder)

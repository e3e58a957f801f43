"""Which files of a folder hold the model's weights, by their names, the index, and the tensors in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle.weight_names import INDEX, is_weights, merged, weight_files


def names(folder: Path) -> list[str]:
    return [path.name for path in weight_files(folder)]


def put(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).touch()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors-00001-of-00002.safetensors", True),
        ("mtp.safetensors", True),
        ("consolidated.safetensors", False),
        ("adapter_model.safetensors", False),
        ("original/model.safetensors", False),
        ("model.safetensors.index.json", False),
    ],
)
def test_names_of_weight_files(name: str, is_one: bool) -> None:
    assert is_weights(name) == is_one


def test_files_of_the_index_come_first_by_any_name(tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors", "b.safetensors", "a.safetensors", "consolidated.safetensors", "mtp.safetensors")
    places = {"x": "b.safetensors", "y": "a.safetensors", "z": "lost.safetensors", "w": "../model.safetensors", "v": 3}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert names(tmp_path) == ["a.safetensors", "b.safetensors", "model.safetensors", "mtp.safetensors"]


def test_without_an_index_the_file_of_the_whole_model_comes_first(tmp_path: Path) -> None:
    put(tmp_path, "model-1.safetensors", "model.safetensors", "model.fp16.safetensors")
    assert names(tmp_path) == ["model.safetensors", "model-1.safetensors", "model.fp16.safetensors"]


@pytest.mark.parametrize("index", ["[", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "[" * 100_000])
def test_an_index_that_can_not_be_read_names_no_files(index: str, tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors")
    (tmp_path / INDEX).write_text(index)
    assert names(tmp_path) == ["model.safetensors"]


def test_a_file_with_a_tensor_of_one_before_it_is_left_out() -> None:
    one, two, three = Path("one"), Path("two"), Path("three")
    files = [(one, {"a": 1, "b": 2}), (two, {"b": 3, "c": 4}), (three, {"c": 5})]
    assert merged(files, {}) == ({"a": 1, "b": 2, "c": 5}, [two])


def test_of_files_that_the_index_names_none_is_left_out() -> None:
    """Each tensor is that of its place in the index; one without a place that of the first file."""
    one, two, three = Path("one"), Path("two"), Path("three")
    files = [(one, {"a": 1, "b": 2, "d": 3}), (two, {"b": 4, "c": 5, "d": 6}), (three, {"c": 7, "e": 8})]
    places = {"a": "one", "b": "two", "c": "two"}
    assert merged(files, places) == ({"a": 1, "b": 4, "c": 5, "d": 3}, [three])
    assert merged(files, places | {"b": "one"}) == ({"a": 1, "b": 2, "c": 5, "d": 3}, [three])

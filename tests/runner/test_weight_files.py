"""Folders with more weight files than a model needs, or by other names than mlx-lm reads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.mtp_models import make_headed, tensors
from tests.support.tiny import make_tiny
from treadle.runner.mlxlm import connect
from treadle.weight_names import INDEX

PROMPT = tuple(range(3, 43))


def logits(folder: Path) -> Any:
    module, _ = connect().load(folder)
    found = module(mx.array([PROMPT]))
    mx.eval(found)
    return found


def divide(folder: Path, names: tuple[str, str]) -> None:
    """Save the model of a folder in two files, with an index."""
    found = tensors(folder)
    (folder / "model.safetensors").unlink()
    ordered = sorted(found)
    parts = {names[0]: ordered[:8], names[1]: ordered[8:]}
    for file, part in parts.items():
        mx.save_safetensors(str(folder / file), {name: found[name] for name in part})
    places = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("names", [SHARDS, ("model.safetensors", "rest.safetensors")])
def test_all_files_of_the_index_are_read(names: tuple[str, str], tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    before = logits(folder)
    divide(folder, names)
    assert mx.array_equal(logits(folder), before).item()


@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_in_two_files_of_the_index_is_that_of_its_place(place: int, tmp_path: Path) -> None:
    """mlx-lm takes that of the last file in the order of the disk."""
    folder = make_tiny(tmp_path)
    before, found = logits(folder), tensors(folder)
    divide(folder, SHARDS)
    index = json.loads((folder / INDEX).read_text())
    name, *_ = places = index["weight_map"]
    for file in SHARDS:
        held = {one: found[one] for one in places if places[one] == file}
        held[name] = found[name] * (file == SHARDS[place])
        mx.save_safetensors(str(folder / file), held)
    places[name] = SHARDS[place]
    (folder / INDEX).write_text(json.dumps(index))
    assert mx.array_equal(logits(folder), before).item()


@pytest.mark.parametrize("indexed", [True, False])
def test_another_version_beside_the_model_is_not_read(
    indexed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm reads all of them, and the last one in the order of the disk counts."""
    folder = make_tiny(tmp_path)
    before = logits(folder)
    others = {name: array * 0 for name, array in tensors(folder).items()}
    if indexed:
        divide(folder, SHARDS)
    other = "model.safetensors" if indexed else SHARDS[0]
    mx.save_safetensors(str(folder / other), others | {"model.extra.scales": mx.ones(3)})
    with caplog.at_level(logging.WARNING):
        assert mx.array_equal(logits(folder), before).item()
    assert f"{other} is not read, as other files hold the same tensors" in caplog.text


def test_an_mtp_head_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    """As in Qwen's FP8 folders."""
    folder = make_headed(tmp_path, "qwen3_next")
    found = tensors(folder)
    head = {name: array for name, array in found.items() if name.startswith("mtp.")}
    rest = {name: array for name, array in found.items() if name not in head}
    mx.save_safetensors(str(folder / "model.safetensors"), rest)
    mx.save_safetensors(str(folder / "mtp.safetensors"), head)
    library = connect()
    module, config = library.load(folder)
    read = library.load_head(folder, module, config)
    assert mx.array_equal(read.joint.projection.weight, head["mtp.fc.weight"]).item()

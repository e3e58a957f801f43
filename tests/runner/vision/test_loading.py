"""Vision towers: their weights, what is refused, and what is told of them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.runner.looped import Looped
from tests.runner.vision.asked import VisionModel
from tests.support.shared_pixels import shared_pixels
from tests.support.tiny_vision import CONFIGS, FAMILIES, config_of, make_reference, make_vision, pixels_of, quantizable
from treadle.runner.build import build
from treadle.runner.loading import vision as loading
from treadle.runner.mlxvlm import NoTower, Tower, connect, family_of, library, load_parts


def tower_of(folder: Path) -> Tower:
    config = json.loads((folder / "config.json").read_text())
    family = family_of(config)
    assert family is not None
    return Tower(load_parts(connect(family), folder, config), family, mx.float32)


def features(tower: Tower, family: str, pieces: int) -> list[Any]:
    pixels, grid, _ = pixels_of(family, 5)
    lazy = tower.image(pixels, grid)
    while True:
        arrays, encoded = lazy.run(min(pieces, tower.pieces - lazy.done))
        mx.eval(arrays)
        if encoded is not None:
            return arrays


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_tower_in_pieces_computes_the_same(family: str, tmp_path: Path) -> None:
    tower = tower_of(make_vision(tmp_path, family))
    whole = features(tower, family, tower.pieces)
    for pieces in (1, 3):
        for one, other in zip(whole, features(tower, family, pieces), strict=True):
            assert mx.array_equal(one, other)


def test_a_quantized_tower_is_read_as_such(tmp_path: Path) -> None:
    family = "qwen3_vl"
    tower = tower_of(make_vision(tmp_path, family, bits=4))
    assert any(isinstance(one, nn.QuantizedLinear) for one in tower._model.vision_tower.modules())
    reference = make_reference(family)
    nn.quantize(reference, 32, 4, class_predicate=quantizable)
    pixels, grid, _ = pixels_of(family, 5)
    rows, _ = reference.vision_tower(mx.array(pixels), mx.array([list(size) for size in grid]))
    assert mx.allclose(features(tower, family, 2)[0], rows, atol=1e-5)


def served(folder: Path, **options: Any) -> Any:
    """What a runner over the folder tells of itself. It answers text."""
    runner = build(folder, max_running=2, **options)
    with shared_pixels() as pixels:
        model = VisionModel("qwen3_vl", folder, pixels)
        assert len(Looped(runner).run(model.ask("text", head=9).submit)["text"]) == 10
    return runner.capabilities()


def test_what_is_told_of_a_tower(model_of: Callable[[str], VisionModel]) -> None:
    can = model_of("gemma3").runner.capabilities()
    assert can.modalities == ("text", "image")
    assert can.vision.layers == 5
    assert can.vision.whole
    assert can.no_images == ""
    assert can.details["vision"].startswith("gemma3, 4 layers")


def test_missing_tensors_are_told_and_text_is_served(tmp_path: Path) -> None:
    can = served(make_vision(tmp_path, "qwen3_vl", without="blocks.2.mlp"))
    assert can.modalities == ("text",)
    assert can.vision.layers == 0
    assert "tensors of its vision_tower are missing, such as vision_tower.blocks.2.mlp" in can.no_images


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [("depth", 3, "blocks.3."), ("deepstack_visual_indexes", [2], "deepstack_merger_list.1.")],
)
def test_tensors_without_a_place_are_told(field: str, value: Any, name: str, tmp_path: Path) -> None:
    """F5. Before, such a tower made other features without a word."""
    wrong = {**config_of("qwen3_vl")["vision_config"], field: value}
    can = served(make_vision(tmp_path, "qwen3_vl", more={"vision_config": wrong}))
    assert f"tensors of its vision_tower, such as vision_tower.{name}" in can.no_images


def test_tensors_of_other_shapes_are_told(tmp_path: Path) -> None:
    wrong = {**config_of("qwen3_vl")["vision_config"], "intermediate_size": 64}
    can = served(make_vision(tmp_path, "qwen3_vl", more={"vision_config": wrong}))
    assert "has shape (48, 32), and its config.json makes it (64, 32)" in can.no_images


def test_a_configuration_that_makes_no_tower_is_told(tmp_path: Path) -> None:
    wrong = {**config_of("qwen3_vl")["vision_config"], "num_heads": 0}
    can = served(make_vision(tmp_path / "a", "qwen3_vl", more={"vision_config": wrong}))
    assert "can't make its tower" in can.no_images
    folder = make_vision(tmp_path / "b", "qwen3_vl")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": None}))
    assert "names no image token" in served(folder).no_images


@pytest.mark.parametrize(("family", "field"), [("qwen3_vl", "depth"), ("gemma3", "num_hidden_layers")])
def test_a_tower_of_a_million_layers_is_told_before_it_is_made(family: str, field: str, tmp_path: Path) -> None:
    """F5. Before, it took all the memory of the machine."""
    folder = make_vision(tmp_path, family)
    config = config_of(family)
    config["vision_config"][field] = 1_000_000
    with pytest.raises(NoTower, match=f"its vision_config is broken: {field} is 1000000, and its tower has [0-9]+ ten"):
        load_parts(connect(_family(family)), folder, config)


@pytest.mark.parametrize(
    ("family", "numbers", "words"),
    [
        ("pixtral", {"rope_theta": 0}, "rope_theta is 0, and must be above 0"),
        ("gemma4", {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0, and must be above 0"),
        ("gemma3", {"layer_norm_eps": -1}, "layer_norm_eps is -1, and must be 0 to 1"),
    ],
)
def test_numbers_that_make_noise_of_images_are_told(
    family: str, numbers: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """F5. Before, every request with an image failed."""
    folder, config = make_vision(tmp_path, family), config_of(family)
    config["vision_config"] |= numbers
    with pytest.raises(NoTower, match=f"its vision_config is broken: {words}"):
        load_parts(connect(_family(family)), folder, config)


def test_the_tokens_of_gemma_3s_images_may_stand_where_transformers_writes_them(tmp_path: Path) -> None:
    """F5. Before, the tower had mlx-vlm's 256 of them whatever the folder said."""
    folder, config = make_vision(tmp_path, "gemma3"), config_of("gemma3")
    config["mm_tokens_per_image"] = config["text_config"].pop("mm_tokens_per_image")
    tower = Tower(load_parts(connect(_family("gemma3")), folder, config), _family("gemma3"), mx.float32)
    assert tower.count((1, 3, 48, 48), ()) == 9


@pytest.mark.parametrize("heads", [0.5, -1])
def test_a_tower_that_encodes_no_image_is_told(heads: float, tmp_path: Path) -> None:
    """F5. Before, the start failed for one, and every request with an image for the other."""
    wrong = {**config_of("qwen3_vl")["vision_config"], "num_heads": heads}
    can = served(make_vision(tmp_path, "qwen3_vl", more={"vision_config": wrong}))
    assert "the tower that its config.json makes can't encode an image: " in can.no_images


def test_an_unknown_choice_of_features_is_told(tmp_path: Path) -> None:
    """F5. Before, every request with an image failed."""
    folder = make_vision(tmp_path, "llava", more={"vision_feature_select_strategy": "cls"})
    config = json.loads((folder / "config.json").read_text())
    tower = Tower(load_parts(connect(_family("llava")), folder, config), _family("llava"), mx.float32)
    with pytest.raises(ValueError, match="vision_feature_select_strategy is 'cls', and must be 'default' or 'full'"):
        tower.blank((1, 3, 32, 32), ())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"deepstack_visual_indexes": [0, 1, 2]}, "adds to what 3 layers return (deepstack_visual_indexes), and the"),
        ({"deepstack_visual_indexes": [0, 1, 2, 3]}, "adds to what 4 layers return"),
        ({"out_hidden_size": 32}, "features of its vision tower have 32 numbers, and embeddings of its language model"),
    ],
)
def test_a_tower_of_another_language_model_is_told(
    changed: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5. Its weights are those of its configuration. Before, the warm-up ended in an assertion, or every request with
    an image failed."""
    config = config_of("qwen3_vl")
    monkeypatch.setitem(CONFIGS, "qwen3_vl", {**config, "vision_config": {**config["vision_config"], **changed}})
    assert words in served(make_vision(tmp_path, "qwen3_vl")).no_images


def test_without_mlx_vlm_text_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, version = make_vision(tmp_path, "qwen3_vl"), metadata.version

    def missing(name: str) -> str:
        if name == "mlx-vlm":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert "mlx-vlm is not installed: " in served(folder).no_images


@pytest.mark.parametrize("version", ["0.7.9", "0.8.0", "1.0"])
def test_another_mlx_vlm_is_told(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(NoTower, match=f"mlx-vlm {version} is installed, and it must be"):
        connect(_family("qwen3_vl"))


def test_an_mlx_vlm_that_lacks_names_or_can_not_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_NAMES", ("Model", "Moodel"))
    with pytest.raises(NoTower, match="has no Moodel for qwen3_vl"):
        connect(_family("qwen3_vl"))

    def fails(name: str) -> None:
        raise ImportError("no module named PIL")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(NoTower, match="no module named PIL"):
        connect(_family("qwen3_vl"))


def _family(name: str) -> Any:
    found = family_of(config_of(name))
    assert found is not None
    return found


def test_fields_of_the_language_model_may_stand_in_a_part_of_their_own() -> None:
    config = config_of("qwen2_5_vl")
    own = ("model_type", "vision_config", "image_token_id", "video_token_id")
    text = {key: value for key, value in config.items() if key not in own}
    nested = {**{key: config[key] for key in own}, "text_config": {**text, "model_type": "qwen2_5_vl_text"}}
    assert connect(_family("qwen2_5_vl")).new_model(nested).config.text_config.hidden_size == 64


def test_caches_that_count_tokens_take_no_images(tmp_path: Path) -> None:
    can = served(make_vision(tmp_path, "qwen3_vl"), padded=True)
    assert can.modalities == ("text",)
    assert "mlx-lm's caches count" in can.no_images


def test_a_text_model_has_no_reason(tmp_path: Path) -> None:
    assert family_of({"model_type": "qwen3"}) is None
    assert family_of({"model_type": "paligemma", "vision_config": {"hidden_size": 8}}) is None
    pixtral = family_of({"model_type": "llava", "vision_config": {"model_type": "pixtral"}})
    assert pixtral is not None
    assert pixtral.module == "pixtral"


def test_a_tower_that_leaves_no_memory_for_caches_is_told() -> None:
    assert loading._left(0, 10) == 0
    assert loading._left(30, 10) == 20
    with pytest.raises(NoTower, match="takes 10 B, and 10 B are there"):
        loading._left(10, 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_the_parts_and_layers_that_are_named(family: str) -> None:
    config = config_of(family)
    found = family_of(config)
    assert found is not None
    model = connect(found).new_model(config)
    assert all(tree_flatten(getattr(model, part).parameters()) for part in found.parts)
    assert Tower(model, found, mx.float32).layers == 4


def test_towers_are_made_in_a_process_without_transformers() -> None:
    """As the engine's: mlx-vlm's processors are not imported there."""
    program = (
        "from treadle.compose.unused_packages import hide_unused_packages\n"
        "hide_unused_packages()\n"
        "import sys\n"
        "from tests.support.tiny_vision import CONFIGS, FAMILIES, config_of\n"
        "from treadle.runner.mlxvlm import connect, family_of\n"
        "for name in FAMILIES:\n"
        "    connect(family_of(config_of(name))).new_model(config_of(name))\n"
        "found = [name for name in sys.modules if 'mlx_vlm.models' in name and '.processing_' in name]\n"
        "print(found, type(sys.modules['transformers']).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    assert done.stdout.split("\n")[-2] == "[] _StandIn"

"""Image settings of model folders, and the text that stands for an image: as the families' own processors write it."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.text.images import Layout, read_image_settings
from treadle.text.images.families import FAMILIES, NO_TOWER

VOCABULARY = {
    "<|image_pad|>": 1,
    "<image_soft_token>": 2,
    "<start_of_image>": 3,
    "<|image|>": 4,
    "[IMG]": 5,
    "<image>": 6,
    "<im_patch>": 7,
}
QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
}
QWEN25 = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
}
GEMMA3 = {"image_size": 896, "patch_size": 14}
CLIP = {"image_size": 336, "patch_size": 14}
MISTRAL3 = {"image_size": 1540, "patch_size": 14}
SMOLVLM = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": True}


def settings(kind: str, raw: Any = None, config: Any = None, processor: Any = None) -> Any:
    found, reason = read_image_settings(
        {"model_type": kind, "vision_config": {}, **(config or {})}, raw or {}, processor or {}, VOCABULARY.get
    )
    assert found is not None, reason
    assert reason == ""
    return found


@pytest.mark.parametrize(
    ("kind", "raw", "config", "processor", "expected"),
    [
        (
            "qwen3_vl",
            QWEN3,
            {},
            {},
            {"patch": 16, "merge": 2, "min_pixels": 65536, "max_pixels": 16777216, "resample": 3},
        ),
        ("qwen3_5", {}, {}, {"image_processor": QWEN3}, {"patch": 16, "max_pixels": 16777216, "token_id": 1}),
        ("qwen2_5_vl", QWEN25, {}, {}, {"patch": 14, "min_pixels": 3136, "max_pixels": 12845056}),
        ("qwen2_5_vl", {}, {}, {}, {"patch": 14, "min_pixels": 3136, "max_pixels": 1003520}),
        (
            "gemma3",
            {"size": {"height": 448, "width": 448}, "resample": 2},
            {"mm_tokens_per_image": 64},
            {},
            {"height": 448, "tokens": 64, "token_id": 2, "pan_and_scan": False},
        ),
        (
            "gemma3",
            {"do_pan_and_scan": None, "pan_and_scan_max_num_crops": None},
            {},
            {"image_seq_length": 100},
            {"height": 896, "tokens": 100},
        ),
        (
            "gemma4",
            {"max_soft_tokens": 140},
            {"vision_soft_tokens_per_image": 280},
            {},
            {"tokens": 140, "patch": 16, "pool": 3, "normalizes": False},
        ),
        (
            "mistral3",
            {"size": {"longest_edge": 1540}, "patch_size": 14},
            {"spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
            {"image_break_token": "[B]"},
            {"step": 28, "height": 1540, "row_end": "[B]"},
        ),
        (
            "pixtral",
            {"patch_size": {"height": 16, "width": 16}, "size": {"height": 100, "width": 200}},
            {},
            {},
            {"step": 16, "height": 100, "width": 200},
        ),
        ("pixtral", {"patch_size": [14, 14], "size": 300}, {}, {}, {"step": 14, "height": 300, "width": 300}),
        (
            "llava",
            {"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}},
            {"vision_config": {"patch_size": 14}},
            {},
            {"typical_tokens": 576, "edge": 336},
        ),
        (
            "llava",
            {"crop_size": 224, "size": 224},
            {"vision_feature_select_strategy": "full"},
            {"patch_size": 14},
            {"typical_tokens": 257, "edge": 0},
        ),
        (
            "llava",
            {"do_center_crop": False, "size": {"height": 384, "width": 384}},
            {
                "vision_config": {"patch_size": 16, "image_size": 384, "model_type": "siglip_vision_model"},
                "vision_feature_select_strategy": "full",
            },
            {},
            {"typical_tokens": 576, "shape": (384, 384)},
        ),
        ("smolvlm", SMOLVLM, {}, {"image_seq_len": 64}, {"edge": 2048, "tile": 512, "tokens": 64}),
        (
            "idefics3",
            {"size": 728},
            {"vision_config": {"patch_size": 14}, "scale_factor": 2},
            {},
            {"edge": 728, "tokens": 169},
        ),
        ("idefics3", {"max_image_size": 512}, {}, {}, {"tile": 512, "tokens": 169}),
        (
            "lfm2-vl",
            {"do_image_splitting": False, "resample": 2, "encoder_patch_size": 16},
            {"use_image_special_tokens": False},
            {},
            {"patches": 1024, "resample": 2, "marks": False},
        ),
        ("lfm2_vl", {"tile_size": 1024}, {}, {"use_image_special_tokens": True}, {"patches": 4096, "marks": True}),
    ],
)
def test_settings_are_read_from_the_folders_files(
    kind: str, raw: Any, config: Any, processor: Any, expected: dict[str, Any]
) -> None:
    found = settings(kind, raw, config, processor)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "raw", "reason"),
    [
        ({"model_type": "llama"}, {}, NO_TOWER),
        ({"model_type": "qwen3_vl", "vision_config": None}, {}, NO_TOWER),
        ({"model_type": "florence2", "vision_config": {}}, {}, "images of models of type 'florence2' are not served"),
        ({"vision_config": {}}, {}, "of type 'None'"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, {"patch_size": 0}, "image settings can't be used"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, {"patch_size": "16"}, "image settings can't be used"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, {"max_pixels": 1 << 40}, "image settings can't be used"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, {"image_mean": [1]}, "image settings can't be used"),
        ({"model_type": "gemma3", "vision_config": {}}, {"image_std": [0, 1, 1]}, "image settings can't be used"),
        (
            {"model_type": "llava", "vision_config": {}},
            {"do_center_crop": False, "size": {"shortest_edge": 9}},
            "several shapes",
        ),
        ({"model_type": "pixtral", "vision_config": {}}, {"size": "big"}, "image settings can't be used"),
        ({"model_type": "smolvlm", "vision_config": {}}, {"max_image_size": {}}, ""),
        (
            {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}},
            {"patch_size": 14},
            "patch_size is 16 in config.json, and 14 by the folder's image settings: download",
        ),
        ({"model_type": "qwen3_vl", "vision_config": {"spatial_merge_size": 4}}, {}, "spatial_merge_size is 4"),
        (
            {"model_type": "gemma3", "vision_config": {"image_size": 448}},
            {},
            "image_size is 448 in config.json, and 896",
        ),
        ({"model_type": "gemma4", "vision_config": {"pooling_kernel_size": 2}}, {}, "pooling_kernel_size is 2"),
        ({"model_type": "lfm2_vl", "vision_config": {"patch_size": 14}}, {}, "patch_size is 14"),
        (
            {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": 7},
            {},
            "image_token_id is 7 in config.json, and 1 by the tokenizer's <|image_pad|>: download",
        ),
        ({"model_type": "lfm2_vl", "vision_config": {}, "downsample_factor": 1}, {}, "downsample_factor is 1"),
        ({"model_type": "gemma3", "vision_config": GEMMA3}, {}, ""),
        ({"model_type": "gemma3", "vision_config": GEMMA3, "mm_tokens_per_image": 64}, {}, ""),
        (
            {"model_type": "gemma3", "vision_config": GEMMA3, "mm_tokens_per_image": 64},
            {"image_seq_length": 256},
            "a view of an image has 64 features by config.json, and 256 tokens by the image settings: download",
        ),
        (
            {"model_type": "gemma3", "vision_config": GEMMA3, "text_config": {"mm_tokens_per_image": 144}},
            {},
            "has 144 features by config.json, and 256",
        ),
        ({"model_type": "gemma3", "vision_config": GEMMA3, "mm_tokens_per_image": 10000}, {}, "can't be used"),
        (
            {"model_type": "gemma3", "vision_config": {**GEMMA3, "patch_size": 112}},
            {},
            "has 0 features by config.json, and 256",
        ),
        (
            {"model_type": "gemma4", "vision_config": {"position_embedding_size": 800}},
            {},
            "position_embedding_size is 800 in config.json, and an image has up to 840 patches in a row: download",
        ),
        ({"model_type": "llava", "vision_config": CLIP}, {}, ""),
        ({"model_type": "llava", "vision_config": CLIP, "vision_feature_select_strategy": "full"}, {}, ""),
        (
            {"model_type": "llava", "vision_config": CLIP},
            {"crop_size": 224},
            "image_size is 336 in config.json, and images have 224 x 224 pixels by their settings: download",
        ),
        (
            {"model_type": "llava", "vision_config": CLIP},
            {"crop_size": {"height": 168, "width": 672}},
            "images have 168 x 672 pixels",
        ),
        (
            {"model_type": "llava", "vision_config": CLIP, "vision_feature_select_strategy": None},
            {},
            "has 577 features by config.json, and 576 tokens",
        ),
        (
            {"model_type": "pixtral", "vision_config": {"patch_size": 16, "image_size": 1024}},
            {"size": {"longest_edge": 1024}},
            "",
        ),
        (
            {"model_type": "mistral3", "spatial_merge_size": 2, "vision_config": MISTRAL3},
            {"size": {"longest_edge": 1540}},
            "",
        ),
        (
            {"model_type": "pixtral", "vision_config": {"patch_size": 16, "image_size": 512}},
            {},
            "image_size is 512 in config.json, and images have up to 1024 pixels a side by their settings: download",
        ),
        ({"model_type": "smolvlm", "vision_config": {"patch_size": 14}, "scale_factor": 2}, {}, ""),
        (
            {"model_type": "smolvlm", "vision_config": {"patch_size": 14}, "scale_factor": 3},
            {},
            "scale_factor is 3 in config.json, and a view has 26 x 26 patches: download",
        ),
        ({"model_type": "gemma3", "vision_config": {}, "image_token_index": 2}, {}, ""),
        ({"model_type": "gemma3", "vision_config": {}, "image_token_index": 3}, {}, "image_token_index is 3"),
    ],
)
def test_a_folder_without_usable_settings_has_a_reason(config: Any, raw: Any, reason: str) -> None:
    found, why = read_image_settings(config, raw, {}, VOCABULARY.get)
    assert (found is None) == bool(reason)
    assert reason in why
    assert "\n" not in why


@pytest.mark.parametrize(
    ("config", "processor", "reason"),
    [
        (
            {"model_type": "idefics3", "vision_config": {"patch_size": 14}, "scale_factor": 2},
            {"image_seq_len": 64},
            "a view of an image has 169 features by config.json, and 64 tokens",
        ),
        ({"model_type": "llava", "vision_config": CLIP}, {"patch_size": 16}, "patch_size is 14 in config.json, and 16"),
        (
            {"model_type": "llava", "vision_config": CLIP},
            {"vision_feature_select_strategy": "full"},
            "has 576 features by config.json, and 577 tokens",
        ),
    ],
)
def test_a_processor_of_another_tower_has_a_reason(config: Any, processor: Any, reason: str) -> None:
    """F5. Before, every request with an image failed."""
    found, why = read_image_settings(config, {}, processor, VOCABULARY.get)
    assert found is None
    assert reason in why


def test_a_tokenizer_without_the_token_has_a_reason() -> None:
    found, why = read_image_settings({"model_type": "gemma4", "vision_config": {}}, {}, {}, lambda token: None)
    assert found is None
    assert "no token '<|image|>' for images" in why


def test_pixtral_as_transformers_has_it_is_no_llava() -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 16}}
    found, why = read_image_settings(config, {}, {}, {"[IMG]": 10}.get)
    assert found is not None, why
    assert found.text(Layout(grid=((32, 32),))) == "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]"


def test_every_family_has_defaults() -> None:
    for kind in FAMILIES:
        found = settings(kind)
        assert found.typical_tokens >= found.least_tokens >= 1
        assert found.token in found.literal_tokens


WHOLE = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
CROPS = f"Here is the original image {WHOLE} and here are some crops to help you see better {WHOLE} {WHOLE}"
GLOBAL = "<fake_token_around_image><global-img><image><image><fake_token_around_image>"
TILES = (
    "<|image_start|><|img_row_1_col_1|><image><|img_row_1_col_2|><image><|img_thumbnail|><image><image><|image_end|>"
)
ROW = "<fake_token_around_image><row_{0}_col_1><image><image><fake_token_around_image><row_{0}_col_2><image><image>\n"


@pytest.mark.parametrize(
    ("kind", "raw", "layout", "expected"),
    [
        ("qwen3_vl", {}, Layout(((1, 4, 6),)), "<|image_pad|>" * 6),
        ("gemma3", {"image_seq_length": 2}, Layout(), WHOLE.replace("_token>", "_token><image_soft_token>")),
        ("gemma3", {"image_seq_length": 1}, Layout((), (1, 2)), CROPS),
        ("gemma4", {}, Layout(((6, 3),)), "<|image><|image|><|image|><image|>"),
        ("pixtral", {}, Layout(((32, 48),)), "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"),
        ("llava", {"size": 28, "crop_size": 28}, Layout(), "<image>" * 4),
        ("smolvlm", {}, Layout(), GLOBAL),
        ("smolvlm", {}, Layout((), (2, 2)), ROW.format(1) + ROW.format(2) + "\n" + GLOBAL),
        ("lfm2_vl", {}, Layout(((4, 3),)), "<|image_start|>" + "<image>" * 4 + "<|image_end|>"),
        ("lfm2_vl", {}, Layout(((2, 2), (2, 2), (2, 4)), (1, 2)), TILES),
    ],
)
def test_the_text_of_an_image_is_that_of_the_familys_processor(
    kind: str, raw: Any, layout: Layout, expected: str
) -> None:
    assert settings(kind, raw, {}, {"image_seq_len": 2}).text(layout) == expected


def test_a_folder_may_leave_out_the_marks_of_views() -> None:
    layout = Layout(((2, 2), (2, 2), (2, 4)), (1, 2))
    assert settings("lfm2_vl", {}, {"use_image_special_tokens": False}).text(layout) == "<image>" * 4


def test_gemmas_tokens_have_the_names_that_its_tokenizer_gives() -> None:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<END>", "image_token": "<image>"}
    for kind, expected in (
        ("gemma3", "\n\n<start_of_image><image><END>\n\n"),
        ("gemma4", "<start_of_image><image><END>"),
    ):
        found, _ = read_image_settings(
            {"model_type": kind, "vision_config": {}, "mm_tokens_per_image": 1}, {}, {}, VOCABULARY.get, names
        )
        assert found is not None
        assert found.token_id == VOCABULARY["<image>"]
        assert found.text(Layout(((3, 3),))) == expected

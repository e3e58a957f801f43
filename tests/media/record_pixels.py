"""Record what mlx-vlm's and transformers' image processors make of pictures: `python -m tests.media.record_pixels`.

Needs mlx-vlm 0.7 and transformers 5, which tests do not: they read `pixels.json`.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.media.pictures import picture
from treadle.text.images import AnySettings

FILE = Path(__file__).with_name("pixels.json")
SAMPLES = 40
SIZES = ((40, 30), (97, 61), (60, 200), (300, 90), (5, 64))
LARGE = ((700, 500), (130, 90), (1300, 300), (200, 800))
PAN = {"pan_and_scan": True, "least_crop": 30, "crops": 4, "crop_ratio": 1.2}
PAN_THERE = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 30,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SQUARE = {"height": 56, "width": 56}
CASES: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("QwenImages", "qwen", {"patch": 14}, {"patch_size": 14}),
    ("QwenImages", "qwen", {"patch": 16}, {"patch_size": 16}),
    (
        "QwenImages",
        "qwen",
        {"max_pixels": 6400, "min_pixels": 900},
        {"patch_size": 14, "max_pixels": 6400, "min_pixels": 900},
    ),
    ("Gemma3Images", "gemma3", SQUARE, {"size": SQUARE}),
    ("Gemma3Images", "gemma3", SQUARE | PAN, {"size": SQUARE} | PAN_THERE),
    ("Gemma4Images", "gemma4", {"patch": 8, "tokens": 70}, {"patch_size": 8, "max_soft_tokens": 70}),
    ("PixtralImages", "pixtral", {"patch": 14, "merge": 2}, {"patch_size": 28}),
    ("PixtralImages", "pixtral", {"height": 100, "width": 100}, {"patch_size": 16, "size": {"longest_edge": 100}}),
    (
        "LlavaImages",
        "clip",
        {"edge": 56, "crop_height": 56, "crop_width": 56},
        {"size": {"shortest_edge": 56}, "crop_size": SQUARE},
    ),
    (
        "LlavaImages",
        "clip",
        {"edge": 40, "crop_height": 56, "crop_width": 56},
        {"size": {"shortest_edge": 40}, "crop_size": SQUARE},
    ),
    (
        "LlavaImages",
        "llava",
        {"edge": 56, "crop_height": 56, "crop_width": 56, "pads": True},
        {"size": {"shortest_edge": 56}, "crop_size": SQUARE, "do_pad": True},
    ),
    (
        "LlavaImages",
        "siglip",
        {"edge": 0, **SQUARE, "crop_height": 0, "crop_width": 0, "mean": [0.5] * 3, "std": [0.5] * 3},
        {"size": SQUARE},
    ),
    (
        "IdeficsImages",
        "smolvlm",
        {"edge": 160, "tile": 40},
        {"size": {"longest_edge": 160}, "max_image_size": {"longest_edge": 40}},
    ),
    (
        "IdeficsImages",
        "smolvlm",
        {"edge": 160, "tile": 40, "splits": False},
        {"size": {"longest_edge": 160}, "max_image_size": {"longest_edge": 40}, "do_image_splitting": False},
    ),
    (
        "Lfm2Images",
        "lfm2",
        {"tile": 64, "min_tokens": 4, "max_tokens": 16},
        {"tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 16},
    ),
)


def settings_of(family: str, fields: dict[str, Any]) -> Any:
    shared = {"type": family, "token": "<image>", "token_id": 9, "placeholder": "<image>", "placeholder_id": 9}
    return msgspec.convert(shared | fields, type=AnySettings)


def samples(pixels: np.ndarray) -> list[float]:
    """Values at evenly spaced places, the first and the last among them."""
    flat = pixels.reshape(-1)
    return [float(value) for value in flat[np.linspace(0, len(flat) - 1, SAMPLES).astype(int)]]


def main() -> None:
    sys.modules.setdefault("cv2", types.ModuleType("cv2"))  # mlx-vlm imports it for videos
    recorded = []
    for family, name, ours, theirs in CASES:
        for width, height in LARGE if name == "lfm2" else SIZES:
            layout, pixels = PROCESSORS[name](picture(width, height), theirs)
            case = {"family": family, "settings": ours, "size": [width, height], "shape": list(pixels.shape)}
            recorded.append(case | layout | {"samples": samples(pixels), "mean": float(pixels.mean(dtype=np.float64))})
    FILE.write_text("[\n" + ",\n".join(json.dumps(case) for case in recorded) + "\n]\n")


def _qwen(image: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

    found = Qwen3VLImageProcessor(**options)([image])
    return {"grid": np.array(found["image_grid_thw"]).tolist()}, np.array(found["pixel_values"])


def _gemma4(image: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4ImageProcessor

    found, counts = Gemma4ImageProcessor(**options)([image])
    return {"tokens": counts[0]}, np.array(found["pixel_values"])


def _pixtral(image: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor

    found = PixtralImageProcessor(**options)([image])
    return {"grid": [list(size) for size in found["image_sizes"]]}, found["pixel_values"]


def _lfm2(image: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from mlx_vlm.models.lfm2_vl.processing_lfm2_vl import Lfm2VlNumpyImageProcessor

    found = Lfm2VlNumpyImageProcessor(**options)([image])
    rows, columns = int(found["image_rows"][0]), int(found["image_cols"][0])
    tiles = [rows, columns] if rows * columns > 1 else [0, 0]
    return {"grid": found["spatial_shapes"].tolist(), "tiles": tiles}, found["pixel_values"]


def _smolvlm(image: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    found = SmolVLMImageProcessorPil(**options)([image], return_row_col_info=True, return_tensors="np")
    return {"tiles": [found["rows"][0][0], found["cols"][0][0]]}, found["pixel_values"][0]


def _pil(module: str, name: str) -> Any:
    def process(image: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        import importlib

        processor = getattr(
            importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), name
        )
        return {}, processor(**options)([image], return_tensors="np")["pixel_values"]

    return process


PROCESSORS = {
    "qwen": _qwen,
    "gemma3": _pil("gemma3", "Gemma3ImageProcessorPil"),
    "gemma4": _gemma4,
    "pixtral": _pixtral,
    "clip": _pil("clip", "CLIPImageProcessorPil"),
    "llava": _pil("llava", "LlavaImageProcessorPil"),
    "siglip": _pil("siglip", "SiglipImageProcessorPil"),
    "smolvlm": _smolvlm,
    "lfm2": _lfm2,
}


if __name__ == "__main__":
    main()

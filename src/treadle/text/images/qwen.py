"""Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: patches in the image's own shape, several to a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import Area, Count, ImageSettings, Layout, common_fields, given


class QwenImages(ImageSettings, frozen=True, kw_only=True, tag=True):
    """Sides are multiples of `patch` times `merge`; a token is `merge` x `merge` patches. The area is between
    `min_pixels` and `max_pixels`. The tower embeds a picture as if it were each of a video's frames."""

    of_tower: ClassVar[Mapping[str, str]] = {"patch": "patch_size", "merge": "spatial_merge_size"}

    patch: Count = 14
    merge: Count = 2
    min_pixels: Area = 56 * 56
    max_pixels: Area = 14 * 14 * 4 * 1280

    @property
    def typical_tokens(self) -> int:
        return max(1, min(self.max_pixels, 1 << 20) // (self.patch * self.merge) ** 2)

    def text(self, layout: Layout) -> str:
        frames, rows, columns = layout.grid[0]
        return self.token * (frames * rows * columns // self.merge**2)


def fields(raw: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a folder's settings."""
    older = str(config.get("model_type")) in ("qwen2_vl", "qwen2_5_vl")
    found: dict[str, Any] = {"patch": 14 if older else 16}
    found |= given(raw, patch="patch_size", merge="merge_size")
    size = raw.get("size") if isinstance(raw.get("size"), dict) else {}
    assert isinstance(size, dict)
    found |= given(size, min_pixels="shortest_edge", max_pixels="longest_edge")
    found |= given(raw, min_pixels="min_pixels", max_pixels="max_pixels")
    common = common_fields(raw)
    common.pop("resample", None)  # the processor's own is bicubic, whatever the folder says
    return {"token": "<|image_pad|>", "placeholder": "<|image_pad|>", **common, **found}

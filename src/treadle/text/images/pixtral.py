"""Images of Pixtral and Mistral 3: patches of the image's own shape, with a mark at the end of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import ClipSettings, Count, Layout, Side, Token, common_fields, given, side_of, size_of


class PixtralImages(ClipSettings, frozen=True, kw_only=True, tag=True):
    """An image has at most `height` x `width` pixels, in multiples of `patch` times `merge`, which are one token."""

    row_end: Token = "[IMG_BREAK]"
    end: Token = "[IMG_END]"
    patch: Count = 16
    merge: Count = 1
    height: Side = 1024
    width: Side = 1024

    @property
    def step(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def typical_tokens(self) -> int:
        return max(1, self.height * self.width // self.step**2)

    @property
    def literal_tokens(self) -> tuple[str, ...]:
        return (self.token, self.row_end, self.end)

    def text(self, layout: Layout) -> str:
        height, width = layout.grid[0]
        rows = [self.token * (width // self.step)] * (height // self.step)
        return self.row_end.join(rows) + self.end

    def contradiction(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> str:
        size, most = vision.get("image_size"), max(self.height, self.width)
        if type(size) is not int or -(-most // self.step) * self.merge <= size // self.patch:
            return ""
        return f"image_size is {size} in config.json, and images have up to {most} pixels a side by their settings"


def fields(raw: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a folder's settings."""
    vision = config.get("vision_config") if isinstance(config.get("vision_config"), dict) else {}
    assert isinstance(vision, dict)
    patches = [vision.get("patch_size"), side_of(raw.get("patch_size")), side_of(processor.get("patch_size"))]
    found: dict[str, Any] = {"patch": next((patch for patch in patches if patch is not None), 16)}
    found |= given(processor, merge="spatial_merge_size", row_end="image_break_token", end="image_end_token")
    found |= given(config, merge="spatial_merge_size")
    token = processor.get("image_token") or "[IMG]"
    size = size_of(raw.get("size") or processor.get("size"))
    edge = size.get("longest_edge")
    found |= {"height": edge, "width": edge} if edge is not None else given(size, height="height", width="width")
    return {"token": token, "placeholder": token, **common_fields(raw), **found}

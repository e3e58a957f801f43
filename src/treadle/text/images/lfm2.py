"""Images of LFM2-VL: one view of the image's own shape, or for a large image squares cut out of it and a small view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import BICUBIC, Count, Filter, ImageSettings, Layout, Positive, Side, Token, common_fields, given


class Lfm2Images(ImageSettings, frozen=True, kw_only=True, tag=True):
    """A token is `merge` x `merge` patches of `patch` pixels, and a view has `min_tokens` to `max_tokens` of them. An
    image with more than `tolerance` times as many pixels as that is cut into `min_tiles` to `max_tiles` squares of
    `tile` pixels. A view's patches are filled up to `patches`."""

    of_tower: ClassVar[Mapping[str, str]] = {"patch": "patch_size", "merge": "downsample_factor"}

    begin: Token = "<|image_start|>"
    end: Token = "<|image_end|>"
    small: Token = "<|img_thumbnail|>"
    marks: bool = True
    patch: Count = 16
    merge: Count = 2
    min_tokens: Count = 64
    max_tokens: Count = 256
    tile: Side = 512
    tolerance: Positive = 2.0
    min_tiles: Count = 2
    max_tiles: Count = 10
    resample: Filter = BICUBIC

    @property
    def patches(self) -> int:
        """Patches of each view, with padding."""
        return max(self.max_tokens * self.merge**2, (self.tile // self.patch) ** 2)

    @property
    def typical_tokens(self) -> int:
        return 4 * self.max_tokens

    @property
    def least_tokens(self) -> int:
        return max(1, self.min_tokens // 2)

    @property
    def literal_tokens(self) -> tuple[str, ...]:
        return (self.token, self.begin, self.end, self.small)

    def text(self, layout: Layout) -> str:
        views = [self.token * self._tokens(*view) for view in layout.grid]
        rows, columns = layout.tiles
        if rows * columns:
            names = [f"<|img_row_{row + 1}_col_{col + 1}|>" for row in range(rows) for col in range(columns)]
            names = [*names, self.small] if self.marks else [""] * len(views)
            views = [name + view for name, view in zip(names, views, strict=True)]
        whole = "".join(views)
        return f"{self.begin}{whole}{self.end}" if self.marks else whole

    def _tokens(self, rows: int, columns: int) -> int:
        return -(-rows // self.merge) * -(-columns // self.merge)


def fields(raw: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a folder's settings. Folders made for MLX turn the squares off, which the model was trained
    with; mlx-vlm turns them on again, and so does this."""
    found = given(raw, patch="patch_size") | given(raw, patch="encoder_patch_size")
    found |= given(raw, merge="downsample_factor", tile="tile_size", tolerance="max_pixels_tolerance")
    found |= given(raw, min_tokens="min_image_tokens", max_tokens="max_image_tokens")
    found |= given(config, marks="use_image_special_tokens") | given(processor, marks="use_image_special_tokens")
    return {"token": "<image>", "placeholder": "<image>", **common_fields(raw), **found}

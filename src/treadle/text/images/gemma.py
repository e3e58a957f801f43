"""Images of Gemma 3 (squares of one size) and Gemma 4 (the image's own shape, within a number of tokens)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from .base import (
    BILINEAR,
    LOW_SIDE,
    Count,
    Filter,
    ImageSettings,
    Layout,
    Positive,
    Side,
    Token,
    common_fields,
    counts,
    given,
    other_tokens,
    size_of,
)

Crops = Annotated[int, Meta(ge=2, le=64)]


class Gemma3Images(ImageSettings, frozen=True, kw_only=True, tag=True):
    """An image is resized to `height` x `width` and has `tokens` tokens. With `crops` a long one has further views:
    parts of it, at least `least_crop` pixels wide, where it is `crop_ratio` times as long as wide."""

    of_tower: ClassVar[Mapping[str, str]] = {"height": "image_size", "width": "image_size"}

    begin: Token = "<start_of_image>"
    end: Token = "<end_of_image>"
    height: Side = 896
    width: Side = 896
    tokens: Count = 256
    resample: Filter = BILINEAR
    pan_and_scan: bool = False
    least_crop: Side = 256
    crops: Crops = 4
    crop_ratio: Positive = 1.2

    @property
    def typical_tokens(self) -> int:
        return self.tokens

    @property
    def least_tokens(self) -> int:
        return self.tokens

    @property
    def literal_tokens(self) -> tuple[str, ...]:
        return (self.token, self.begin, self.end)

    def text(self, layout: Layout) -> str:
        view = f"\n\n{self.begin}{self.token * self.tokens}{self.end}\n\n"
        crops = layout.tiles[0] * layout.tiles[1]
        if not crops:
            return view
        others = " ".join([view] * crops)
        return f"Here is the original image {view} and here are some crops to help you see better {others}"

    def contradiction(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> str:
        text = config.get("text_config")
        given = {"mm_tokens_per_image": 256, **(text if isinstance(text, Mapping) else {}), **config, **vision}
        found = counts(given, "image_size", "patch_size", "mm_tokens_per_image")
        if not found:
            return ""
        size, patch, tokens = found
        side, kept = size // patch, isqrt(tokens)
        return other_tokens((side // (side // kept)) ** 2 if side >= kept else 0, self.tokens)


class Gemma4Images(ImageSettings, frozen=True, kw_only=True, tag=True):
    """Sides are multiples of `patch` times `pool`; a token is `pool` x `pool` patches. `tokens` are the most
    of an image."""

    of_tower: ClassVar[Mapping[str, str]] = {"patch": "patch_size", "pool": "pooling_kernel_size"}

    begin: Token = "<|image>"
    end: Token = "<image|>"
    patch: Count = 16
    pool: Count = 3
    tokens: Count = 280
    normalizes: bool = False

    @property
    def typical_tokens(self) -> int:
        return self.tokens

    @property
    def low_tokens(self) -> int:
        """Tokens of an image with `detail: low`."""
        return min(self.tokens, max(1, LOW_SIDE * LOW_SIDE // (self.patch * self.pool) ** 2))

    @property
    def literal_tokens(self) -> tuple[str, ...]:
        return (self.token, self.placeholder, self.begin, self.end)

    def text(self, layout: Layout) -> str:
        rows, columns = layout.grid[0]
        return self.begin + self.token * (rows * columns // self.pool**2) + self.end

    def contradiction(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> str:
        places, most = vision.get("position_embedding_size"), self.tokens * self.pool
        if type(places) is not int or places >= most:
            return ""
        return f"position_embedding_size is {places} in config.json, and an image has up to {most} patches in a row"


def fields3(raw: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Gemma 3 folder."""
    found = given(size_of(raw.get("size")), height="height", width="width")
    found |= given(config, tokens="mm_tokens_per_image") | given(raw, tokens="image_seq_length")
    found |= given(processor, tokens="image_seq_length")
    found |= given(
        raw,
        pan_and_scan="do_pan_and_scan",
        least_crop="pan_and_scan_min_crop_size",
        crops="pan_and_scan_max_num_crops",
        crop_ratio="pan_and_scan_min_ratio_to_activate",
    )
    begin = processor.get("boi_token") or "<start_of_image>"
    token = processor.get("image_token") or "<image_soft_token>"
    found |= given(processor, end="eoi_token")
    return {"token": token, "placeholder": begin, "begin": begin, **common_fields(raw), **found}


def fields4(raw: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Gemma 4 folder."""
    found = given(config, tokens="vision_soft_tokens_per_image")
    found |= given(raw, patch="patch_size", pool="pooling_kernel_size", tokens="max_soft_tokens")
    common = common_fields(raw)
    common.pop("resample", None)  # the processor's own is bicubic
    token = processor.get("image_token") or "<|image|>"
    found |= given(processor, begin="boi_token", end="eoi_token")
    return {"token": token, "placeholder": token, **common, **found}

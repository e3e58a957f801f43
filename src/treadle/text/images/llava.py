"""Images of LLaVA 1.5: the middle of the image, as a square of one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from .base import LARGEST_SIDE, ClipSettings, Count, Layout, Side, common_fields, counts, given, other_tokens, size_of

SideOrNone = Annotated[int, Meta(ge=0, le=LARGEST_SIDE)]


class LlavaImages(ClipSettings, frozen=True, kw_only=True, tag=True):
    """The shorter side is resized to `edge` (with `edge` 0 both sides, to `height` x `width`), and the middle of
    `crop_height` x `crop_width` is kept (0: all). It has a token for each `patch` x `patch` pixels and `more` others.
    With `pads` the image is first filled up to a square with its mean."""

    of_tower: ClassVar[Mapping[str, str]] = {"patch": "patch_size"}

    edge: SideOrNone = 336
    height: Side = 336
    width: Side = 336
    crop_height: SideOrNone = 336
    crop_width: SideOrNone = 336
    patch: Count = 14
    more: Annotated[int, Meta(ge=0, le=1)] = 0
    pads: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the pixels."""
        if self.crop_height and self.crop_width:
            return self.crop_height, self.crop_width
        return self.height, self.width

    @property
    def typical_tokens(self) -> int:
        height, width = self.shape
        return (height // self.patch) * (width // self.patch) + self.more

    @property
    def least_tokens(self) -> int:
        return self.typical_tokens

    def text(self, layout: Layout) -> str:
        return self.token * self.typical_tokens

    def contradiction(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> str:
        found = counts(vision, "image_size")
        if not found:
            return ""
        sides = {side // self.patch for side in (*self.shape, *found)}
        if len(sides) > 1:
            high, wide = self.shape
            return f"image_size is {found[0]} in config.json, and images have {high} x {wide} pixels by their settings"
        with_class = _with_class(config.get("vision_feature_select_strategy", "default") or "full", vision)
        return other_tokens(self.typical_tokens - self.more + with_class, self.typical_tokens)


def fields(raw: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a folder's settings. Raises ValueError for a shape that depends on the image."""
    vision = config.get("vision_config") if isinstance(config.get("vision_config"), dict) else {}
    assert isinstance(vision, dict)
    side = vision.get("image_size") or 336
    size = size_of(raw.get("size") or {"shortest_edge": side})
    crop = size_of(raw.get("crop_size") or {"height": side, "width": side})
    crops = raw.get("do_center_crop") is not False
    edge = size.get("shortest_edge")
    if edge is not None and not crops:
        raise ValueError("images of several shapes, as do_center_crop is false, are not served")
    found: dict[str, Any] = {
        "edge": edge or 0,
        "height": size.get("height") or side,
        "width": size.get("width") or side,
    }
    found |= {"crop_height": crop.get("height", 0), "crop_width": crop.get("width", 0)} if crops else {}
    found |= {} if crops else {"crop_height": 0, "crop_width": 0}
    found |= given(vision, patch="patch_size") | given(processor, patch="patch_size")
    strategy = processor.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy")
    token = processor.get("image_token") or "<image>"
    more = {"more": _with_class(strategy, vision), "pads": raw.get("do_pad") is True}
    return {"token": token, "placeholder": token, **common_fields(raw), **found, **more}


def _with_class(strategy: Any, vision: Mapping[str, Any]) -> int:
    """Return how many features of an image are none of a patch."""
    return int(strategy == "full" and vision.get("model_type", "clip_vision_model") == "clip_vision_model")

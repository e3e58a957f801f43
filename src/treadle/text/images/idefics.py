"""Images of SmolVLM and Idefics 3: squares cut out of the image row by row, and the whole image in one more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import (
    LANCZOS,
    Count,
    Filter,
    ImageSettings,
    Layout,
    Side,
    Token,
    common_fields,
    counts,
    given,
    other_tokens,
    side_of,
)


class IdeficsImages(ImageSettings, frozen=True, kw_only=True, tag=True):
    """The longer side is resized to `edge`; with `splits` the image is then cut into squares of `tile` pixels. Each
    view has `tokens` tokens."""

    around: Token = "<fake_token_around_image>"
    whole: Token = "<global-img>"
    edge: Side = 4 * 364
    tile: Side = 364
    tokens: Count = 169
    splits: bool = True
    resample: Filter = LANCZOS

    @property
    def typical_tokens(self) -> int:
        return self.tokens * ((self.edge // self.tile) ** 2 + 1 if self.splits else 1)

    @property
    def least_tokens(self) -> int:
        return self.tokens

    @property
    def literal_tokens(self) -> tuple[str, ...]:
        return (self.token, self.around, self.whole)

    def text(self, layout: Layout) -> str:
        rows, columns = layout.tiles
        view = self.token * self.tokens
        lines = (
            "".join(f"{self.around}<row_{row + 1}_col_{column + 1}>{view}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        tiles = "".join(lines) + ("\n" if rows else "")
        return f"{tiles}{self.around}{self.whole}{view}{self.around}"

    def contradiction(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> str:
        found = counts(vision, "patch_size") + counts(config, "scale_factor")
        if len(found) < 2:
            return ""
        patch, scale = found
        side = self.tile // patch
        if side % scale:
            return f"scale_factor is {scale} in config.json, and a view has {side} x {side} patches"
        return other_tokens((side // scale) ** 2, self.tokens)


def fields(raw: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a folder's settings."""
    found = given(processor, tokens="image_seq_len")
    size = raw.get("size")
    found |= {} if size is None else {"edge": (size.get("longest_edge") if isinstance(size, dict) else side_of(size))}
    tile = raw.get("max_image_size")
    found |= {} if tile is None else {"tile": side_of(tile)}
    if "tokens" not in found:
        found |= _tokens(config, found.get("tile", 364))
    found |= given(raw, splits="do_image_splitting")
    found = {name: value for name, value in found.items() if value is not None}
    return {"token": "<image>", "placeholder": "<image>", **common_fields(raw), **found}


def _tokens(config: dict[str, Any], tile: Any) -> dict[str, Any]:
    """Return the tokens of a view by the tower's patches, where no file tells their number."""
    vision, factor = config.get("vision_config"), config.get("scale_factor")
    patch = vision.get("patch_size") if isinstance(vision, dict) else None
    if not (isinstance(patch, int) and isinstance(factor, int) and isinstance(tile, int) and patch > 0 and factor > 0):
        return {}
    return {"tokens": (tile // patch) ** 2 // factor**2}

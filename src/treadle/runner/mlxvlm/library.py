"""Import and check of mlx-vlm: version, modules and names that this server relies on."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from types import ModuleType
from typing import Any

from ...errors import ModelError, one_line
from ...installation import install_command
from .families import VisionFamily
from .processors import without_processors

SUPPORTED = ((0, 7, 10), (0, 8))
_NAMES = ("Model", "ModelConfig", "VisionConfig", "TextConfig")
_OF_MODEL = ("mm_tokens_per_image",)
"""Fields that mlx-vlm reads from the language model's part, and transformers writes beside it."""
_CURE = install_command("vision")


class NoTower(ModelError):
    """There is no vision tower for a model, for this reason."""


class MlxVlm:
    """A family's module of mlx-vlm. Build it with `connect`."""

    def __init__(self, module: ModuleType, family: VisionFamily, version: str) -> None:
        self.version = version
        self.family = family
        self._module = module

    def new_model(self, config: dict[str, Any]) -> Any:
        """mlx-vlm's model for `config`, with random parameters that are not computed. Raises NoTower. Fields of the
        language model may stand beside the others, or in a part of their own: families read either."""
        module, text = self._module, config.get("text_config") or {}
        text = {**text, **{name: config[name] for name in _OF_MODEL if config.get(name) is not None}}
        given = {**text, **config, "text_config": text}
        try:
            made = module.ModelConfig.from_dict(given)
            made.text_config = module.TextConfig.from_dict(dict(given["text_config"]))
            made.vision_config = module.VisionConfig.from_dict(self._vision(config))
            return module.Model(made)
        except Exception as error:
            raise NoTower(f"mlx-vlm {self.version} can't make its tower: {one_line(error)}") from error

    def _vision(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration of the tower. That of a Qwen-VL has a type of its own since transformers 5."""
        vision, own = dict(config["vision_config"]), self.family.module
        later = self.family.axes and vision.get("model_type") == f"{own}_vision"
        return {**vision, "model_type": own} if later else vision


def connect(family: VisionFamily) -> MlxVlm:
    """mlx-vlm's module for `family`, imported and checked. Raises NoTower, which says what is missing."""
    try:
        version = metadata.version("mlx-vlm")
    except metadata.PackageNotFoundError:
        raise NoTower(f"mlx-vlm is not installed: {_CURE}") from None
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not SUPPORTED[0] <= parts < SUPPORTED[1]:
        raise NoTower(f"mlx-vlm {version} is installed, and it must be at least 0.7.10 and below 0.8: {_CURE}")
    kept = dict(os.environ)
    try:
        with without_processors():
            module = importlib.import_module(f"mlx_vlm.models.{family.module}")
    except Exception as error:  # packages that do not fit each other raise anything at import
        raise NoTower(f"mlx-vlm {version} can't be imported ({one_line(error)}): {_CURE}") from error
    finally:
        os.environ.clear()
        os.environ.update(kept)  # it sets variables of other libraries
    if missing := [name for name in _NAMES if not hasattr(module, name)]:
        raise NoTower(f"mlx-vlm {version} has no {', '.join(missing)} for {family.module}: {_CURE}")
    return MlxVlm(module, family, version)

"""Model folder on this disk, with its source and config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Source(StrEnum):
    """Origin of a model folder."""

    DEMO = "demo"
    FOLDER = "folder"
    HUB = "hub"


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder.

    `name`: the public model id, unless settings give another. `config`: the parsed config.json, empty until the folder
    has passed `folder_checks.check`. `draft` and `scorer`: the folders of the models that draft its tokens and
    score its prompts, if there are such.
    """

    path: Path
    name: str
    source: Source
    config: Mapping[str, Any]
    draft: ModelFolder | None = None
    scorer: ModelFolder | None = None

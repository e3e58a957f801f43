"""A model's folder on this disk, found and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Source(StrEnum):
    """Where a model folder came from."""

    DEMO = "demo"
    FOLDER = "folder"
    HUB = "hub"


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder.

    `name` is the public model id unless settings give another; `config` is the parsed config.json, once the folder has
    passed `trust.check`.
    """

    path: Path
    name: str
    source: Source
    config: Mapping[str, Any]

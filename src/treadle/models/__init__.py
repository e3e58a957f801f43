"""Model sources: a folder, the Hugging Face hub, or the packaged demo. Nothing here loads or runs a model."""

from __future__ import annotations

from .folder import ModelFolder, Source
from .resolve import resolve

__all__ = ["ModelFolder", "Source", "resolve"]

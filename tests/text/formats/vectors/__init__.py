"""Answers and their events, one module a format or family of formats, each with `VECTORS`."""

from __future__ import annotations

import importlib
import pkgutil

from .vector import Vector


def all_vectors() -> list[Vector]:
    """Every vector of every module."""
    found = []
    for module in pkgutil.iter_modules(__path__):
        if module.name not in ("vector", "family"):
            found += importlib.import_module(f"{__name__}.{module.name}").VECTORS
    return found

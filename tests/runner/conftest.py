from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import Architecture, make_tiny
from treadle.runner.loader import load
from treadle.runner.model import LoadedModel
from treadle.runner.text import TextRunner

Tiny = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Loads a tiny random model by architecture, once for each."""
    known: dict[Any, LoadedModel] = {}

    def get(architecture: Architecture = "llama") -> LoadedModel:
        if architecture not in known:
            folder: Path = tmp_path_factory.mktemp("model") / architecture
            known[architecture] = load(make_tiny(folder, architecture=architecture))
        return known[architecture]

    return get


@pytest.fixture
def runner(tiny: Tiny) -> TextRunner:
    """A runner over the tiny llama."""
    return TextRunner(tiny("llama"))

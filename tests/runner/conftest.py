from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.runner.families import FAMILIES, make_family
from tests.support.tiny import Architecture, make_tiny
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner

Tiny = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Loads a tiny random model by architecture or family, with what else `load` takes; once for each."""
    known: dict[Any, LoadedModel] = {}
    folders: dict[str, Path] = {}

    def get(architecture: str = "llama", **options: Any) -> LoadedModel:
        if architecture in FAMILIES:
            options.setdefault("max_running", 8)  # for each of which recurrent layers have slots
        key = (architecture, *sorted(options.items()))
        if key not in known:
            if architecture not in folders:
                folders[architecture] = _make(tmp_path_factory.mktemp("model") / architecture, architecture)
            known[key] = load(folders[architecture], **options)
        return known[key]

    return get


def _make(folder: Path, architecture: str) -> Path:
    if architecture in get_args(Architecture):
        return make_tiny(folder, architecture=architecture)  # type: ignore[arg-type]
    return make_family(folder, architecture)


@pytest.fixture(params=[False, True], ids=["contiguous", "padded"])
def either(request: pytest.FixtureRequest, tiny: Tiny) -> Tiny:
    """The same, with both backends."""
    return lambda architecture="llama", **options: tiny(architecture, padded=request.param, **options)


@pytest.fixture
def runner(either: Tiny) -> ModelRunner:
    """A runner over the tiny llama, with both backends."""
    return ModelRunner(either("llama"))

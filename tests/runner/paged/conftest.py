from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.runner.paged.models import loaded, make
from tests.runner.paged.models import paged as paged_config
from treadle.runner.loading.model import LoadedModel

Paged = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def paged() -> Paged:
    """A random model by name, its rows in pages; `fused` says whether its layers are, where that can be. One module a
    name, and one for each number of pages."""
    modules: dict[str, Any] = {}
    known: dict[tuple[str, int], Any] = {}

    def get(name: str = "llama", *, pages: int = 256, fused: bool = True) -> LoadedModel:
        if name not in modules:
            modules[name] = make(name)
        if (name, pages) not in known:
            known[name, pages] = paged_config(modules[name], pages=pages)
        return loaded(modules[name], known[name, pages], fused=fused)

    return get

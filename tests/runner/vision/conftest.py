from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.runner.vision.asked import VisionModel
from tests.support.shared_pixels import SharedPixels, shared_pixels


@pytest.fixture(scope="session")
def shared() -> Iterator[SharedPixels]:
    with shared_pixels() as made:
        yield made


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory, shared: SharedPixels) -> Callable[[str], VisionModel]:
    """A family's model, made once."""
    known: dict[str, VisionModel] = {}

    def get(family: str) -> VisionModel:
        if family not in known:
            known[family] = VisionModel.make(tmp_path_factory.mktemp("vision") / family, family, shared)
        return known[family]

    return get

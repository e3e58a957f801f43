from __future__ import annotations

from pathlib import Path

import pytest

from treadle.text import TextModel

from . import builders


@pytest.fixture(scope="session")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    """One loaded model of each kind of tokenizer."""
    root: Path = tmp_path_factory.mktemp("models")
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    loaded = {}
    for kind, build in {**builders.KINDS, **builders.OTHER_KINDS}.items():
        config = named if kind in ("sentence", "gemma") else {}
        folder = builders.write_folder(root / kind, build(), tokenizer_config=config)
        loaded[kind] = TextModel.load(folder)
    return loaded


@pytest.fixture(scope="session")
def byte_level(text_models: dict[str, TextModel]) -> TextModel:
    return text_models["byte_level"]


@pytest.fixture(scope="session")
def sentence(text_models: dict[str, TextModel]) -> TextModel:
    return text_models["sentence"]

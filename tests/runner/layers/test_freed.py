"""Replaced layers go with their model, without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest

from tests.runner.paged.models import make
from treadle.runner.layers.choose import FasterLayers


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v2", "qwen3_next", "jamba"])
def test_a_model_on_a_cpu_frees_its_weights_when_nobody_has_it(name: str) -> None:
    before = mx.get_active_memory()
    module = make(name)
    layers = FasterLayers(module, "cpu")
    layers.install()
    mx.eval(module(mx.array([[1, 2, 3]])))
    assert len(layers) > 10
    del module, layers
    assert mx.get_active_memory() - before <= 256  # constants of functions that are compiled once

"""Architectures of every kind of state: their greedy tokens are mlx-lm's on each path, and the paths those of the docs.

`python -m tests.runner.all_families` runs all architectures on all paths.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks import models_table

from tests.runner.drive import run_alone
from tests.runner.family_fidelity import Judge, Known, faults, requests
from tests.runner.family_paths import chosen, every_path
from tests.support.architectures import ARCHITECTURES, UNAVAILABLE, config_of
from treadle.runner.model_runner import ModelRunner

EVERY_PATH = ["llama", "gemma3_text"]
"""Full attention with fused layers, and windows."""
BEST_PATH = ["qwen3_next", "jamba", "lfm2", "falcon_h1"]
"""Hybrids with the gated delta rule, Mamba 1, convolutions and Mamba 2. The logits of all are in
`recurrent/test_families`; the other kinds in `test_fidelity`, `test_shared_kv` and `paged/test_attention_kinds`."""
OWN = ("paged", "contiguous")
"""Backends that are not mlx-lm's caches."""


@pytest.mark.parametrize("architecture", EVERY_PATH)
def test_tokens_are_mlx_lms_on_every_path(architecture: str) -> None:
    known: Known = {}
    found = {name: faults(model, known) for name, model in every_path(config_of(architecture))}
    assert {"contiguous", "padded", "serial"} <= found.keys()
    assert not any(found.values()), found


@pytest.mark.parametrize("architecture", BEST_PATH)
def test_tokens_are_mlx_lms_on_the_path_for_cuda(architecture: str) -> None:
    assert faults(chosen(config_of(architecture), "cuda")) == []


def test_a_token_that_mlx_lm_would_not_have_picked_is_found() -> None:
    """Else the tests above would show nothing."""
    model, request = chosen(config_of("gemma3_text"), "cpu"), requests(0)[2]
    tokens, judge = run_alone(ModelRunner(model), request), Judge(model, {})
    assert judge.departure(request, tokens) == ""
    for place in range(len(tokens)):
        wrong = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
        assert f"departs at token {place}" in judge.departure(request, wrong)
    assert "tokens and not" in judge.departure(request, tokens[:-1])


def _recorded() -> dict[str, Any]:
    """The paths on CUDA, by architecture, of those that have one of Treadle's own."""
    recorded = json.loads(models_table.RECORD.read_text("utf-8"))["architectures"]
    good = {name: paths["cuda"] for name, paths in recorded.items() if paths.get("cuda", {}).get("backend") in OWN}
    return {name: path for name, path in good.items() if "text_config" not in ARCHITECTURES[name]}


@pytest.mark.parametrize("name", _recorded())
def test_an_architecture_has_not_lost_its_path_in_the_docs(name: str) -> None:
    """After a change that is meant: `python benchmarks/models_table.py --record`, which also sees better paths."""
    assert models_table.path_of(config_of(name), "cuda") == _recorded()[name]


def test_common_architectures_have_paths_of_their_own() -> None:
    assert _recorded().keys() >= {"llama", "qwen3_moe", "gemma3_text"}


def test_every_architecture_of_mlx_lm_has_a_tiny_configuration() -> None:
    assert {*ARCHITECTURES, *UNAVAILABLE} == set(_modules())


def _modules() -> Iterator[str]:
    """mlx-lm's modules that hold a model, or another one's."""
    library = find_spec("mlx_lm")
    assert library is not None
    assert library.origin is not None
    for path in (Path(library.origin).parent / "models").glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        if "ModelArgs" in names:
            yield path.stem

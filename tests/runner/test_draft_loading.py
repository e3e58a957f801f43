"""A draft model beside the served one: what is refused at the start, and how both share the memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.architectures import ARCHITECTURES
from tests.support.embedding_models import make_qwen3_embedding
from tests.support.mtp_models import random_tensors
from tests.support.tiny import make_tiny
from treadle.core.capabilities import Capabilities, SpeculationCapabilities, StepCapabilities
from treadle.errors import ConfigError, ModelError
from treadle.runner.build import build
from treadle.runner.device import memory
from treadle.runner.loading.draft import DraftModel, ModelPair, load_beside
from treadle.runner.loading.loader import load
from treadle.runner.model_runner import ModelRunner

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_tiny(made / "target", layers=3)
    make_tiny(made / "draft", layers=1, context=512)
    return made


def pair(folders: Path, **options: Any) -> ModelPair:
    target = load(folders / "target", **options)
    return load_beside(target, DraftModel(folders / "draft", "small"), options)


def test_one_budget_holds_the_same_number_of_tokens_in_both_caches(folders: Path) -> None:
    budget = 64 << 20
    target, draft = pair(folders, memory=budget, max_running=4)
    assert target.kv_budget_bytes + draft.kv_budget_bytes == budget
    assert target.draft_budget_bytes == draft.kv_budget_bytes
    assert target.kv.token_bytes == 3 * draft.kv.token_bytes
    blocks = [one.choice.config.blocks for one in (target, draft)]  # type: ignore[attr-defined]
    assert blocks[0] > 100
    assert 0 <= blocks[1] - blocks[0] <= 1, "the draft's memory never runs out first"


def test_a_model_of_recurrent_layers_alone_keeps_memory_for_its_states(tmp_path: Path) -> None:
    config = {**ARCHITECTURES["mamba2"], "model_type": "mamba2"}
    folder = tmp_path / "mamba2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), random_tensors(config, 0))
    options: dict[str, Any] = {"memory": 64 << 20, "max_running": 4}
    draft = DraftModel(make_tiny(tmp_path / "draft"))
    target, second = load_beside(load(folder, **options), draft, options)
    least = target.choice.config.least_memory(4).nbytes
    assert target.kv_budget_bytes > 2 * least, "as many states again are kept of prefixes"
    assert second.kv_budget_bytes > second.choice.config.least_memory(4).nbytes


def test_weights_of_the_draft_take_their_part_of_a_budget_that_was_not_asked_for(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "usable_bytes", lambda kind: (1 << 30) + mx.get_active_memory())
    alone = load(folders / "target")
    target, draft = load_beside(alone, DraftModel(folders / "draft"), {})
    taken = alone.kv_budget_bytes - target.kv_budget_bytes - draft.kv_budget_bytes
    assert taken == int(memory.BUDGET_SHARE * draft.weight_bytes)


def test_details_name_the_draft_and_what_it_takes(folders: Path) -> None:
    target, _ = pair(folders, memory=64 << 20)
    line = target.details["draft model"]
    assert line.startswith("small (llama, ")
    for part in ("parameters, float32", "of weights", "16 MiB of KV cache", "contiguous KV backend", "512 tokens of"):
        assert part in line, line


def test_two_models_whose_weights_do_not_fit_together_are_refused(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(folders / "target")
    monkeypatch.setattr(memory, "usable_bytes", lambda kind: mx.get_active_memory() + 1000)
    with pytest.raises(ModelError, match=r"`draft` can't be used: the weights of draft take .* and 1000 B are free"):
        load_beside(target, DraftModel(folders / "draft"), {})


def test_a_budget_that_the_draft_leaves_no_room_for_is_refused(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"memory": 1 << 30}
    target = load(folders / "target", **options)
    most = mx.get_active_memory() + (1 << 30)
    monkeypatch.setattr(memory, "most_bytes", lambda kind: most)
    with pytest.raises(ConfigError, match=r"`memory` is 1.0 GiB, and .* are left beside the weights"):
        load_beside(target, DraftModel(folders / "draft"), options)


def test_weights_that_leave_no_memory_for_caches_are_refused(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "usable_bytes", lambda kind: mx.get_active_memory() + 300_000)
    target = load(folders / "draft")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"draft model small take .* leave no memory for caches") as caught:
        load_beside(target, DraftModel(folders / "target", "small"), {})
    assert caught.value.param == "draft"


def test_embedding_models_neither_draft_nor_are_drafted_for(folders: Path, tmp_path: Path) -> None:
    embedder = make_qwen3_embedding(tmp_path / "embedder")
    with pytest.raises(ModelError, match="`draft` embedder is an embedding model and generates no text"):
        load_beside(load(folders / "target"), DraftModel(embedder), {})
    with pytest.raises(ConfigError, match="embedder generates no text to draft: leave `draft` out"):
        load_beside(load(embedder), DraftModel(folders / "draft"), {})


def with_drafters(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    can = SpeculationCapabilities(names, "" if names else "its caches can't be cut")
    given = Capabilities("m", "a", 1, 1, "cpu", "float32", steps=StepCapabilities(speculation=can))
    monkeypatch.setattr(ModelRunner, "capabilities", lambda runner: given)


@pytest.mark.parametrize(("speculate", "kind"), [("auto", "lookup+draft"), ("draft", "draft")])
def test_a_draft_model_drafts_beside_look_up_or_alone(
    folders: Path, speculate: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_drafters(monkeypatch, kind)
    runner = build(folders / "target", draft=DraftModel(folders / "draft"), speculate=speculate)
    assert runner._speculation.drafter is not None
    assert runner._speculation.drafter.names == tuple(kind.split("+"))


def test_a_draft_model_for_a_model_that_can_verify_no_drafts_is_refused(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_drafters(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"`draft` is small, and target can't verify .*: its caches can't be cut; leave"
    ):
        build(folders / "target", draft=DraftModel(folders / "draft", "small"))


def test_a_budget_without_room_for_a_block_of_each_sequence_names_the_model_that_lacks_it(folders: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft needs .* of cache for 16 sequences"):
        build(folders / "target", draft=DraftModel(folders / "draft"), memory=1 << 20, max_running=16)

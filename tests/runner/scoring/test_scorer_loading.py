"""A scorer beside the served model: what is refused at the start, and what both have of the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.runner.families import make_family
from tests.runner.paged.models import loaded, make, paged
from tests.support.embedding_models import make_qwen3_embedding
from tests.support.tiny import make_tiny
from treadle.errors import ConfigError, ModelError
from treadle.runner.build import build
from treadle.runner.device import memory
from treadle.runner.device.owner_thread import OutOfMemory
from treadle.runner.loading import scorer as loading
from treadle.runner.loading.draft import DraftModel
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.scorer import ScorerModel, load_scorer, with_longer_steps

OPTIONS: dict[str, Any] = {"memory": 64 << 20, "max_running": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_tiny(made / "target", layers=3)
    make_tiny(made / "scorer", layers=1, context=512)
    make_tiny(made / "small", layers=1)
    make_qwen3_embedding(made / "embedder")
    make_family(made / "mamba", "mamba")
    return made


@pytest.fixture
def scorer(folders: Path) -> ScorerModel:
    return ScorerModel(folders / "scorer", "small", 0.3, 256)


def test_a_scorer_has_memory_for_one_prompt_of_full_length(folders: Path, scorer: ScorerModel) -> None:
    pair = load_scorer(load(folders / "target", **OPTIONS), scorer, OPTIONS)
    least = pair.draft.choice.config.least_memory(4).nbytes
    assert pair.draft.kv_budget_bytes == least + (512 + 8 + 512) * pair.draft.kv.token_bytes
    assert pair.target.kv_budget_bytes + pair.draft.kv_budget_bytes == OPTIONS["memory"]
    assert pair.target.draft_budget_bytes == pair.draft.kv_budget_bytes
    assert pair.target.details["scorer"].startswith("small (llama, ")


def pages(context: int = 40_960, **changed: Any) -> LoadedModel:
    module = make("llama", **changed)
    return replace(loaded(module, paged(module)), context=context)


@pytest.mark.parametrize(
    ("ratio", "asked", "fits", "longest"),
    [
        *((9, 2048, 0, 8192), (4, 2048, 0, 8192), (3.9, 2048, 0, 4096), (1.5, 2048, 0, 2048), (9, 2048, 512, 2048)),
        *((9, 8192, 0, 8192), (9, 16_384, 0, 16_384)),
    ],
)
def test_steps_of_a_scorer_are_as_long_as_the_memory_of_the_models_allows(
    ratio: float, asked: int, fits: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step of the model is shorter than asked for, as memory is short, the scorer's has no more of it."""
    target, scorer = pages(), pages()
    target = replace(target, choice=replace(target.choice, prefill_tokens=fits))
    monkeypatch.setattr(
        loading, "pass_bytes", lambda _, module, tokens: tokens * (ratio if module is target.module else 1)
    )
    found = with_longer_steps(target, scorer, asked)
    config: Any = found.choice.config
    assert found.prefill_tokens == config.step_tokens == longest


def test_a_pass_of_a_small_model_takes_less_memory() -> None:
    big, small = pages(intermediate_size=4096), pages()
    assert with_longer_steps(big, small, 128).prefill_tokens >= 256
    assert with_longer_steps(small, big, 128).prefill_tokens == 128
    assert with_longer_steps(big, pages(context=200), 128).prefill_tokens == 128, "no prompt is longer"


def test_steps_are_no_longer_than_the_models_where_memory_is_short(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OutOfMemory("no memory")

    target, scorer = pages(), pages()
    short = replace(scorer, choice=replace(scorer.choice, prefill_tokens=256))
    assert with_longer_steps(target, short, 2048).prefill_tokens == 256
    long = replace(scorer, choice=replace(scorer.choice, prefill_tokens=2048))
    shorter = replace(target, choice=replace(target.choice, prefill_tokens=512))
    monkeypatch.setattr(loading, "pass_bytes", fail)
    assert with_longer_steps(shorter, long, 2048).prefill_tokens == 512
    other = load(folders / "scorer", **OPTIONS)
    assert with_longer_steps(target, other, 2048) is other


def test_a_scorer_is_loaded_for_longer_steps(
    folders: Path, scorer: ScorerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than those that were asked for, also where it drafts, too."""
    asked = list[tuple[str, int]]()

    def noted(target: LoadedModel, scorer: LoadedModel, prefill_tokens: int) -> LoadedModel:
        asked.append((scorer.name, prefill_tokens))
        return scorer

    monkeypatch.setattr(loading, "with_longer_steps", noted)
    target = load(folders / "target", **OPTIONS)
    load_scorer(target, scorer, {**OPTIONS, "prefill_tokens": 700})
    load_scorer(target, scorer, OPTIONS, loaded=load(folders / "scorer", **OPTIONS))
    assert asked == [("small", 700), ("small", 2048)]


def test_windows_of_a_scorer_have_pages_beside_those_of_its_longest_prompt() -> None:
    module = make("gemma3")
    config = replace(paged(module), max_running=4, step_tokens=8192)
    assert config.windows
    budget = 1000 * config.page_bytes + config.most_window_bytes
    assert config.with_memory(budget).pages >= 1000
    assert config.with_memory(budget - config.most_window_bytes).pages < 1000


def test_a_runner_tells_what_it_scores(folders: Path, scorer: ScorerModel) -> None:
    runner = build(folders / "target", spec_prefill=scorer, **OPTIONS)
    can = runner.capabilities().steps.spec_prefill
    assert (can.scorer, can.keep, can.min_tokens, can.longest) == ("small", 0.3, 256, 504)
    runner.warm_up()
    runner.close()
    assert not build(folders / "target", **OPTIONS).capabilities().steps.spec_prefill.scorer


def test_a_model_that_drafts_too_scores_as_long_prompts_as_alone(folders: Path, scorer: ScorerModel) -> None:
    """It is loaded for the sequences that it drafts for, and scores four at most."""
    options = {**OPTIONS, "memory": 1 << 24, "max_running": 64}
    draft = DraftModel(scorer.folder, "small")
    runner = build(folders / "target", draft=draft, spec_prefill=scorer, **options)
    assert runner.capabilities().steps.spec_prefill.longest == 504
    runner.close()


def test_a_model_that_drafts_and_scores_is_loaded_once(folders: Path, scorer: ScorerModel) -> None:
    draft = DraftModel(scorer.folder, "small")
    runner = build(folders / "target", draft=draft, spec_prefill=scorer, speculate="draft", **OPTIONS)
    drafter: Any = runner._speculation.drafter
    assert runner._scorer is not None
    assert drafter._drafter._model.module is runner._scorer._model.module
    assert drafter._drafter._backend is not runner._scorer._backend
    runner.close()


@pytest.mark.parametrize(
    ("target", "named", "options", "message"),
    [
        (
            "target",
            "mamba",
            {},
            "`spec_prefill` mamba can't score prompts: it has no layer with attention to",
        ),
        ("target", "embedder", {}, "`spec_prefill` embedder is an embedding model and generates no text"),
        ("embedder", "scorer", {}, "embedder generates no text to prefill in part: leave `spec_prefill` out"),
        ("target", "scorer", {"padded": True}, "target can't prefill a part of a prompt: mlx-lm's caches count"),
    ],
)
def test_models_that_do_not_suit_are_refused(
    folders: Path, target: str, named: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ModelError), match=message) as caught:
        build(folders / target, spec_prefill=ScorerModel(folders / named), **OPTIONS, **options)
    assert caught.value.param == "spec_prefill"


@pytest.mark.parametrize(
    ("context", "named", "least", "longest"),
    [(2048, "target", 8192, 2040), (2048, "scorer", 513, 504), (600, "target", 600, 599)],
)
def test_a_minimum_that_no_prompt_reaches_is_refused(
    folders: Path, context: int, named: str, least: int, longest: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(folders / "target", spec_prefill=ScorerModel(folders / named, "", 0.3, least), context=context, **OPTIONS)
    assert caught.value.param == "spec_prefill_min"
    assert caught.value.message == (
        f"`spec_prefill_min` is {least}, and the longest prompt that target and its scorer have a context for has "
        f"{longest} tokens, so none would be scored: give less, or leave `spec_prefill` out"
    )


@pytest.mark.parametrize(("running", "longest"), [(2, 760), (6, 255)], ids=["of the scorer", "of the model"])
def test_a_minimum_that_no_cache_holds_is_refused(folders: Path, running: int, longest: int) -> None:
    options: dict[str, Any] = {"memory": 1 << 20, "max_running": running}
    with pytest.raises(ConfigError) as caught:
        build(folders / "target", spec_prefill=ScorerModel(folders / "small", "", 0.3, 1500), **options)
    assert caught.value.param == "spec_prefill_min"
    assert caught.value.message == (
        "`spec_prefill_min` is 1500, and the longest prompt that target and its scorer have memory for has "
        f"{longest} tokens, so none would be scored: give less, give more `memory`, or leave `spec_prefill` out"
    )


def test_memory_that_is_not_there_is_refused(
    folders: Path, scorer: ScorerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(folders / "target")
    monkeypatch.setattr(memory, "usable_bytes", lambda kind: mx.get_active_memory() + 1000)
    with pytest.raises(ModelError, match=r"`spec_prefill` can't be used: the weights of scorer take .* are free"):
        load_scorer(target, ScorerModel(scorer.folder), {})
    monkeypatch.setattr(memory, "usable_bytes", lambda kind: mx.get_active_memory() + 300_000)
    small = load(folders / "scorer")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"weights of the scorer big take .* leave no memory for caches") as caught:
        load_scorer(small, ScorerModel(folders / "target", "big"), {})
    assert caught.value.param == "spec_prefill"


def test_memory_that_holds_no_scorer_is_told_as_the_scorers_need(folders: Path, scorer: ScorerModel) -> None:
    """Fewer running sequences would leave it no less to hold."""
    with pytest.raises(ConfigError) as caught:
        build(folders / "target", spec_prefill=scorer, memory=30_000, max_running=6)
    assert caught.value.param == "spec_prefill"
    assert caught.value.message.startswith("the scorer small needs ")
    assert caught.value.message.endswith(" are there: give more `memory`, or leave `spec_prefill` out")

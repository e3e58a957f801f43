"""CUDA graphs for decode steps alone, by a library with the same variable as MLX's."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.noted_switch import NotedSwitch
from tests.runner.scoring.prompts import LEAST, TOKENS
from tests.support.emulated import compiler
from treadle.core.compute_path import KernelState
from treadle.core.messages import Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.runner.device.cuda_graphs import (
    DECIDED,
    FLAG,
    GraphSwitch,
    graph_switch,
    has_switch,
    library_of_mlx,
    symbols,
)
from treadle.runner.drafting.lookup import LookupDrafter
from treadle.runner.model_runner import ModelRunner
from treadle.runner.scoring.scorer import Scorer

_SOURCE = """
extern "C" bool answer();
namespace mlx { namespace core { namespace cu {
namespace {
bool use_cuda_graphs() { static bool use_graphs = answer(); return use_graphs; }
}
bool used() { return use_cuda_graphs(); }
}}}
extern "C" bool used() { return mlx::core::cu::used(); }
extern "C" bool answer() { return ANSWER; }
"""


def _built(folder: Path, answer: str = "true", *options: str) -> Path:
    source, made = folder / "library.cc", (folder / f"lib{answer}{len(options)}.so").resolve()
    source.write_text(_SOURCE.replace("ANSWER", answer), encoding="ascii")
    subprocess.run([compiler(), "-shared", "-fPIC", *options, str(source), "-o", str(made)], check=True, timeout=60)
    return made


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return _built(tmp_path)


def test_the_variable_of_a_loaded_library_is_changed_inside_of_the_block(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    loaded.used.restype = ctypes.c_bool
    switch = GraphSwitch(library)
    with pytest.raises(ValueError, match="not decided"):
        assert switch.on
    assert loaded.used()
    assert switch.on
    with switch.single_launches():
        assert not loaded.used()
    assert loaded.used()
    with pytest.raises(RuntimeError, match="a step fails"), switch.single_launches():
        raise RuntimeError("a step fails")
    assert loaded.used()


def test_it_is_active_where_mlx_uses_graphs(library: Path) -> None:
    ctypes.CDLL(str(library)).used()
    assert has_switch(library)
    found = graph_switch(library)
    assert found.kernel is not None
    assert found.status.state is KernelState.ACTIVE


def test_it_does_not_apply_without_graphs_or_without_the_variable(tmp_path: Path, library: Path) -> None:
    off, bare = _built(tmp_path, "false"), _built(tmp_path, "true", "-s")
    for one in (off, bare):
        ctypes.CDLL(str(one)).used()
    text = tmp_path / "text"
    text.write_text("no library")
    reasons = [
        (off, "MLX_USE_CUDA_GRAPHS is 0"),
        (bare, "has no table of symbols"),
        (library, "is not loaded"),
        (text, "is no library of this system"),
        (tmp_path / "missing", "can't be read"),
        (library_of_mlx(), "has no"),  # MLX of the CPU
    ]
    for one, reason in reasons:
        found = graph_switch(one)
        assert found.kernel is None
        assert found.status.state is KernelState.NOT_APPLICABLE
        assert reason in found.status.reason
    assert [has_switch(one) for one, _ in reasons] == [True, False, True, False, False, False]


def test_a_library_that_is_cut_off_has_no_symbols(tmp_path: Path, library: Path) -> None:
    whole = library.read_bytes()
    for length in (0, 4, 32, 64, 700, len(whole) - 1000):
        cut = tmp_path / "cut.so"
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"."):
            symbols(cut, FLAG, DECIDED)


def test_only_steps_that_decode_use_graphs(tiny: Tiny) -> None:
    switch = NotedSwitch()
    runner = ModelRunner(replace(tiny("llama"), graphs=switch))  # type: ignore[arg-type]
    one, two = (Submit(id=id_, prompt=(5, 6, 7), max_tokens=9) for id_ in ("one", "two"))
    plans = [
        (StepPlan(0, (Admit(one),), (PrefillChunk("one", 0, 2),)), 1),
        (StepPlan(1, decode=(DecodeRow("one", 0),)), 0),
        (StepPlan(2, (Admit(two),), (PrefillChunk("two", 0, 2),), (DecodeRow("one", 1),)), 1),
        (StepPlan(3, decode=(DecodeRow("one", 2), DecodeRow("two", 0))), 0),
    ]
    for plan, single in plans:
        switch.single = 0
        runner.execute(plan)
        assert switch.single == single
    runner.close()


def test_a_step_beside_a_scorer_uses_graphs_and_so_does_its_look_ahead(tiny: Tiny) -> None:
    """Chunks of the scored prompt come in all sizes."""
    switch, scored = NotedSwitch(), list[tuple[str, bool]]()

    class Noting(Scorer):
        def _compute(self, *args: Any) -> None:
            scored.append(("chunk", switch.off))
            super()._compute(*args)

        def _look_ahead(self, *args: Any) -> None:
            scored.append(("look-ahead", switch.off))
            super()._look_ahead(*args)

        def _wait_for_chunks(self, sequence: Any, chunks: Any) -> None:
            scored.append(("warm-up", switch.off))
            super()._wait_for_chunks(sequence, chunks)

    model = replace(tiny("llama"), graphs=switch)  # type: ignore[arg-type]
    runner = ModelRunner(model, scorer=Noting(tiny("llama"), TOKENS, keep=0.5, min_tokens=LEAST))
    runner.warm_up()
    assert scored[0] == ("warm-up", True)
    assert scored[-1] == ("warm-up", False), "of the look-ahead"
    scored.clear()
    passes, compute = list[bool](), runner._backend.compute

    def noted(segments: Any, *args: Any, **named: Any) -> Any:
        passes.extend([switch.off] * bool(segments))
        return compute(segments, *args, **named)

    runner._backend.compute = noted  # type: ignore[method-assign]
    loop = Looped(runner, prefill_tokens=200)
    loop.submit(Submit("short", (1, 2, 3), max_tokens=40))
    while not loop.tokens("short"):
        loop.step()
    passes.clear()
    loop.submit(Submit("long", tuple(range(200)) * 2, max_tokens=1))
    while loop.scheduler.statistics(0.0, runner.statistics()).spec_prefill.prompts == 0:
        loop.step()
    assert passes
    assert not any(passes)
    assert {("chunk", True), ("look-ahead", False)} == set(scored)
    loop.run()
    assert any(passes), "its own chunks"
    runner.close()


@pytest.mark.parametrize("in_graphs", [False, True])
def test_steps_that_verify_drafts_use_them_where_that_was_found_to_be_faster(tiny: Tiny, in_graphs: bool) -> None:
    switch = NotedSwitch()
    prompt = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)
    during = list[bool]()

    class Noting(LookupDrafter):
        def propose(self, rows: Any, most: Any) -> Any:
            during.append(switch.off)
            return super().propose(rows, most)

    runner = ModelRunner(replace(tiny("llama"), graphs=switch), drafter=Noting())  # type: ignore[arg-type]
    assert not runner.verifies_in_graphs
    runner.verifies_in_graphs = in_graphs
    runner.execute(StepPlan(0, (Admit(Submit("one", prompt, 9)),), (PrefillChunk("one", 0, len(prompt) - 1),)))
    runner.execute(StepPlan(1, decode=(DecodeRow("one", 0),), propose=True))
    switch.single = 0
    with runner.filled_drafts():
        runner.execute(StepPlan(2, decode=(DecodeRow("one", 1, drafts=2),)))
    assert switch.single == (not in_graphs)
    assert during == [False], "passes that draft are alike"
    runner.close()


@pytest.mark.parametrize("graphs_s", [0.5, 2.0])
def test_the_warm_up_finds_how_steps_that_verify_are_faster(tiny: Tiny, graphs_s: float) -> None:
    """Told among the details, and the steps of the way that was found are warmed up."""
    now, ways = 0.0, list[bool]()

    class Timed(ModelRunner):
        def start(self, plan: StepPlan) -> None:
            nonlocal now
            super().start(plan)
            if plan.verifies:
                ways.append(self.verifies_in_graphs)
                now += graphs_s if self.verifies_in_graphs else 1.0

    switch: Any = NotedSwitch()
    model = replace(tiny("llama"), graphs=switch, details={})
    runner = Timed(model, clock=lambda: now, drafter=LookupDrafter())
    runner.warm_up()
    assert runner.verifies_in_graphs == ways[-1] == (graphs_s < 1)
    told = runner.capabilities().details["verifying steps"]
    assert told.startswith("CUDA graphs: " if graphs_s < 1 else "single launches: ")
    assert f"takes {graphs_s:.2f} of the time" in told
    runner.close()

"""`treadle bench engine`: both engines on the tiny model, its figures, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.support.tiny import make_tiny
from treadle.bench.engine_figures import OURS, THEIRS, BatchRun, EngineResult, RunRecorder, agreement, batch_of
from treadle.bench.engine_table import engine_table
from treadle.bench.errors import BenchError
from treadle.bench.inprocess import EngineBench, measure, prompts
from treadle.cli.bench_engine import engine_command
from treadle.runner.loading import loader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", context=256)


@pytest.fixture(scope="module")
def result(folder: Path) -> EngineResult:
    said: list[str] = []
    found = measure(folder, "tiny", EngineBench(batches=(1, 9), prompt=20, tokens=60, rounds=2), said.append)
    order = [line.rpartition(" ")[2] for line in said if "batch 9, round" in line]
    assert order == [OURS, THEIRS, THEIRS, OURS]  # interleaved, and each goes first once
    return found


# Both engines --------------------------------------------------------------------------------------------------------


def test_both_engines_give_the_same_greedy_tokens(result: EngineResult) -> None:
    assert [batch.all_equal for batch in result.batches] == [True, True]
    assert [[round_.rows for round_ in batch.agreement] for batch in result.batches] == [[1, 1], [9, 9]]


def test_the_model_is_loaded_for_steps_of_the_measured_length(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Else memory would be profiled for other steps, and their length would bound the measured ones."""
    loads: list[dict[str, Any]] = []

    def load(folder: Path, **options: Any) -> Any:
        loads.append(options)
        return truly(folder, **options)

    truly = loader.load
    monkeypatch.setattr(loader, "load", load)
    measure(folder, "tiny", EngineBench(batches=(1,), prompt=4, tokens=2, rounds=1, prefill_tokens=7), print)
    assert [options["prefill_tokens"] for options in loads] == [7]


def test_every_figure_is_there_for_both_engines_in_every_round(result: EngineResult) -> None:
    for batch in result.batches:
        names = [row.figure.name for row in batch.figures]
        assert names == ["decode", "step p50", "step p99", "prefill", "all have begun", "whole run", "peak memory"]
        for row in batch.figures:
            assert [len(row.values[engine].values) for engine in (OURS, THEIRS)] == [2, 2], row.figure.name
            assert len(row.ratios[OURS].values) == 2
            assert min(min(values.values) for values in row.values.values()) > 0


def test_ratios_are_treadles_over_mlx_lms_of_the_same_round(result: EngineResult) -> None:
    for row in result.batches[1].figures:
        for ratio, ours, theirs in zip(
            row.ratios[OURS].values, row.values[OURS].values, row.values[THEIRS].values, strict=True
        ):
            assert ratio == pytest.approx(ours / theirs)


def test_the_parts_of_a_run_are_within_the_whole(result: EngineResult) -> None:
    for seen in result.batches[1].passes:
        assert 0 < seen.prefill_s <= seen.first_s < seen.wall_s
        assert sum(seen.full_step_s) <= seen.wall_s - seen.first_s + 1e-9
        assert seen.peak_bytes > 400_000  # the weights


def test_a_batch_above_mlx_lms_default_is_decoded_whole(folder: Path) -> None:
    found = measure(folder, "tiny", EngineBench(batches=(40,), prompt=3, tokens=30, rounds=1))
    assert all(seen.full_step_s for seen in found.batches[0].passes)


def test_the_result_survives_its_file(result: EngineResult) -> None:
    assert msgspec.json.decode(msgspec.json.encode(result), type=EngineResult) == result


def test_the_table_shows_each_engine_and_the_agreement(result: EngineResult) -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(engine_table(result))
    text = capture.get()
    assert "batch 9: greedy tokens equal in all 18 rows" in text
    assert re.search(r"peak memory .* MiB .* MiB .*×", text)


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batches": ()}, "--batch"),
        ({"batches": (1, 0)}, "--batch 0"),
        ({"batches": (2000,)}, "--batch 2000"),
        ({"prompt": 0}, "--prompt 0"),
        ({"tokens": 1}, "--tokens 1"),
        ({"rounds": 0}, "--rounds 0"),
        ({"threads": 0}, "--threads 0"),
        ({"prefill_tokens": 0}, "--prefill-tokens 0"),
    ],
)
def test_what_makes_no_sense_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BenchError, match=named):
        EngineBench(**options)


def test_a_prompt_longer_than_the_context_is_refused(folder: Path) -> None:
    with pytest.raises(BenchError, match="the context of tiny is 256"):
        measure(folder, "tiny", EngineBench(prompt=250, tokens=7))


def test_a_model_whose_rows_cannot_share_a_step_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.runner import mlxlm

    monkeypatch.setattr(mlxlm.MlxLm, "can_merge", lambda self, caches: False)
    monkeypatch.setattr(mlxlm.MlxLm, "layer_windows", lambda self, model: None)
    with pytest.raises(BenchError, match="BatchGenerator can't run tiny"):
        measure(folder, "tiny", EngineBench())


def test_an_engine_that_breaks_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.generate import BatchGenerator

    def broken(self: BatchGenerator) -> None:
        raise RuntimeError("[malloc] no room\nfor that")

    monkeypatch.setattr(BatchGenerator, "next", broken)
    with pytest.raises(BenchError, match=r"failed at batch 1 \(\[malloc\] no room for that\)"):
        measure(folder, "tiny", EngineBench(prompt=5, tokens=3))


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(engine_command)
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("FOLDER", "--batch", "0"),
        ("FOLDER", "--batch", "one"),
        ("FOLDER", "--prompt", "1000"),
        ("no/such/folder/here",),
        ("FOLDER", "--json", "/proc/nowhere/result.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(folder: Path, arguments: tuple[str, ...]) -> None:
    done = invoke(*(str(folder) if argument == "FOLDER" else argument for argument in arguments))
    assert done.exit_code == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("treadle bench: ")]
    assert len(told) == 1
    assert done.stderr.splitlines()[-1] == told[0]
    assert "Traceback" not in done.output


def test_the_command_writes_its_result(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = invoke(str(folder), "--batch", "2", "--prompt", "8", "--tokens", "4", "--rounds", "1", "--json", str(out))
    assert done.exit_code == 0, done.output
    assert "greedy tokens equal in all 2 rows" in done.stdout
    assert msgspec.json.decode(out.read_bytes(), type=EngineResult).model == "tiny"


# Plain values --------------------------------------------------------------------------------------------------------


def test_prompts_are_the_same_for_a_seed_and_others_in_every_round() -> None:
    bench = EngineBench(prompt=9)
    assert prompts(bench, 3, 1, 500) == prompts(bench, 3, 1, 500)
    assert not set(prompts(bench, 3, 1, 500)) & set(prompts(bench, 3, 2, 500))
    assert prompts(bench, 3, 1, 500) != prompts(EngineBench(prompt=9, seed=1), 3, 1, 500)
    assert all(0 <= token < 5 for prompt in prompts(bench, 3, 1, 5) for token in prompt)


def test_a_record_tells_full_steps_from_those_that_wait_for_a_row() -> None:
    record = RunRecorder(2, 3)
    record.step([], 1.0)
    record.step([(0, 7)], 2.0)
    record.step([(0, 8), (1, 7)], 4.0)  # row 1 begins
    record.step([(0, 9), (1, 8)], 8.0)  # both decode
    assert not record.done
    record.step([(1, 9)], 16.0)  # row 0 has ended
    assert record.done
    assert (record.first_s, record.wall_s) == (7.0, 31.0)
    assert (record.full_step_s, record.full_tokens) == ([8.0], 2)


def test_a_divergence_is_found_where_it_begins() -> None:
    assert agreement(1, [[1, 2, 3]], [[1, 2, 3]]).first_divergence is None
    found = agreement(1, [[1, 2, 3], [1, 2, 3], [1, 2]], [[1, 2, 9], [1, 2, 3], [1]])
    assert (found.rows, found.equal, found.first_divergence) == (3, 1, 1)


def test_a_round_without_full_steps_has_no_decode_rate() -> None:
    passes = [
        BatchRun(OURS, 1, 4.0, 2.0, 1.0, (0.5, 0.5), 8, 10),
        BatchRun(THEIRS, 1, 8.0, 4.0, 2.0, (), 0, 20),
    ]
    batch = batch_of(4, 11, 16, passes, [agreement(1, [[1]], [[2]])])
    figures = {row.figure.name: row for row in batch.figures}
    assert figures["decode"].values[OURS].values == (8.0,)
    assert THEIRS not in figures["decode"].values
    assert figures["decode"].ratios == {}
    assert figures["prefill"].values[OURS].values == (40.0,)
    assert figures["whole run"].ratios[OURS].values == (2.0,)
    assert figures["peak memory"].ratios[OURS].values == (0.5,)
    assert not batch.all_equal

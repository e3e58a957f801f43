"""Tables of the documents, as `benchmarks/figures.py` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import figures

from tests.bench.results import burst

TAIL = "peak 17.8 GB; ratio"
LOG = f"""# fused: kind standard, fused True
8B 16 bits, 1 x 616: floor 3.54 ms; fused 4.47 ms = 79 %, peak 18.5 GB; generator 10.50 ms = 34 %, {TAIL} 0.43
8B 16 bits, 32 x 8192: floor 8.01 ms; fused 10.90 ms = 73 %, peak 59.6 GB
0.6B 4 bits, 8 x 616: floor 0.21 ms; fused 3.74 ms = 6 %, peak 4.0 GB; generator 8.59 ms = 2 %, {TAIL} 0.44
"""


@pytest.mark.parametrize("page", list(figures.documents()), ids=lambda page: page.name)
def test_the_documents_have_the_tables_of_the_figure_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.filled(text) == text


def test_each_figure_file_stands_in_a_document_and_has_rows_as_wide_as_its_columns() -> None:
    used = {match["name"] for page in figures.documents() for match in figures.BLOCK.finditer(page.read_text("utf-8"))}
    of_models = {"models", "models-h200"}  # in docs/models.md, by benchmarks/models_table.py
    assert used == {path.stem for path in figures.FOLDER.glob("*.json")} - of_models
    for name in used:
        table = figures.read(name)
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_steps_are_read_from_what_the_gpu_s_script_prints() -> None:
    columns, rows = figures.of_steps(LOG)
    assert rows[0] == ["8B bf16", "1 x 616", "3.54 ms", "4.47 ms", "79 %", "10.50 ms", "0.43"]
    assert rows[1] == ["", "32 x 8,192", "8.01 ms", "10.90 ms", "73 %", "", ""]
    assert rows[2][0] == "0.6B int4"
    assert {len(row) for row in rows} == {len(columns)}


def test_a_benchmark_s_figures_are_one_column_a_target() -> None:
    columns, rows = figures.of_bench(burst(a=(0.4, 0.6), b=0.5), [], [])
    assert columns == ["workload", "figure", "a", "b"]
    assert rows[0] == ["burst", "TTFT p50 ↓", "500 ms (400..600)", "500 ms"]

"""A short run of every fuzzer; `benchmarks/fuzz.py` runs them for as long as one likes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.poison.attacked import attacked
from tests.poison.fuzz import files, wires
from tests.poison.fuzz.runs import over_files, over_wires
from tests.poison.fuzz.wires import Target

SEED = 16
CASES = {"json": 150, "http": 150, "http2": 40, "grpc": 150}
CASES |= {"template": 100, "safetensors": 200, "gguf": 400, "config": 20, "tokenizer": 80}
MOST_S = 60.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with attacked(tmp_path_factory.mktemp("fuzz"), context=512) as found:
        yield found


@pytest.mark.parametrize("kind", wires.KINDS)
def test_mutated_requests_get_typed_answers(target: Target, kind: str) -> None:
    run = over_wires(kind, target, SEED, iter(range(CASES[kind])), time.monotonic() + MOST_S)
    assert run.cases
    assert not run.wrong, run


@pytest.mark.parametrize("kind", files.KINDS)
def test_mutated_files_are_read_or_refused(kind: str) -> None:
    run = over_files(kind, SEED, 0, CASES[kind], time.monotonic() + MOST_S)
    assert run.cases
    assert not run.wrong, run


def test_a_case_is_made_from_its_seed_alone() -> None:
    with_seed = [over_files("gguf", seed, 0, 60, time.monotonic() + MOST_S).outcomes for seed in (1, 1, 2)]
    assert with_seed[0] == with_seed[1] != with_seed[2]

"""R4: every hostile request of the corpus gets its answer, and costs nobody else anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.poison.attacked import attacked
from tests.poison.corpus import FOLDER, Poison, corpus
from tests.poison.fuzz.wires import Target

CORPUS = corpus()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One server for all; judged when all have been sent."""
    with attacked(tmp_path_factory.mktemp("poison"), context=8192) as found:
        yield found


@pytest.mark.parametrize("poison", CORPUS, ids=lambda poison: f"{poison.name}-{poison.front}")
def test_it_gets_its_answer(target: Target, poison: Poison) -> None:
    answer = poison.send(target.host, target.port, target.channel)
    assert not poison.wrong(answer), poison.why


def test_the_corpus_is_large_and_sends_to_every_front() -> None:
    fronts = Counter(poison.front for poison in CORPUS)
    assert len(list(FOLDER.glob("*.toml"))) >= 300
    assert min(fronts["http"], fronts["mlx"] + fronts["vllm"]) >= 40

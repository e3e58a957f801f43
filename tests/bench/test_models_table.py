"""docs/models.md, as `benchmarks/models_table.py` writes it."""

from __future__ import annotations

from typing import Any

from benchmarks import models_table

FIX = "run python benchmarks/models_table.py"


def facts(**changed: Any) -> dict[str, Any]:
    path = {"backend": "paged", "passes": "fused", "prefixes": "blocks", "lookahead": 1, "why": {}}
    elsewhere = path | {"backend": "contiguous", "passes": "", "prefixes": "copies", "lookahead": 0}
    return {"cuda": path, "cpu": elsewhere, "fidelity": {"paged, fused": "same", "contiguous": "same"}} | changed


def page(ratios: list[dict[str, Any]] | None = None, **architectures: dict[str, Any]) -> str:
    return models_table.page({"mlx-lm": "1.2", "architectures": architectures}, ratios or [])


def test_the_page_is_what_the_record_says() -> None:
    assert models_table.PAGE.read_text("utf-8") == models_table.page(*models_table.found()), FIX


def test_an_architecture_has_a_row() -> None:
    assert "| llama | paged | fused | blocks | contiguous | copies | all |  |  |" in page(llama=facts())


def test_a_path_with_other_tokens_is_named() -> None:
    found = page(llama=facts(fidelity={"paged, fused": "alone: r1 departs at token 3", "padded": "same"}))
    assert "| all but paged, fused |" in found
    assert "| not run |" in page(llama=facts(fidelity={}))


def test_measured_ratios_have_a_column_for_each_number_of_bits() -> None:
    steps = [{"rows": 1, "ratio": 0.5}, {"rows": 8, "ratio": 1.25}, {"rows": 32}]
    ratios = [{"family": "llama", "bits": "4", "steps": steps}, {"family": "other", "bits": "16", "steps": steps}]
    assert "| all |  | 0.50 / 1.25 |" in page(ratios, llama=facts())


def test_reasons_are_given_once_for_all_architectures_that_they_hold_for() -> None:
    path = facts()["cuda"] | {"why": {"paged": "a | b"}}
    found = page(llama=facts(cuda=path), qwen2=facts(cuda=path), qwen3=facts())
    assert "- **paged**, a | b: llama, qwen2" in found


def test_an_architecture_that_was_not_run_is_listed_with_the_reason() -> None:
    found = page(bitnet={"not run": {"reason": "no kernel"}})
    assert "- bitnet: no kernel" in found
    assert "| bitnet" not in found

"""D20, C1: a model whose logits are no numbers does not start; a row whose logits become NaN ends with an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import Architecture, make_tiny
from treadle.core.messages import Sampling, Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.errors import ModelError
from treadle.models.safetensors_file import read_header
from treadle.runner.build import build

POISON = 200
NAN = np.float32(np.nan).tobytes()


def overwrite(folder: Path, name: str, value: bytes, rows: slice | None = None) -> None:
    """Write `value` (4 bytes) over a tensor, or over some of its rows."""
    path = folder / "model.safetensors"
    head = read_header(path)[name]
    with path.open("r+b") as file:
        base = 8 + int.from_bytes(file.read(8), "little") + head.start
        size = head.end - head.start
        row = size // head.shape[0]
        start, stop, _ = (rows or slice(None)).indices(head.shape[0])
        file.seek(base + start * row)
        file.write(value * ((stop - start) * row // 4))


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


BREAK: dict[str, Callable[[Path], None]] = {
    "all bits set": lambda folder: overwrite(folder, "lm_head.weight", b"\xff\xff\xff\xff"),
    "one NaN": lambda folder: overwrite(folder, "model.norm.weight", NAN, slice(3, 4)),
    "infinite": lambda folder: overwrite(folder, "lm_head.weight", np.float32(np.inf).tobytes(), slice(9, 10)),
    "rope_theta is NaN": lambda folder: edit(folder, rope_theta=float("nan")),
}


@pytest.mark.parametrize("what", list(BREAK))
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_model_without_numbers_does_not_start(tmp_path: Path, what: str, architecture: Architecture) -> None:
    folder = make_tiny(tmp_path / "m", architecture=architecture)
    BREAK[what](folder)
    with pytest.raises(ModelError, match="first logits are not finite: its weights") as failed:
        build(folder)
    assert failed.value.message.startswith(f"{folder}: ")
    assert "`treadle pull`" in failed.value.message


def test_empty_weights_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny(tmp_path / "m")
    overwrite(folder, "lm_head.weight", bytes(4))
    runner = build(folder)
    runner.warm_up()
    runner.close()
    assert f"{folder}: all logits of the model's first tokens are equal" in caplog.text


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5)])
def test_a_row_whose_logits_are_nan_fails_alone(tmp_path: Path, sampling: Sampling) -> None:
    folder = make_tiny(tmp_path / "m")
    overwrite(folder, "model.embed_tokens.weight", NAN, slice(POISON, POISON + 1))
    runner = build(folder)
    runner.warm_up()
    prompts = {"good": (5, 6, 7), "bad": (5, POISON, 7), "other": (8, 9, 10)}
    requests = [
        Submit(id=id_, prompt=prompt, max_tokens=2, sampling=sampling, logprobs=1) for id_, prompt in prompts.items()
    ]
    plan = StepPlan(
        step=1,
        admit=tuple(Admit(request=request) for request in requests),
        prefill=tuple(PrefillChunk(id=request.id, start=0, count=len(request.prompt) - 1) for request in requests),
        decode=tuple(DecodeRow(id=request.id, position=0) for request in requests),
    )
    result = runner.execute(plan)
    assert [(failure.id, "logits for this request are NaN" in failure.message) for failure in result.failures] == [
        ("bad", True)
    ]
    assert [row.id for row in result.rows] == ["good", "other"]
    runner.release("bad")
    after = StepPlan(step=2, decode=tuple(DecodeRow(id=row.id, position=1) for row in result.rows))
    assert [row.id for row in runner.execute(after).rows] == ["good", "other"]
    runner.close()

"""What the doctor says of an EAGLE-3 head, without reading weights: what the start says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runner.drafting.eagles import Eagle, make_target
from tests.support.eagle_models import make_eagle, read_weights, write_weights
from treadle.cli.device_probe import ProbeRequest
from treadle.cli.draft_fit import draft_fit
from treadle.errors import ModelError

MODEL: dict[str, Any] = {"backend": "contiguous", "dtype": "float32", "context": 2048, "weight_bytes": 1 << 20}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "model", "llama")


def test_a_head_that_fits_takes_what_it_takes_at_the_start(target: Path, tmp_path: Path) -> None:
    head = make_eagle(tmp_path / "head")
    found = draft_fit(ProbeRequest(folder=str(target), draft=str(head)), MODEL, "cpu", 0)
    assert found.weight_bytes == Eagle.of(target, head).model.head.weight_bytes
    assert (found.architecture, found.dtype) == ("EAGLE-3 head", "float32")
    on_device = draft_fit(ProbeRequest(folder=str(target), draft=str(head)), {**MODEL, "backend": "paged"}, "cuda", 0)
    assert on_device.weight_bytes == found.weight_bytes


@pytest.mark.parametrize(
    ("changed", "model", "says"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, "layer 9, and the model has layers 0 to 3"),
        ({"target_hidden_size": 64}, {}, "it was made for hidden states of 64 numbers, and the model has 256"),
        ({"norm_before_fc": True}, {}, "Missing 1 parameters: joint.input_norm.weight"),
        ({}, {"backend": "serial"}, "the served model can't verify drafts"),
    ],
)
def test_a_head_that_the_start_would_refuse_fails(
    target: Path, tmp_path: Path, changed: dict[str, Any], model: dict[str, Any], says: str
) -> None:
    head = make_eagle(tmp_path, **changed)
    write_weights(head, {**read_weights(head), "input_norm.weight": None})
    with pytest.raises(ModelError) as caught:
        draft_fit(ProbeRequest(folder=str(target), draft=str(head)), {**MODEL, **model}, "cpu", 0)
    assert says in caught.value.message

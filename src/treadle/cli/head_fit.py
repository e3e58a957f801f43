"""Check that an EAGLE-3 head fits the model that it is to draft for, without reading weights, in the probe's child."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, one_line
from ..models import folder_checks
from .estimate import Estimate

if TYPE_CHECKING:
    from collections.abc import Mapping

EAGLE = "EAGLE-3 head"
"""In place of an architecture."""


def head_estimate(target: Path, folder: Path, model: Mapping[str, Any], kind: str) -> Estimate:
    """Return the estimate of the head in `folder` for the model in `target`, whose estimate is `model`, on a device of
    this `kind`. Raises ModelError where the start would refuse it."""
    from ..runner import mlxlm
    from ..runner.device.self_test import FAULTS
    from ..runner.loading.weights import weight_bytes

    config, library = folder_checks.check_head(folder), mlxlm.connect()
    module, served = library.load(target)
    try:
        shape = mlxlm.eagle_shape(config, len(module.layers))
        _check_sizes(served, shape.states, shape.vocabulary)
        head, _ = library.load_eagle(folder, config, shape)
    except (mlxlm.NoHead, *FAULTS) as error:
        raise ModelError(f"this EAGLE-3 head can't draft for it: {one_line(error)}") from error
    parameters = library.parameters(head)
    return Estimate(
        architecture=EAGLE,
        parameters=parameters,
        dtype=model["dtype"],
        weight_bytes=4 * parameters if kind == "cpu" else weight_bytes(head),
        context=model["context"],
        kv_budget_bytes=0,
    )


def _check_sizes(served: Mapping[str, Any], states: int, vocabulary: int) -> None:
    """Raise ModelError where the `served` model's config.json names other sizes than those that a head was made for."""
    text = served.get("text_config")
    text = {**served, **text} if isinstance(text, dict) else served
    for name, size, what in (
        ("hidden_size", states, "hidden states of {} numbers"),
        ("vocab_size", vocabulary, "{} tokens"),
    ):
        if text.get(name, size) != size:
            raise ModelError(
                f"this EAGLE-3 head can't draft for it: it was made for {what.format(size)}, and the model has "
                f"{text[name]}"
            )

"""Models of layers for tests of their replacement."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from treadle.runner.layers.choose import FasterLayers


class Layers(nn.Module):
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = list(layers)


def installed_on_cpu(*layers: Any, count: int | None = None) -> FasterLayers:
    """Replace `layers` as on a CPU, and check that as many passed their self-tests: all, or `count`."""
    faster = FasterLayers(Layers(*layers), "cpu")
    faster.install()
    assert not faster.rejected
    assert len(faster) == (len(layers) if count is None else count)
    return faster

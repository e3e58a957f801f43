"""Passes that the contiguous backend asks for before the first request."""

from __future__ import annotations

import mlx.nn as nn
import pytest

from treadle.runner.kv.backend import WarmLimits, WarmPass
from treadle.runner.kv.contiguous.backend import ContiguousConfig
from treadle.runner.kv.cost import KvCost


@pytest.mark.parametrize(("device", "alone"), [("cpu", 2), ("metal", 0), ("cuda", 0)])
def test_a_sequence_decodes_alone_where_functions_are_compiled_for_it(device: str, alone: int) -> None:
    """Twice: a block is compiled when its number of tokens comes again."""
    backend = ContiguousConfig([0], None, device, KvCost(0, 0), keep_prefixes=False).build(nn.Module(), {})
    passes = backend.warm_passes(WarmLimits(4, 2048, 512))
    assert [one for one in passes if one.decoding] == [WarmPass(decoding=1)] * alone

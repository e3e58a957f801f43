"""Random rounding: the spread of a model's logits that its floating type alone explains.

Every layer's output gets a random error of up to half a unit in the last place, as any order of summation or fusion of
operations would give it. Two such evaluations differ as two correct implementations do. The method is Monte Carlo
arithmetic (D. S. Parker, 1997), with one error for each layer instead of one for each operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import mlx.core as mx

_MANTISSA_BITS = {mx.float32: 23, mx.float16: 10, mx.bfloat16: 7}


@contextmanager
def random_rounding(model: Any, seed: int = 0) -> Iterator[None]:
    """Add random rounding errors to the outputs of all of the model's layers that have weights, while it lasts.

    Changes classes for the time being, so no other model may run in this process meanwhile.
    """
    kinds = {type(layer) for layer in model.modules() if "weight" in layer and not layer.children()}
    own = {kind: kind.__dict__.get("__call__") for kind in kinds}
    keys = count(seed << 20)
    calls = {kind: _rounding(kind.__call__, keys) for kind in kinds}
    try:
        for kind, call in calls.items():
            kind.__call__ = call
        yield
    finally:
        for kind, call in own.items():
            if call is not None:
                kind.__call__ = call
            elif "__call__" in kind.__dict__:
                del kind.__call__


def _rounding(call: Any, keys: Iterator[int]) -> Any:
    def rounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = call(self, *args, **kwargs)
        return _rounded(y, next(keys)) if isinstance(y, mx.array) else y

    return rounded


def _rounded(y: Any, key: int) -> Any:
    bits = _MANTISSA_BITS.get(y.dtype)
    if bits is None:
        return y
    random = mx.random.uniform(-0.5, 0.5, y.shape, key=mx.random.key(key))
    return (y.astype(mx.float32) * (1 + 2.0**-bits * random)).astype(y.dtype)

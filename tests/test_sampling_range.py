"""D19: for every sampling parameter that the validator takes, the runner computes a token of the vocabulary."""

from __future__ import annotations

import math
import random

import mlx.core as mx
import numpy as np
import pytest

from treadle.core.messages import Submit
from treadle.errors import InvalidRequest
from treadle.fronts.validate import Limits, RawParams, build_submits, check
from treadle.runner.sampling.logits_processors import process_logits
from treadle.runner.sampling.sampler import SamplingRow, draw

VOCABULARY = 300
LIMITS = Limits(vocabulary=VOCABULARY, context=64)
TINY, HUGE = 5e-324, 1.7e308
EXTREMES: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, TINY, 1e-300, 1e-38, 1e-9, 9.9e-5, 1e-4, 0.7, 2.0, 2.1, -0.0, HUGE, math.inf, math.nan),
    "top_p": (0.0, TINY, 1e-38, 1e-9, 0.5, 1.0, 1.1, math.nan),
    "top_k": (-1, 0, 1, VOCABULARY, 2**31 - 1, 2**31, -2),
    "min_p": (0.0, TINY, 1e-38, 0.5, 1.0, 1.1),
    "repetition_penalty": (0.0, TINY, 1e-300, 1e-12, 1e-9, 1e-6, 0.5, 1.0, 10.0, 10.1, HUGE),
    "presence_penalty": (-2.0, -TINY, 0.0, TINY, 2.0, 2.1),
    "frequency_penalty": (-2.0, -TINY, 0.0, TINY, 2.0, math.inf),
}
BIASES = (-100.0, -TINY, 0.0, 1e-38, 100.0)
KINDS = (
    np.zeros(VOCABULARY),
    np.full(VOCABULARY, -3.0e38),
    np.linspace(-3.0e38, 3.0e38, VOCABULARY),
    np.concatenate([np.full(VOCABULARY - 1, -np.inf), [1.0]]),
    np.random.default_rng(0).normal(0, 20, VOCABULARY),
)


def requests(seed: int) -> Submit | None:
    """A random request of extremes, as the validator lets it pass; None where it is refused."""
    rnd = random.Random(seed)
    names = rnd.sample(list(EXTREMES), rnd.randint(1, 4))
    values = {name: rnd.choice(EXTREMES[name]) for name in names}
    bias = {str(rnd.randrange(VOCABULARY)): rnd.choice(BIASES) for _ in range(rnd.choice([0, 0, 3]))}
    try:
        checked = check(RawParams(**values, logit_bias=bias, max_tokens=3), LIMITS)  # type: ignore[arg-type]
    except InvalidRequest:
        return None
    return build_submits(checked, [[1, 2, 3]], LIMITS, lambda: seed)[0]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_whatever_the_validator_takes_the_runner_can_draw(kind: int) -> None:
    taken = [request for seed in range(400) if (request := requests(seed)) is not None]
    assert len(taken) > 80
    logits = mx.array(KINDS[kind][None].astype(np.float32))
    for request in taken:
        row = SamplingRow(request, (4, 4, 5), VOCABULARY)
        edited = np.array(process_logits(logits, [row.processors], [3]))
        assert not np.isnan(edited).any(), request.sampling
        assert edited.max() > -np.inf, request.sampling
        (token,), _ = draw(logits, [row], [3]).resolve()
        assert 0 <= token < VOCABULARY, request.sampling
        assert np.isfinite(np.array(logits)[0, token]), request.sampling


def test_a_repetition_penalty_near_nothing_is_taken_as_the_least_that_can_be_computed() -> None:
    """The defect: 500 for numbers from 0 to 1e-9."""
    for value in (TINY, 1e-300, 1e-12, 1e-9):
        checked = check(RawParams(repetition_penalty=value), LIMITS)
        SamplingRow(build_submits(checked, [[1]], LIMITS, lambda: 0)[0], (), VOCABULARY)

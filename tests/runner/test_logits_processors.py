"""Biases, held-back stop tokens and penalties against plain numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from treadle.core.messages import Sampling, Submit
from treadle.runner.sampling.logits_processors import LogitsProcessors, process_logits

VOCABULARY = 300
Floats = npt.NDArray[np.float32]


def edits(
    sampling: Sampling,
    prompt: tuple[int, ...] = (1, 2),
    history: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> LogitsProcessors:
    request = Submit(
        id="r", prompt=prompt, max_tokens=9, sampling=sampling, stop_token_ids=stops, min_tokens=min_tokens
    )
    return LogitsProcessors(request, history, VOCABULARY)


def apply(logits: Floats, rows: list[LogitsProcessors], positions: list[int]) -> Floats:
    return np.array(process_logits(mx.array(logits), rows, positions).astype(mx.float32))


def plain(logits: Floats, sampling: Sampling, prompt: tuple[int, ...], output: tuple[int, ...]) -> Floats:
    """What one row's logits (V,) should become."""
    out = logits.copy()
    for token, bias in sampling.logit_bias:
        out[token] += np.float32(bias)
    for token in set(prompt) | set(output):
        factor = np.float32(sampling.repetition_penalty)
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(output):
        out[token] -= np.float32(sampling.presence_penalty + sampling.frequency_penalty * output.count(token))
    return out


def random_logits(rows: int) -> Floats:
    return np.random.default_rng(1).normal(0, 3, (rows, VOCABULARY)).astype(np.float32)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.4),
        Sampling(repetition_penalty=0.7),
        Sampling(presence_penalty=1.5),
        Sampling(frequency_penalty=-0.5),
        Sampling(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4, logit_bias=((8, 9.0), (2, -1.0))),
    ],
    ids=str,
)
def test_edits_are_those_of_the_formula(sampling: Sampling) -> None:
    logits = random_logits(1)
    prompt, output = (1, 2, 2, 250), (8, 8, 8, 2, 99)
    assert np.allclose(
        apply(logits, [edits(sampling, prompt, output)], [5])[0], plain(logits[0], sampling, prompt, output), atol=1e-5
    )


def test_tokens_of_a_long_prompt_count_once_whether_they_come_again_or_not() -> None:
    """More new ones than there was room for at first, between those of the prompt."""
    logits = random_logits(1)
    sampling = Sampling(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4)
    prompt, output = tuple(range(0, 200, 2)) * 3, tuple(range(250)) * 2
    assert np.allclose(
        apply(logits, [edits(sampling, prompt, output)], [5])[0], plain(logits[0], sampling, prompt, output), atol=1e-5
    )


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = random_logits(1)
    sampling = Sampling(presence_penalty=1.0, frequency_penalty=1.0)
    assert np.array_equal(apply(logits, [edits(sampling, prompt=(1, 2, 3))], [0]), logits)


def test_counting_token_by_token_is_counting_the_history() -> None:
    sampling = Sampling(repetition_penalty=1.3, frequency_penalty=0.2)
    tokens = tuple(np.random.default_rng(2).integers(0, VOCABULARY, 400).tolist())
    at_once, one_by_one = edits(sampling, history=tokens), edits(sampling)
    assert one_by_one.seen is not None
    for token in tokens:
        one_by_one.seen.add(token)
    logits = random_logits(1)
    assert np.array_equal(apply(logits, [at_once], [400]), apply(logits, [one_by_one], [400]))


def test_stop_tokens_are_held_back_until_enough_tokens_were_picked() -> None:
    row = edits(Sampling(), stops=(5, 7, 10**6, -1), min_tokens=2)
    logits = random_logits(1)
    for position in (0, 1):
        held = apply(logits, [row], [position])[0]
        assert np.flatnonzero(np.isneginf(held)).tolist() == [5, 7]
    assert np.array_equal(apply(logits, [row], [2]), logits)


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = random_logits(1)
    row = edits(Sampling(logit_bias=((VOCABULARY, 5.0), (-1, 5.0))))
    assert np.array_equal(apply(logits, [row], [0]), logits)


def test_rows_are_edited_each_by_their_own() -> None:
    logits = random_logits(4)
    kinds = [
        Sampling(),
        Sampling(repetition_penalty=1.5),
        Sampling(logit_bias=((0, 4.0),)),
        Sampling(presence_penalty=2.0),
    ]
    rows = [edits(kind, prompt=(i, i + 1), history=(i + 50,)) for i, kind in enumerate(kinds)]
    got = apply(logits, rows, [1] * 4)
    for i, kind in enumerate(kinds):
        assert np.allclose(got[i], plain(logits[i], kind, (i, i + 1), (i + 50,)), atol=1e-6)
    assert np.array_equal(got[0], logits[0])


def test_nothing_to_edit_returns_the_very_same_logits() -> None:
    logits = mx.array(random_logits(2))
    assert process_logits(logits, [edits(Sampling(temperature=1.0, top_p=0.5))] * 2, [0, 0]) is logits

"""Prompt log-probabilities on the richer wire."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fronts.rpc.worker import PROMPT, refused, until, worker
from tests.fronts.runner import prompt_score
from tests.fronts.web.server import forever
from tests.support.aio import in_loop


def scored(entries: Any, top: int) -> None:
    """`entries` are the prompt's: the first without a value."""
    assert tuple(entries.token_ids) == PROMPT
    assert [entry.HasField("value") for entry in entries.token_logprobs] == [False, True, True, True, True]
    assert len(entries.top_logprobs[0].values) == 0
    for at in range(1, len(PROMPT)):
        score = prompt_score(PROMPT, at, top)
        assert entries.token_logprobs[at].value == pytest.approx(score.logprob)
        assert list(entries.top_logprobs[at].token_ids) == [token for token, _ in score.top]
        assert list(entries.top_logprobs[at].values) == pytest.approx([logprob for _, logprob in score.top])


@in_loop
async def test_a_streams_first_chunk_has_them() -> None:
    async with worker() as w:
        answer = await w.vllm.answer(prompt_logprobs=2, n=2)
        for index in range(2):
            first, *rest = [chunk for chunk in answer.chunks if chunk.index == index]
            scored(first.input_logprobs, 2)
            assert not any(message.HasField("input_logprobs") for message in (*rest, *answer.completes))
        assert w.idle()


@in_loop
async def test_an_answer_in_one_message_has_them() -> None:
    async with worker() as w:
        answer = await w.vllm.answer(prompt_logprobs=0, stream=False)
        scored(answer.end.input_logprobs, 0)
        assert not (await w.vllm.answer("r2", stream=False)).end.HasField("input_logprobs")


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_more_than_a_message_can_hold_is_refused_before_it_runs(stream: bool) -> None:
    """The gateway takes no message over 4 MiB."""
    async with worker(forever, context=40_000) as w:
        error = await refused(w.vllm.generate(prompt=[7] * 30_000, prompt_logprobs=20, stream=stream))
        assert "do not fit one message of 4 MiB" in error.details()
        assert w.runner.seen == []
        await until(w.idle)

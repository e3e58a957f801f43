"""Embedding models in `treadle doctor`, and in the call that a start proposes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.embedding_models import make_gemma_embedding, make_qwen3_embedding
from treadle.cli.device_probe import ProbeRequest
from treadle.cli.estimate import estimate
from treadle.cli.serve import first_call


def test_what_they_take_is_estimated(tmp_path: Path) -> None:
    encoder = estimate(ProbeRequest(folder=str(make_gemma_embedding(tmp_path / "gemma"))), "cpu", 0)
    assert (encoder.backend, encoder.best, encoder.kv_token_bytes) == ("encoder", "encoder", 0)
    decoder = estimate(ProbeRequest(folder=str(make_qwen3_embedding(tmp_path / "qwen"))), "cpu", 0)
    assert (decoder.backend, decoder.best) == ("contiguous", "contiguous")
    assert decoder.kv_token_bytes


@pytest.mark.parametrize(
    ("embeds", "chats", "path", "field"),
    [
        (True, False, "/v1/embeddings", "input"),
        (True, True, "/v1/embeddings", "input"),
        (False, True, "/v1/chat/completions", "messages"),
        (False, False, "/v1/completions", "prompt"),
    ],
)
def test_the_call_to_try_is_one_that_the_model_answers(embeds: bool, chats: bool, path: str, field: str) -> None:
    called, body = first_call("m", embeds=embeds, chats=chats)
    assert called == path
    assert field in json.loads(body)

"""`Engine.embed` over real models."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.aio import in_loop
from tests.support.embedding_models import make_qwen3_embedding
from tests.support.tiny import make_tiny
from treadle import Engine
from treadle.errors import ContextLengthExceeded, InvalidRequest


@in_loop
async def test_texts_and_ids_get_vectors_beside_a_stream(tmp_path: Path) -> None:
    async with Engine(make_tiny(tmp_path / "m"), threads=1) as engine:
        stream = asyncio.create_task(engine.generate("hello", max_tokens=40, temperature=0))
        texts = [f"text {i}" for i in range(40)]
        found = await engine.embed(texts)
        assert len(found) == 40
        assert all(math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-5) for vector in found)
        (again,), (ids,) = await engine.embed(texts[7]), await engine.embed(list(texts[7].encode()))
        assert max(abs(a - b) for a, b in zip(again, found[7], strict=True)) < 1e-5
        assert ids == again
        (short,) = await engine.embed([texts[7]], dimensions=8, pooling="mean", cache_salt="mine")
        assert len(short) == 8
        assert len((await stream).tokens) == 40
        for given, words in BAD:
            with pytest.raises(InvalidRequest, match=words):
                await engine.embed(**given)
        with pytest.raises(ContextLengthExceeded, match=r"inputs\[1\] has \d+ tokens"):
            await engine.embed(["x", "y" * 3000])
        with pytest.raises(ContextLengthExceeded, match="inputs has 3000 tokens"):
            await engine.embed([7] * 3000)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"inputs": []}, "inputs is a text"),
    ({"inputs": b"bytes"}, "inputs is a text"),
    ({"inputs": memoryview(b"bytes")}, "inputs is a text"),
    ({"inputs": [bytearray(b"bytes")]}, r"inputs .*must be text, a list of token ids"),
    ({"inputs": 7}, "inputs is a text"),
    ({"inputs": ["a", ""]}, r"inputs\[1\]"),
    ({"inputs": ["a", 7]}, r"inputs\[1\]"),
    ({"inputs": ["a"] * 2049}, "at most 2048"),
    ({"inputs": [[1], [-4]]}, r"inputs\[1\] has the token id -4"),
    ({"inputs": "a", "dimensions": 65}, "have 64"),
    ({"inputs": "a", "pooling": "max"}, "last, mean or cls"),
]


@in_loop
async def test_a_text_ends_as_the_tokenizer_of_an_embedding_model_has_it(tmp_path: Path) -> None:
    """Qwen3-Embedding pools at the end token, which its post-processor appends."""
    async with Engine(make_qwen3_embedding(tmp_path / "m"), threads=1) as engine:
        (text,), (ids,) = await engine.embed("hello"), await engine.embed([*b"hello", 258])
        assert text == ids
        with pytest.raises(InvalidRequest, match="generates no text"):
            await engine.generate("hello")

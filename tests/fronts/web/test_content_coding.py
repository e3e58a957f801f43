"""Compressed request bodies: what is inflated, how far, and what is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.fronts.web.server import front
from tests.fronts.web.test_bad_input import refused
from tests.fronts.web.test_body import read, sends
from tests.fronts.web.test_serving import served
from tests.support.aio import in_loop
from treadle.errors import Busy, InvalidRequest, RequestTooLarge
from treadle.fronts.web import body as body_module
from treadle.fronts.web.body import Body, BodyBudget, read_body
from treadle.fronts.web.content_coding import UnsupportedCoding, coding_of, inflater_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHAT = "/v1/chat/completions"
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}
ASKED: Any = {"messages": [{"role": "user", "content": "hi"}]}
each_coding = pytest.mark.parametrize("coding", PACK)


def coded(coding: str) -> list[tuple[bytes, bytes]]:
    return [(b"content-encoding", coding.encode())]


async def inflate(coding: str, *parts: bytes, limit: int = 1 << 20, into: Body | None = None) -> bytes:
    body = into or Body(BodyBudget(1 << 30), "alice")
    await read_body(sends(*parts), coded(coding), body, limit=limit)
    return body.data


@pytest.mark.parametrize("coding", [*PACK, "x-gzip", "GZIP", " gzip , identity"])
@in_loop
async def test_a_compressed_request_is_answered(coding: str) -> None:
    pack = PACK.get(coding, gzip.compress)
    async with front() as f:
        body = pack(json.dumps(ASKED).encode())
        assert (await f.post(CHAT, body, headers={"content-encoding": coding})).status == 200


@each_coding
@in_loop
async def test_a_body_may_be_cut_anywhere(coding: str) -> None:
    data = bytes(range(256)) * 3000
    packed = PACK[coding](data)
    assert await inflate(coding, *[packed[i : i + 1] for i in range(len(packed))]) == data
    assert await inflate(coding, packed[:5], b"", packed[5:], b"") == data
    assert await inflate(coding, PACK[coding](data * 4), limit=4 << 20) == data * 4


@each_coding
@in_loop
async def test_a_body_that_ends_early_is_refused(coding: str) -> None:
    packed = PACK[coding](b"x" * 1000)
    for end in range(len(packed)):
        with pytest.raises(InvalidRequest, match=f"ends before its {coding} data"):
            await inflate(coding, packed[:end])


@each_coding
@in_loop
async def test_bytes_behind_the_end_are_refused(coding: str) -> None:
    packed = PACK[coding](b"x" * 1000)
    for parts in ((packed + b"y",), (packed, b"y"), (packed + packed,), (packed, packed)):
        with pytest.raises(InvalidRequest, match="behind the end"):
            await inflate(coding, *parts)


@each_coding
@in_loop
async def test_corrupt_data_is_refused_with_its_reason(coding: str) -> None:
    with pytest.raises(InvalidRequest, match=f"not valid {coding}") as caught:
        await inflate(coding, b"no such thing, in plain text")
    assert caught.value.http_status == 400


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@in_loop
async def test_a_wrong_checksum_is_refused(coding: str) -> None:
    packed = PACK[coding](bytes(range(256)) * 8)
    at = -8 if coding == "gzip" else -1
    with pytest.raises(InvalidRequest, match="incorrect data check"):
        await inflate(coding, packed[:at] + bytes([packed[at] ^ 1]) + packed[at:][1:])


@each_coding
@in_loop
async def test_a_bomb_is_refused_as_soon_as_it_is_over_the_limit(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def spied(name: str) -> Any:
        inflater = inflater_of(name)
        take = inflater.take

        def counting(most: int) -> bytes:
            found = take(most)
            taken.append(len(found))
            return found

        inflater.take = counting  # type: ignore[method-assign]
        return inflater

    monkeypatch.setattr(body_module, "inflater_of", spied)
    bomb = PACK[coding](bytes(64 << 20))
    budget = BodyBudget(1 << 30)
    with Body(budget, "alice") as body, pytest.raises(RequestTooLarge):
        await inflate(coding, bomb, limit=3 << 20, into=body)
    assert sum(taken) == (3 << 20) + 1
    assert max(taken) <= body_module.PIECE_BYTES
    assert budget.held == 0


@in_loop
async def test_data_that_inflates_to_nothing_is_limited_too() -> None:
    packer = zlib.compressobj(wbits=-15)
    empty = packer.flush(zlib.Z_FULL_FLUSH)
    with pytest.raises(RequestTooLarge):
        await inflate("deflate", zlib.compress(b"")[:2], *[empty * 100] * 9, limit=1000)


@in_loop
async def test_the_inflated_size_counts_in_the_budget() -> None:
    budget = BodyBudget(4 * 300_000)
    with Body(budget, "alice") as body:
        await inflate("gzip", gzip.compress(bytes(200_000)), into=body)
        assert budget.held == 200_000
        with Body(budget, "alice") as other, pytest.raises(Busy):
            await inflate("gzip", gzip.compress(bytes(200_000)), into=other)
        assert budget.held == 200_000
    assert budget.held == 0


@in_loop
async def test_a_large_window_of_zstd_is_refused() -> None:
    with_window: dict[int, int] = {
        zstd.CompressionParameter.window_log: 24,
        zstd.CompressionParameter.content_size_flag: 0,
    }
    packer = zstd.ZstdCompressor(options=with_window)
    packed = packer.compress(b"x") + packer.flush()
    with pytest.raises(InvalidRequest, match="too much memory"):
        await inflate("zstd", packed)


@pytest.mark.parametrize("sent", ["br", "gzip, br", "gzip, gzip", "gzip, zstd", "compress", "x" * 500])
@in_loop
async def test_other_codings_are_a_415_that_lists_those_that_do(sent: str) -> None:
    async with front() as f:
        client = await f.post(CHAT, b"x", headers={"content-encoding": sent})
        refused(client, 415, None, "gzip, deflate, zstd")
        assert client.headers["accept-encoding"] == "gzip, deflate, zstd"
        assert client.json["error"]["code"] == "unsupported_content_encoding"


def test_codings_in_several_headers_are_one_list() -> None:
    assert coding_of([(b"content-encoding", b"identity"), (b"content-encoding", b"x-gzip")]) == "gzip"
    assert coding_of([(b"content-encoding", b"")]) is None
    with pytest.raises(UnsupportedCoding, match="2 content codings"):
        coding_of([(b"content-encoding", b"gzip"), (b"content-encoding", b"zstd")])


@in_loop
async def test_read_without_a_coding_inflates_nothing() -> None:
    packed = gzip.compress(b"x")
    assert await read(sends(packed), limit=100) == packed


@in_loop
async def test_compressed_bodies_are_pipelined_and_chunked() -> None:
    packed = {coding: pack(json.dumps(ASKED | {"max_tokens": 1}).encode()) for coding, pack in PACK.items()}
    head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: {}\r\n"
    sent = b""
    for coding, data in packed.items():
        sent += head.format(CHAT, coding).encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
        sent += head.format(CHAT, coding).encode() + b"Transfer-Encoding: chunked\r\n\r\n"
        sent += b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n"
    bad = gzip.compress(b"{}")[:-3]
    sent += head.format(CHAT, "gzip").encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(bad) + bad
    async with front() as f, served(f) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answers = await reader.read(-1)
        writer.close()
        assert answers.count(b"HTTP/1.1 200 OK") == 6
        assert answers.count(b"HTTP/1.1 400 ") == 1
        assert b"ends before its gzip data" in answers
        assert f.idle()

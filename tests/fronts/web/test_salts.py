"""Whose cached prompts a request may reuse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fronts.web.server import Front, front
from tests.support.aio import in_loop
from treadle.fronts.cache_salts import Salts


async def salt_of(f: Front, headers: dict[str, str] | None = None, **fields: Any) -> str:
    client = await f.post("/v1/completions", {"prompt": "hi", "max_tokens": 1, **fields}, headers=headers or {})
    assert client.status == 200, client.json
    return f.runner.seen[-1].salt


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@in_loop
async def test_each_api_key_has_its_own_salt() -> None:
    """One tenant can't probe another's prompts by how fast they are answered."""
    async with front() as f:
        salts = [await salt_of(f, headers) for headers in ({}, bearer("a"), bearer("b"), {"x-api-key": "c"})]
        assert len(set(salts)) == 4
        assert [await salt_of(f, headers) for headers in ({}, {"x-api-key": "a"}, bearer("b"))] == salts[:3]


@in_loop
async def test_the_key_that_opened_is_the_one_that_counts() -> None:
    async with front(api_key="right") as f:
        plain = await salt_of(f, bearer("right"))
        assert await salt_of(f, {"x-api-key": "right"}) == plain
        assert await salt_of(f, {"authorization": "Bearer wrong", "x-api-key": "right"}) == plain
        assert await salt_of(f, {"authorization": "Bearer right", "x-api-key": "wrong"}) == plain


@in_loop
async def test_cache_salt_parts_a_keys_own_requests() -> None:
    async with front() as f:
        plain, one, two = [await salt_of(f, bearer("a"), cache_salt=salt) for salt in (None, "one", "two")]
        assert len({plain, one, two}) == 3
        assert await salt_of(f, bearer("a"), cache_salt="one") == one
        assert await salt_of(f, bearer("b"), cache_salt="one") != one


@in_loop
async def test_a_forged_salt_reaches_nobody() -> None:
    async with front() as f:
        own = await salt_of(f, bearer("victim"), cache_salt="x")
        tenant = Salts().tenant(b"victim").hex()
        for forged in (own, tenant, "victim", "x", f"{tenant}x"):
            assert await salt_of(f, bearer("thief"), cache_salt=forged) != own
            assert await salt_of(f, {}, cache_salt=forged) != own


@in_loop
async def test_neither_keys_nor_salts_reach_the_engine() -> None:
    async with front() as f:
        salt = await salt_of(f, bearer("my-secret-key"), cache_salt="my-salt")
        assert "my" not in salt
        assert len(salt) == 32
        assert all(char in "0123456789abcdef" for char in salt)


@in_loop
async def test_every_row_of_a_request_and_both_routes_share_the_salt() -> None:
    async with front() as f:
        salt = await salt_of(f, bearer("a"), prompt=["x", "y"], n=2)
        fields = {"messages": [{"role": "user", "content": "hi"}], "cache_salt": None}
        await f.post("/v1/chat/completions", fields, headers=bearer("a"))
        assert {request.salt for request in f.runner.seen} == {salt}


@in_loop
async def test_other_fields_of_openais_are_no_salt() -> None:
    async with front() as f:
        plain = await salt_of(f)
        for name in ("user", "prompt_cache_key", "safety_identifier"):
            assert await salt_of(f, None, **{name: "someone"}) == plain


@in_loop
async def test_two_servers_have_salts_of_their_own() -> None:
    """The secret is the process's: what was learnt of one is worth nothing at another."""
    async with front() as f, front() as g:
        assert await salt_of(f, bearer("a")) != await salt_of(g, bearer("a"))


@pytest.mark.parametrize("salt", ["x", "x" * 256, "käse 🧀", " ", "\u200b", "\U001012cc"])
@in_loop
async def test_any_salt_without_control_characters_is_taken(salt: str) -> None:
    async with front() as f:
        assert await salt_of(f, cache_salt=salt) == await salt_of(f, cache_salt=salt)


def test_a_salt_shows_no_secret() -> None:
    salts = Salts(b"k" * 32)
    assert "k" * 8 not in repr(salts)
    assert salts.salt(salts.tenant(b"a")) == Salts(b"k" * 32).salt(Salts(b"k" * 32).tenant(b"a"))
    assert salts.salt(salts.tenant(b"a"), "b") != salts.salt(salts.tenant(b"ab"))

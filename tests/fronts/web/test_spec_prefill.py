"""SpecPrefill over HTTP: opting out in each dialect, what is refused, and what usage tells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fronts.web.server import front
from tests.fronts.web.test_speculation import HI
from tests.support.aio import in_loop
from treadle.core.capabilities import SpecPrefillCapabilities
from treadle.engine.client import EngineClient
from treadle.fronts.generation.choice import Choice

PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"model": "m", "input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 5}),
    ("/api/chat", {"messages": HI}),
    ("/api/generate", {"prompt": "hi"}),
]
COUNT: tuple[str, dict[str, Any]] = ("/v1/messages/count_tokens", {"messages": HI})


@pytest.mark.parametrize(("path", "fields"), PATHS)
@in_loop
async def test_a_request_can_have_its_whole_prompt_prefilled(path: str, fields: dict[str, Any]) -> None:
    async with front() as f:
        for given in (False, None):
            client = await f.post(path, {**fields, "spec_prefill": given})
            assert client.status == 200, client.body
            assert f.runner.seen[-1].sparse_prefill is given
        refused = await f.post(path, {**fields, "spec_prefill": True})
        assert refused.status == 400
        assert b"spec_prefill is true, and the server has no model that scores prompts" in refused.body
        assert (await f.post(path, {**fields, "spec_prefill": "no"})).status == 400


@pytest.mark.parametrize(("path", "fields"), PATHS)
@in_loop
async def test_usage_counts_what_was_scored_and_kept(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Choice, "sparse_tokens", (9, 4))
    async with front() as f:
        answer = (await f.post(path, {**fields, "stream": False})).json
        usage = answer.get("usage", answer)  # Ollama's counts stand in the answer itself
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        assert (details["scored_tokens"], details["kept_tokens"]) == (9, 4)
        monkeypatch.setattr(Choice, "sparse_tokens", (0, usage.get("prompt_tokens", 0)))
        assert b"scored_tokens" not in (await f.post(path, {**fields, "stream": False})).body


@pytest.mark.parametrize(("path", "fields"), [*PATHS, ("/tokenize", {"messages": HI}), COUNT])
@pytest.mark.parametrize("filler", [0, 70_000])
@in_loop
async def test_part_of_a_prompt_may_be_asked_for_where_there_is_a_scorer(
    path: str, fields: dict[str, Any], filler: int
) -> None:
    """Large bodies, and those of `/tokenize`, are checked by a text worker."""
    async with front(context=100_000) as f:
        give_scorer(f.engine, "small")
        body = json.dumps({**fields, "spec_prefill": True}) + " " * filler
        client = await f.post(path, body.encode())
        assert client.status == 200, client.body


@in_loop
async def test_no_scorer_is_denied_before_it_is_known_whether_there_is_one() -> None:
    """Tokens are counted while the engine starts."""
    path, fields = COUNT
    async with front() as f:
        f.engine.admission.capabilities = None
        assert (await f.post(path, {**fields, "spec_prefill": True})).status == 200


@pytest.mark.parametrize("scorer", ["", "small"])
@in_loop
async def test_the_document_has_what_this_server_accepts(scorer: str) -> None:
    async with front() as f:
        give_scorer(f.engine, scorer)
        schemas = f.app.openapi()["components"]["schemas"]
        described = [
            one["properties"]["spec_prefill"] for one in schemas.values() if "spec_prefill" in request_fields(one)
        ]
        assert len(described) >= 4
        for field in described:
            (boolean,) = [kind for kind in field["anyOf"] if kind["type"] == "boolean"]
            assert boolean == ({"type": "boolean"} if scorer else {"type": "boolean", "const": False})


def give_scorer(engine: EngineClient, name: str) -> None:
    """Have the server's fronts see a scorer of this name."""
    can = engine.capabilities
    assert can is not None
    steps = replace(can.steps, spec_prefill=SpecPrefillCapabilities(scorer=name))
    engine.admission.capabilities = replace(can, steps=steps)


def request_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request's schema; none of an answer's."""
    fields: dict[str, Any] = schema.get("properties", {})
    return fields if "model" in fields and "state" not in fields else {}

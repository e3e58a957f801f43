"""SpecPrefill over HTTP: opting out in each dialect, what is refused, and what usage tells."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fronts.web.server import front
from tests.fronts.web.test_speculation import HI
from tests.support.aio import in_loop

PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"model": "m", "input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 5}),
    ("/api/chat", {"messages": HI}),
    ("/api/generate", {"prompt": "hi"}),
]


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

"""D1, D2, D4 with the official SDK over real sockets: who runs, who waits, who is told to come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import ENDLESS, Serve, until


@pytest.fixture(scope="module")
def serialized(start_shared: Start, tiny: Tiny) -> Serve:
    return start_shared(tiny("gemma3"), "--max-running", "1", "--max-wait", "60").ready()


def sdk(server: Serve, max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=max_retries, timeout=60)


def ask(client: openai.OpenAI, max_tokens: int = 8, **fields: Any) -> Any:
    return client.completions.create(model="gemma3", prompt="hi", max_tokens=max_tokens, temperature=0, **fields)


def counts(server: Serve) -> tuple[int, int]:
    admission = server.status()["admission"]
    return admission["running"], admission["waiting"]


@pytest.fixture
def clients(serialized: Serve) -> Iterator[tuple[openai.OpenAI, openai.OpenAI, openai.OpenAI]]:
    with sdk(serialized) as one, sdk(serialized) as two, sdk(serialized) as three:
        yield one, two, three


def test_a_stream_that_waits_has_no_headers_yet(serialized: Serve) -> None:
    """D2: a refusal always comes before the first byte, so a waiter is promised nothing."""

    def first_chunk() -> Any:
        with sdk(serialized) as client, ask(client, stream=True) as stream:
            return next(iter(stream))

    with ThreadPoolExecutor(1) as threads, serialized.stream() as running:
        waiting = threads.submit(first_chunk)
        until("one runs and one waits", lambda: counts(serialized) == (1, 1))
        while len(running.tokens) < 50:
            running.next()
        assert not waiting.done()
        running.response.close()
        waiting.result(60)
    serialized.idle()


def test_a_waiter_that_leaves_gives_its_place_back(serialized: Serve) -> None:
    """B4: cancelled before it ran."""
    with serialized.stream(), ThreadPoolExecutor(1) as threads:

        def give_up() -> None:
            with sdk(serialized) as client:
                ask(client.with_options(timeout=0.5))

        left = threads.submit(give_up)
        with pytest.raises(openai.APITimeoutError):
            left.result(60)
        until("nobody waits", lambda: counts(serialized) == (1, 0))
    serialized.idle()


def test_the_sdk_retries_what_was_refused(serialized: Serve) -> None:
    """Its automatic retry on a 503 ends in an answer once there is room."""
    with ThreadPoolExecutor(2) as threads, serialized.stream() as running, sdk(serialized, max_retries=10) as patient:
        waiting = threads.submit(serialized.complete)
        until("one runs and one waits", lambda: counts(serialized) == (1, 1))
        refused = serialized.status()["admission"]["refused"].get("queue_full", 0)
        retrying = threads.submit(ask, patient)
        until("refused", lambda: serialized.status()["admission"]["refused"].get("queue_full", 0) > refused)
        running.response.close()
        assert retrying.result(60).usage.completion_tokens == 8
        assert waiting.result(60).status_code == 200


def test_without_a_wait_the_second_is_refused_at_once(start: Start, tiny: Tiny) -> None:
    """D2: `--max-wait 0`. The slot is there for the next as soon as its holder has left (B6)."""
    server = start(tiny("gemma3"), "--max-running", "1", "--max-wait", "0").ready()
    with server.stream():
        refused = server.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "text_generation_busy"
        assert int(refused.headers["retry-after"]) >= 1
        assert counts(server) == (1, 0)
    server.idle()
    assert server.complete().status_code == 200


def test_serialized_one_runs_one_waits_and_the_third_is_refused(
    serialized: Serve, clients: tuple[openai.OpenAI, openai.OpenAI, openai.OpenAI]
) -> None:
    """D2, D4: two at once is what agents do; the second waits and is answered whole, the third hears at once."""
    one, two, three = clients
    assert serialized.status()["path"] == "serialized"
    before = serialized.status()["admission"]
    with ThreadPoolExecutor(1) as threads, ask(one, ENDLESS, stream=True) as running:
        next(iter(running))
        waiting = threads.submit(ask, two)
        until("one runs and one waits", lambda: counts(serialized) == (1, 1))
        with pytest.raises(openai.InternalServerError) as refused:
            ask(three)
        assert refused.value.status_code == 503
        assert refused.value.code == "text_generation_busy"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert counts(serialized) == (1, 1)
        assert not waiting.done()
        running.close()
        assert waiting.result(60).usage.completion_tokens == 8
    serialized.idle()
    after = serialized.status()["admission"]
    assert Counter(after["refused"]) - Counter(before["refused"]) == {"queue_full": 1}
    assert Counter(after["ended"]) - Counter(before["ended"]) == {"cancelled": 1, "length": 1}

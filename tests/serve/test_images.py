"""Images over HTTP against a real server: many at once, with little memory, when the engine dies, and when clients
leave."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest

from tests.media.pictures import png
from tests.serve.conftest import Start
from tests.serve.server import Serve, gone, until
from tests.support.images import data_url
from tests.support.vision_folder import make_vision_chat
from treadle import shared_memory

TOKENS = 100
PLACES = 4


@pytest.fixture(scope="module")
def server(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Room for a part of its sequences, and for the features of few images."""
    folder = make_vision_chat(tmp_path_factory.mktemp("vision") / "model", ends=())
    options = ("--max-running", str(PLACES), "--max-wait", "100", "--context", "1024", "--memory", "1MiB")
    return start_shared(folder, *options).ready()


def asked(seed: int) -> dict[str, Any]:
    """A chat with a picture that some others have too, and one of its own."""
    pictures = [png(128, 128, seed % 4), png(96, 128, 100 + seed)]
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    content = [{"type": "text", "text": f"question {seed}"}, *parts, {"type": "text", "text": "?"}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0}


@contextlib.contextmanager
def streaming(server: Serve, seed: int) -> Iterator[Iterator[str]]:
    """The pieces of an answer's text, of a client that comes again where it is refused for lack of room."""
    body = {**asked(seed), "max_tokens": TOKENS, "stream": True}
    with httpx.Client(timeout=60, trust_env=False) as client:
        for _ in range(60):
            with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
                if response.status_code == 200:
                    yield _pieces(response)
                    return
                assert response.status_code == 503, response.read()
            time.sleep(0.5)
    raise AssertionError("never a place")


def _pieces(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            event = json.loads(data)
            assert "error" not in event, event
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])


def answer(server: Serve, seed: int, begun: Barrier | None = None) -> str:
    with streaming(server, seed) as pieces:
        text = next(pieces) + next(pieces)
        if begun is not None:
            begun.wait(60.0)
        return text + "".join(pieces)


def together(server: Serve, seeds: Sequence[int]) -> list[str]:
    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(lambda seed: answer(server, seed), seeds))


def test_answers_are_those_alone_where_features_do_not_all_fit(server: Serve) -> None:
    seeds = range(PLACES + 2)
    alone = [answer(server, seed) for seed in seeds]
    server.http.post(f"{server.url}/v1/prefix_cache/reset")
    assert together(server, seeds) == alone
    assert server.status()["engine"]["statistics"]["runner"]["features"]["evicted"] > 0


def test_the_next_engine_encodes_the_images_of_running_requests_again(server: Serve) -> None:
    """R3."""
    seeds = range(20, 24)
    alone = [answer(server, seed) for seed in seeds]
    old, begun = server.child(), Barrier(len(seeds) + 1)
    with ThreadPoolExecutor(len(seeds)) as pool:
        readers = [pool.submit(answer, server, seed, begun) for seed in seeds]
        begun.wait(60.0)
        os.kill(old, signal.SIGKILL)
        assert [reader.result() for reader in readers] == alone
    assert gone(old)
    assert server.status()["engine"]["quarantined"] == 0


def test_clients_that_leave_at_any_moment_hold_no_pixels(server: Serve) -> None:
    """While their image is prepared, waits, or is encoded, and while they read."""
    chance = random.Random(1)

    def leave(seed: int) -> None:
        body = {**asked(seed), "max_tokens": TOKENS, "stream": True}
        patience = httpx.Timeout(10.0, read=chance.uniform(0.01, 0.5))
        with (
            contextlib.suppress(httpx.TimeoutException),
            httpx.Client(timeout=patience, trust_env=False) as client,
            client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response,
        ):
            next(response.iter_bytes(), None)

    with ThreadPoolExecutor(PLACES) as pool:
        list(pool.map(leave, range(40, 70)))
    server.idle()
    until("no pixels in use", lambda: server.status()["images"]["pixels"]["used_bytes"] == 0)
    assert answer(server, 0) == answer(server, 0)


def test_a_server_that_ends_leaves_no_shared_memory(start: Start, tmp_path: Path) -> None:
    server = start(make_vision_chat(tmp_path / "model", ends=())).ready()
    with streaming(server, 0) as pieces:
        next(pieces)
        own = _marks(server)
        assert len(own) == 1 or not shared_memory.FOLDER.exists()
        assert _objects(own) or not own
        server.process.send_signal(signal.SIGTERM)
        "".join(pieces)
    assert server.stopped(60.0) == 0
    assert not _objects(own)


def _marks(server: Serve) -> list[str]:
    """The marks of shared memory that a server owns, which it has open."""
    if not shared_memory.FOLDER.exists():
        return []
    opened = Path(f"/proc/{server.process.pid}/fd").iterdir()
    return [path.name for path in map(Path.readlink, opened) if path.parent == shared_memory.FOLDER]


def _objects(marks: Sequence[str]) -> list[str]:
    return [name for name in shared_memory._listed() if any(name.startswith(mark) for mark in marks)]

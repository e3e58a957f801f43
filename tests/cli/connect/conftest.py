"""A home folder of its own for each test, and a server that lists a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

HOMES = (
    *("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "QWEN_HOME", "CONTINUE_GLOBAL_DIR", "LLM_USER_PATH"),
    "TREADLE_API_KEY",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr("sys.platform", "linux")
    for name in HOMES:
        monkeypatch.delenv(name, raising=False)
    return folder


class ListsModels(ThreadingHTTPServer):
    """A server with /v1/models. `key` is what it asks for, `cards` what it lists, `state` its /v1/status, `status` what
    it answers with, `raw` the bytes that it answers with in place of all this."""

    key = ""
    status = 200
    raw = b""
    state: Any = {}  # noqa: RUF012
    cards: Any = ({"id": "org/model", "max_model_len": 65536},)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Models)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Models(BaseHTTPRequestHandler):
    server: ListsModels

    def do_GET(self) -> None:
        if self.server.raw:
            self.wfile.write(self.server.raw)
            return
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        status = 401 if self.server.key and given != self.server.key else self.server.status
        answer = {"data": list(self.server.cards)} if self.path == "/v1/models" else self.server.state
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ListsModels]:
    with ListsModels() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()

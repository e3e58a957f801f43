"""Small OpenAI-compatible server, in this process or as a program, with faults on demand."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from treadle.bench.schemas import random_value


class FakeServer(ThreadingHTTPServer):
    """Server whose answers have the requested number of tokens. `strict` refuses unknown fields, `busy` refuses that
    number of generations first, `breaks` ends every answer halfway; `status` is the answer of /v1/status."""

    daemon_threads = True

    def __init__(
        self,
        port: int = 0,
        models: tuple[str, ...] = ("fake",),
        *,
        strict: bool = False,
        busy: int = 0,
        breaks: bool = False,
        status: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.models = models
        self.strict = strict
        self.busy = busy
        self.breaks = breaks
        self.status = status
        self.lives = float("inf")
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that leave."""


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": id_} for id_ in self.server.models]})
        elif self.path == "/v1/status" and self.server.status is not None:
            self._send(200, self.server.status)
        elif self.path == "/openapi.json":
            self._send(200, {"info": {"title": "Fake", "version": "1.2"}})
        else:
            self._send(404, {"error": {"code": "not_found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if len(self.server.asked) > self.server.lives:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.server.strict and "ignore_eos" in body:
            self._send(400, {"error": {"code": "unknown_field", "message": "ignore_eos"}})
        elif self.server.models and body["model"] not in self.server.models:
            self._send(404, {"error": {"code": "model_not_found"}})
        elif self.server.busy > 0:
            self.server.busy -= 1
            self._send(503, {"error": {"code": "loading"}})
        else:
            self._answer(body)

    def _answer(self, body: dict[str, Any]) -> None:
        deltas, reason = _answer_of(body)
        tokens = len(deltas)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for i, delta in enumerate(deltas):
            if self.server.breaks and i >= tokens / 2:
                return
            self._event({"choices": [{"delta": delta}]})
        self._event({"choices": [{"delta": {}, "finish_reason": reason}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _send(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _answer_of(body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the deltas of an answer and its finish reason: a value of the schema, a tool call, or text."""
    if "response_format" in body:
        value = _value(body["response_format"]["json_schema"]["schema"])
        return [{"content": value[:5]}, {"content": value[5:]}], "stop"
    if "tools" in body:
        function = body["tools"][0]["function"]
        call = {"name": function["name"], "arguments": _value(function["parameters"])}
        return [{"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": call}]}], "tool_calls"
    return [{"content": f"{i} "} for i in range(body["max_tokens"])], "length"


def _value(schema: dict[str, Any]) -> str:
    return json.dumps(random_value(random.Random(0), schema))


@contextlib.contextmanager
def fake_server(*args: Any, **kwargs: Any) -> Iterator[FakeServer]:
    """Context manager of a server in a thread of this process."""
    with FakeServer(*args, **kwargs) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--pid-file")
    options.add_argument("--die", help="end at once, with this as the last words")
    options.add_argument("--die-after", type=float, default=float("inf"), help="so many generations")
    options.add_argument("--deaf", action="store_true", help="never listen")
    given = options.parse_args()
    if given.pid_file:
        Path(given.pid_file).write_text(str(os.getpid()), encoding="ascii")
    if given.die:
        sys.exit(given.die)
    if given.deaf:
        threading.Event().wait()
    server = FakeServer(given.port)
    server.lives = given.die_after
    server.serve_forever()


if __name__ == "__main__":
    main()

"""A hub on the loopback: one model's files behind the few routes that the hub's own client asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class FakeHub(ThreadingHTTPServer):
    """`requests` are (method, path, Range header). With `cut` set, a file larger than it breaks off there once; with
    `status` set, that (and `error_code`) is the answer to everything."""

    daemon_threads = True

    def __init__(self, model: str, files: Mapping[str, bytes], *, cut: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.files = files
        self.cut = cut
        self.status = 0
        self.error_code = ""
        self.requests: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join(30)
        self.server_close()

    def fetched(self) -> set[str]:
        """The names of the files that were asked for."""
        marker = f"/resolve/{COMMIT}/"
        return {path.split(marker)[1] for method, path, _ in self.requests if method == "GET" and marker in path}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.status:
            self._send(hub.status, b"{}", {"X-Error-Code": hub.error_code} if hub.error_code else {}, body)
        elif path.startswith(f"/{hub.model}/resolve/{COMMIT}/"):
            self._file(path.rsplit(f"{COMMIT}/", 1)[1], body)
        elif path.startswith(f"/api/models/{hub.model}/tree/"):
            self._json([_entry(name, data) for name, data in hub.files.items()], body)
        elif path == f"/api/models/{hub.model}" or path.startswith(f"/api/models/{hub.model}/revision/main"):
            names = [{"rfilename": name} for name in hub.files]
            self._json({"id": hub.model, "sha": COMMIT, "siblings": names, "tags": [], "downloads": 0}, body)
        elif path.startswith(f"/api/models/{hub.model}/revision/"):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _file(self, name: str, body: bool) -> None:
        data = self.server.files[name]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], headers, body)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        cut = self.server.cut
        if body and cut is not None and len(data) > cut:
            self.server.cut = None
            self.wfile.write(data[:cut])
            self.close_connection = True
        elif body:
            self.wfile.write(data)


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha256(data).hexdigest()}

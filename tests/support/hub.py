"""Stand-in for the Hugging Face hub on the loopback: one repository, and faults on demand.

Implements the part of the hub's HTTP API that `huggingface_hub` uses to download a model: model info and tree,
`resolve` with the hub's headers, LFS files behind a redirect to `/cdn/`, ranges, revisions, access control.

    python -m tests.support.hub FOLDER --model org/tiny --port 8500 --rate 2000000 --cut 5000000 --cut 12000000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
_LFS = (".safetensors", ".gguf", ".bin", ".model")
_BLOCK = 64 * 1024


class HubServer(ThreadingHTTPServer):
    """Server of `files` as repository `model`, which counts sent bytes.

    Faults, all off at first:
    `cuts`: each body of an LFS file that is longer than the first number is cut off after that many bytes (a negative
        number: by a reset), and the number is used up.
    `statuses`: each answer about a file's content takes the first one.
    `broken_after`: a file of which that many bytes were sent gets 503 from then on.
    `status`, with `error_code`: the answer to everything.
    `stall`: bodies stop halfway until `released`; `stalled` is set when one did.
    `ignore_ranges`: every range request gets the whole file.
    `token`: token required of clients; without it, `hidden` decides between "no such repository" and "gated".
    `corrupt`: number of LFS bodies with a wrong first byte.
    `rate`: bytes a second and connection.
    `etags`, `sizes`: false values for files; `late_etags`: the same, but not in the model's info.
    `info`: the body of the model's info.
    `leaked`: a token that was sent to the other host, which must not get it.
    """

    daemon_threads = True

    def __init__(self, model: str, files: Mapping[str, bytes], *, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.model = model
        self.files = dict(files)
        self.revisions = {"main": COMMIT}
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.status, self.error_code = 0, ""
        self.stall = threading.Event()
        self.broken_after = 0
        self.ignore_ranges = False
        self.token, self.hidden = "", False
        self.etags: dict[str, object] = {}
        self.late_etags: dict[str, object] = {}
        self.sizes: dict[str, object] = {}
        self.info: bytes | None = None
        self.leaked = ""
        self.corrupt = 0
        self.rate = 0.0
        self.requests: list[tuple[str, str, str | None]] = []
        self.asked: list[tuple[str, str | None]] = []
        self.sent: Counter[str] = Counter()
        self.released = threading.Event()
        self.stalled = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def cdn(self) -> str:
        """Address of LFS files: on another host, so that clients must not send it their token."""
        return f"http://localhost:{self.server_address[1]}/cdn"

    def __enter__(self) -> HubServer:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self.shutdown()
        self._thread.join(30)
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that leave."""

    def fetched(self) -> set[str]:
        """Return the names of the files whose content was requested."""
        return {name for name in self.files if self.sent[name]}

    def ranges(self, name: str) -> list[str | None]:
        """Return the Range headers of the requests for the content of file `name`, in order."""
        return [span for asked, span in self.asked if asked == name]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder as a repository's."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def wait_for_partial(folder: Path, limit_s: float = 60.0) -> None:
    """Wait until some file is partly on disk, below the model's folder in the hub's cache."""
    ends = time.monotonic() + limit_s
    while not any(path.stat().st_size for path in folder.glob("blobs/*.incomplete")):
        assert time.monotonic() < ends, f"no partial file in {folder} within {limit_s:g} s"
        time.sleep(0.02)


def is_lfs(name: str) -> bool:
    return name.endswith(_LFS)


def etag_of(name: str, data: bytes) -> str:
    """Return the hub's name of a file's content: sha256 for LFS, git's blob id for other files."""
    if is_lfs(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        api, repository = f"/api/models/{hub.model}", f"/{hub.model}/resolve/"
        if hub.status:
            self._refuse(hub.status, hub.error_code)
        elif path.startswith("/cdn/"):
            hub.leaked = hub.leaked or self.headers.get("Authorization") or ""
            self._content(path.removeprefix("/cdn/"))
        elif not (path == api or path.startswith((f"{api}/", repository))) or (hub.hidden and not self._is_known()):
            self._refuse(401, "RepoNotFound")
        elif path.startswith(f"{api}/tree/"):
            etags = {**hub.etags, **hub.late_etags}
            self._json(
                [_described(_tree_entry(name, data), etags, hub.sizes, name) for name, data in hub.files.items()]
            )
        elif path.startswith(repository):
            self._resolve(*path.removeprefix(repository).split("/", 1))
        else:
            self._info(path.removeprefix(api).removeprefix("/revision/") or "main")

    def _is_known(self) -> bool:
        token = self.server.token
        return not token or self.headers.get("Authorization") == f"Bearer {token}"

    def _info(self, revision: str) -> None:
        hub, commit = self.server, self._commit(revision)
        if hub.info is not None:
            self._send(200, hub.info, {"Content-Type": "application/json"})
            return
        if not commit:
            self._refuse(404, "RevisionNotFound")
            return
        siblings = [_described(_sibling(name, data), hub.etags, hub.sizes, name) for name, data in hub.files.items()]
        gated = "manual" if self.server.token and not self.server.hidden else False
        self._json({"id": self.server.model, "sha": commit, "siblings": siblings, "gated": gated, "private": False})

    def _commit(self, revision: str) -> str:
        known = self.server.revisions
        return revision if revision in known.values() else known.get(revision, "")

    def _resolve(self, revision: str, name: str) -> None:
        hub, commit = self.server, self._commit(revision)
        data = hub.files.get(name)
        if not commit:
            return self._refuse(404, "RevisionNotFound")
        if not self._is_known():
            return self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        if data is None:
            return self._refuse(404, "EntryNotFound")
        tag = hub.late_etags.get(name, hub.etags.get(name, etag_of(name, data)))
        about = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_lfs(name):
            about |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{tag}"', "Location": f"{hub.cdn}/{name}"}
            return self._send(302, b"", about)
        return self._content(name, {**about, "ETag": f'"{tag}"'})

    def _content(self, name: str, about: Mapping[str, str] | None = None) -> None:
        hub, span = self.server, self.headers.get("Range")
        if self.command == "GET":
            hub.asked.append((name, span))
            if hub.statuses:
                return self._refuse(hub.statuses.pop(0))
            if hub.broken_after and hub.sent[name] >= hub.broken_after:
                return self._refuse(503)
        data = hub.files[name]
        first, last = _span(span, len(data)) if span and not hub.ignore_ranges else (0, len(data) - 1)
        if first >= len(data) > 0:
            return self._refuse(416)
        headers = {**(about or {"ETag": f'"cdn-{name}"'}), "Accept-Ranges": "bytes"}
        partial = span is not None and not hub.ignore_ranges
        if partial:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        if hub.corrupt and first == 0 and is_lfs(name) and self.command == "GET":
            hub.corrupt -= 1
            data = bytes([data[0] ^ 255]) + data[1:]
        return self._send(206 if partial else 200, data[first : last + 1], headers, name)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, error_code: str = "") -> None:
        self._send(status, b"{}", {"X-Error-Code": error_code} if error_code else {})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self._body(data, name)

    def _body(self, data: bytes, name: str) -> None:
        cuts = self.server.cuts
        cut = cuts.pop(0) if cuts and is_lfs(name) and len(data) > abs(cuts[0]) else 0
        for at in range(0, abs(cut) or len(data), _BLOCK):
            block = data[at : min(at + _BLOCK, abs(cut) or len(data))]
            if name and self.server.stall.is_set() and at:
                self.server.stalled.set()
                self.server.released.wait(60)
            self.wfile.write(block)
            self.server.sent[name] += len(block)
            if self.server.rate:
                time.sleep(len(block) / self.server.rate)
        if cut:
            self.close_connection = True
            if cut < 0:
                _reset(self.connection)


def _reset(connection: object) -> None:
    import socket
    import struct

    assert isinstance(connection, socket.socket)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _span(text: str, size: int) -> tuple[int, int]:
    first, last = text.removeprefix("bytes=").split("-")
    return int(first), min(int(last), size - 1) if last else size - 1


def _sibling(name: str, data: bytes) -> dict[str, object]:
    tag = etag_of(name, data)
    if not is_lfs(name):
        return {"rfilename": name, "size": len(data), "blobId": tag}
    lfs = {"sha256": tag, "size": len(data), "pointerSize": 134}
    return {"rfilename": name, "size": len(data), "blobId": "b" * 40, "lfs": lfs}


def _tree_entry(name: str, data: bytes) -> dict[str, object]:
    tag = etag_of(name, data)
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": tag}
    if is_lfs(name):
        entry |= {"oid": "b" * 40, "lfs": {"oid": tag, "size": len(data), "pointerSize": 134}}
    return entry


def _described(
    entry: dict[str, object], etags: Mapping[str, object], sizes: Mapping[str, object], name: str
) -> dict[str, object]:
    """Return the hub's description of a file, with false values of its etag and size."""
    if name in sizes:
        entry["size"] = sizes[name]
    if name not in etags:
        return entry
    lfs = entry.get("lfs")
    if isinstance(lfs, dict):
        lfs["sha256" if "sha256" in lfs else "oid"] = etags[name]
    else:
        entry["blobId" if "blobId" in entry else "oid"] = etags[name]
    return entry


def main() -> None:
    """Serve a folder until interrupted, for manual tests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="org/tiny")
    parser.add_argument("--port", type=int, default=8500)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--cut", type=int, action="append", default=[])
    given = parser.parse_args()
    hub = HubServer(given.model, files_of(given.folder), port=given.port)
    hub.rate, hub.cuts = given.rate, given.cut
    print(f"{hub.url} serves {given.model}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        hub.serve_forever()
    except KeyboardInterrupt:
        print("sent:", {name: sent for name, sent in hub.sent.items() if is_lfs(name)})
        print("ranges:", {name: hub.ranges(name) for name in hub.files if is_lfs(name)})


if __name__ == "__main__":
    main()

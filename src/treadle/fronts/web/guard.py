"""Who may come in: the API key, and browsers that act for another site (CSRF, DNS rebinding).

The raw path decides, never a URL rebuilt from the Host header.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import NotAuthenticated
from ..salts import Salts
from .errors import ForeignSite, send_error

OPEN_PATH = b"/health/live"
READING = ("GET", "HEAD")
HOST = re.compile(r"[A-Za-z0-9._~:%\[\]-]*")
NOBODY = "invalid.host"
TENANT = "treadle.tenant"


class Guard:
    """With `api_key`, everything but `GET /health/live` needs it, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Without a key, a server bound to this machine only (`host`) is reached by address or plain name, not through a
    public domain name that someone let point here.

    Handlers find in `scope[TENANT]` who it is, as `salts` knows them: the key itself goes no further.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, host: str, salts: Salts) -> None:
        self._app = app
        self._salts = salts
        self._key = None if api_key is None else _digest(api_key.encode())
        self._local_only = api_key is None and _is_local(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except (NotAuthenticated, ForeignSite) as error:
                await send_error(send, error)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
        self._check_site(scope, headers)
        key = self._key_of(headers)
        if key is None and not _is_open(scope):
            raise NotAuthenticated(
                "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        scope[TENANT] = self._salts.tenant(key or b"")

    def _key_of(self, headers: dict[bytes, bytes]) -> bytes | None:
        """The key that the client came with, maybe b""; None where a certain one is needed and this is not it."""
        scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        given = (bearer, headers.get(b"x-api-key", b""))
        if self._key is None:
            return given[0] or given[1]
        fits = [hmac.compare_digest(_digest(key), self._key) for key in given]
        return given[fits.index(True)] if any(fits) else None

    def _check_site(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        host = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if self._local_only and "." in host and not _is_address(host) and not _is_local(host):
            raise ForeignSite(
                f"this server answers on this machine only, not as '{_short(host)}': use its address, or start it "
                "with an API key"
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if scope["method"] not in READING and origin and _is_foreign(origin, host):
            raise ForeignSite(
                f"requests from the web site '{_short(origin)}' are not taken: call the server from a program, or "
                "serve the page from the same host"
            )


def tenant_of(scope: Scope) -> bytes:
    """Who sent this request, as the guard found."""
    tenant = scope[TENANT]
    assert isinstance(tenant, bytes)
    return tenant


def _is_open(scope: Scope) -> bool:
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    return bool(scope["method"] in READING and raw.split(b"?")[0] == OPEN_PATH)


def _is_foreign(origin: str, host: str) -> bool:
    """Pages of programs (app://, tauri://) are not web sites; an opaque origin can be anyone's."""
    if origin == "null":
        return True
    try:
        parts = urlsplit(origin)
        name = (parts.hostname or "").lower()
    except ValueError:
        return True
    if parts.scheme not in ("http", "https"):
        return False
    return name != host and not _is_local(name)


def _host_name(value: str) -> str:
    """The name in a Host header; what is no host at all counts as someone else's."""
    if not HOST.fullmatch(value.strip()):
        return NOBODY
    try:
        return (urlsplit(f"//{value.strip()}").hostname or "").lower().rstrip(".")
    except ValueError:
        return NOBODY


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return _is_address(host) and ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."

"""Access control of HTTP: host names against DNS rebinding, origins against pages of other sites (CSRF), and the API
key.

A browser that was lured to a name which now points here sends that name as Host: only expected names are answered, and
addresses, which no page can take over. With an API key any name is answered unless `--allowed-host` lists some, as such
a page has no key. The raw path decides, never a URL rebuilt from the Host header.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import InvalidRequest, TreadleError
from ...host_names import ANY, CONTAINER_HOSTS, address_of, host_of, is_program, is_this_machine, matches, origin_of
from ..authentication import NOTHING, Authenticator, Caller
from .access_log import record_error, record_key
from .cors import Origins, header_of, is_preflight, origin_in, send_permission
from .errors import ForeignSite
from .site.key import refuse

log = logging.getLogger(__name__)

OPEN_PATH = b"/health/live"
READING = ("GET", "HEAD")
MAX_LOGGED = 32
CALLER = "treadle.caller"
REFUSAL = "treadle.refusal"


class HostNames:
    """Host names that the server answers to. `any_name` turns the check off."""

    def __init__(self, allowed: Sequence[str] = (), *, host: str = "", any_name: bool = False) -> None:
        """`allowed` are names and `*.` patterns; `host` is the server's bind address: if it is a name, it is answered
        too."""
        self._any = ANY in allowed or (any_name and not allowed)
        self._patterns = [name.lower() for name in allowed]
        self._names = CONTAINER_HOSTS | {host.lower()}

    def __contains__(self, name: str) -> bool:
        known = self._any or name in self._names or is_this_machine(name) or address_of(name) is not None
        return known or any(matches(name, pattern) for pattern in self._patterns)


class Guard:
    """Middleware that checks each request's Host, then its Origin, then its key, and answers the preflights of allowed
    origins.

    If `authenticator` has keys, every route but `GET /health/live` needs one, as `Authorization: Bearer KEY` or
    `x-api-key: KEY`. Handlers find the caller in `scope[CALLER]`: the key itself goes no further. The error in
    `scope[REFUSAL]`, for which a connection has no slot, is sent before any key is looked at.
    """

    def __init__(self, app: ASGIApp, *, authenticator: Authenticator, hosts: HostNames, origins: Origins) -> None:
        self._app = app
        self._authenticator = authenticator
        self._hosts = hosts
        self._origins = origins
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_origin(scope, self._check_host(scope))
            if is_preflight(scope):
                await send_permission(scope, send)
                return
            if REFUSAL in scope:
                raise scope[REFUSAL]
            scope[CALLER] = self._caller(scope)
        except TreadleError as error:
            record_error(scope, error.code)
            await refuse(scope, send, error)
            return
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> str:
        """Return the one host that the request names. A client of HTTP/1.0, which no browser is, may name none: ""."""
        given = [value for name, value in scope["headers"] if name == b"host"]
        if not given and scope["http_version"] == "1.0":
            return ""
        host = host_of(given[0].decode("latin-1")) if len(given) == 1 else None
        if host is None:
            raise InvalidRequest("a request needs one Host header with a host name or an address and maybe a port")
        if host not in self._hosts:
            raise self._refusal(
                f"this server does not answer to the host name '{host}': start it with --allowed-host {host}, or call "
                "it by its address"
            )
        return host

    def _check_origin(self, scope: Scope, host: str) -> None:
        origin = origin_in(scope)
        if not origin or origin in self._origins:
            return
        if is_preflight(scope) or (scope["method"] not in READING and _is_foreign(origin, host)):
            raise self._refusal(_page_refusal(origin_of(origin)))

    def _caller(self, scope: Scope) -> Caller:
        client = scope.get("client")
        peer = client[0] if client else ""
        caller = self._authenticator.caller(self._keys_of(scope), peer, keyless=NOTHING if _is_open(scope) else None)
        record_key(scope, caller.name)
        return caller

    def _keys_of(self, scope: Scope) -> tuple[bytes, ...]:
        """Return the keys of the request; none for the open path, which reveals nothing about a key."""
        if self._authenticator.keys.configured and _is_open(scope):
            return ()
        for name in (b"authorization", b"x-api-key"):
            if self._authenticator.keys.configured and sum(key == name for key, _ in scope["headers"]) > 1:
                raise InvalidRequest(f"a request may have one {name.decode()} header: send one")
        scheme, _, token = (header_of(scope, b"authorization") or b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        return bearer, header_of(scope, b"x-api-key") or b""

    def _refusal(self, text: str) -> ForeignSite:
        """Return the error for the client, logged once, as a browser does not show it to its user."""
        if text not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(text)
            log.warning("refused a request: %s", text)
        return ForeignSite(text)


def caller_of(scope: Scope) -> Caller:
    """Return the caller that the guard found."""
    caller = scope[CALLER]
    assert isinstance(caller, Caller)
    return caller


def _is_open(scope: Scope) -> bool:
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    return bool(scope["method"] in READING and raw.split(b"?")[0] == OPEN_PATH)


def _is_foreign(origin: str, host: str) -> bool:
    """Whether it is a web site that is neither this server's host nor this machine. Pages of programs (app://,
    tauri://) are not web sites; an opaque origin can be anyone's, and so can an unknown scheme."""
    if is_program(origin):
        return False
    scheme, separator, rest = origin.lower().partition("://")
    name = host_of(rest) if separator and scheme in ("http", "https") else None
    return name is None or (name != host and not is_this_machine(name))


def _page_refusal(origin: str | None) -> str:
    if origin is None:
        return (
            "web pages without an origin of their own (files, sandboxed frames) may not call this server: serve the "
            "page over http and start the server with --cors-origin and the page's origin"
        )
    return f"web pages of {origin} may not call this server: start it with --cors-origin {origin}"

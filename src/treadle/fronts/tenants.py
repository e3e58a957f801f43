"""The tenant that a request counts against, and the marks by which it is recognised when its client comes back, for
HTTP and gRPC.

A tenant is an API key where the server asks for keys, else the peer's address: all of this machine are one, and so are
the addresses of one /64 network of IPv6, of which any client may have as many as it likes. A client that was refused
comes back with the same request, so plain SDKs need no change: tenant, path, length, program and idempotency key make
its fingerprint, known before the body is read. Python's hash of bytes has a secret of the process, and a collision
only ever mixes up requests of one tenant.
"""

from __future__ import annotations

from ipaddress import IPv6Network
from typing import Any

from starlette.types import Scope

from ..core.virtual_queue import Arrival
from ..hosts import address_of, site_of

TICKET = "x-treadle-ticket"
ARRIVAL = "treadle.arrival"
THIS_MACHINE = "local"
MAX_TICKET_CHARS = 64
_REPEATS = b"x-stainless-retry-count"  # of the official SDKs: how many times this request was sent before
_PRINTED = (b"content-length", b"user-agent", b"idempotency-key")


def peer_tenant(host: str) -> str:
    """The tenant of a client that is known by its address alone."""
    address = address_of(host)
    if address is None or address.is_loopback:
        return THIS_MACHINE
    site = site_of(address)
    return f"{int(site[0]):x}/{site.prefixlen}" if isinstance(site, IPv6Network) else str(site)


def web_arrival(scope: Scope, tenant: str) -> Arrival:
    """An HTTP request's, made once."""
    arrival = scope.get(ARRIVAL)
    if not isinstance(arrival, Arrival):
        arrival = scope[ARRIVAL] = _web_arrival(tenant, scope)
    return arrival


def _web_arrival(tenant: str, scope: Scope) -> Arrival:
    headers = dict(scope["headers"])
    repeats = headers.get(_REPEATS, b"")
    client = scope.get("client")
    return Arrival(
        tenant=tenant,
        fingerprint=hash((tenant, scope["path"], *(headers.get(name) for name in _PRINTED))),
        ticket_id=headers.get(TICKET.encode(), b"")[:MAX_TICKET_CHARS].decode("latin-1"),
        repeat=int(repeats) > 0 if repeats.isdigit() and len(repeats) < 10 else None,
        via=hash(tuple(client)) if client else 0,
    )


def call_arrival(tenant: str, metadata: Any, request_id: str, prompt: bytes) -> Arrival:
    """A gRPC call's. The gateway sends a request again under its id, or its client sends the same prompt as a new
    request."""
    given = dict(metadata or ()).get(TICKET, "")
    ticket_id = given[:MAX_TICKET_CHARS] if isinstance(given, str) else ""
    return Arrival(tenant=tenant, fingerprint=hash((tenant, prompt)), ticket_id=ticket_id, via=hash(request_id))

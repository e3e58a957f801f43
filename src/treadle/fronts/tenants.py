"""Tenants of requests, and the fingerprints by which a retry is recognised, for HTTP and gRPC.

A tenant is an API key where the server asks for keys, else the peer's address: all addresses of this machine are one,
and so are the addresses of one /64 network of IPv6, since a client can have any number of them. A refused client
retries with the same request, so plain SDKs need no change: tenant, path, length, program and idempotency key make its
fingerprint, known before the body is read. Python's hash of bytes has a secret of the process, and a collision only
ever mixes up requests of one tenant.
"""

from __future__ import annotations

from ipaddress import IPv6Network
from typing import Any

from starlette.types import Scope

from ..core.virtual_queue import Arrival
from ..host_names import address_of, site_of

TICKET = "x-treadle-ticket"
ARRIVAL = "treadle.arrival"
THIS_MACHINE = "local"
MAX_TICKET_CHARS = 64
_RETRY_COUNT = b"x-stainless-retry-count"  # the official SDKs' count of earlier attempts
_FINGERPRINTED = (b"content-length", b"user-agent", b"idempotency-key")


def peer_tenant(host: str) -> str:
    """Return the tenant of a client that is known by its address alone."""
    address = address_of(host)
    if address is None or address.is_loopback:
        return THIS_MACHINE
    site = site_of(address)
    return f"{int(site[0]):x}/{site.prefixlen}" if isinstance(site, IPv6Network) else str(site)


def web_arrival(scope: Scope, tenant: str) -> Arrival:
    """Return an HTTP request's arrival, made once."""
    arrival = scope.get(ARRIVAL)
    if not isinstance(arrival, Arrival):
        arrival = scope[ARRIVAL] = _web_arrival(tenant, scope)
    return arrival


def _web_arrival(tenant: str, scope: Scope) -> Arrival:
    headers = dict(scope["headers"])
    repeats = headers.get(_RETRY_COUNT, b"")
    client = scope.get("client")
    return Arrival(
        tenant=tenant,
        fingerprint=hash((tenant, scope["path"], *(headers.get(name) for name in _FINGERPRINTED))),
        ticket_id=headers.get(TICKET.encode(), b"")[:MAX_TICKET_CHARS].decode("latin-1"),
        repeat=int(repeats) > 0 if repeats.isdigit() and len(repeats) < 10 else None,
        via=hash(tuple(client)) if client else 0,
    )


def call_arrival(tenant: str, metadata: Any, request_id: str, prompt: bytes) -> Arrival:
    """Return a gRPC call's arrival. A retry by the gateway has the same id; a retry by its client has the same prompt
    under a new id."""
    given = dict(metadata or ()).get(TICKET, "")
    ticket_id = given[:MAX_TICKET_CHARS] if isinstance(given, str) else ""
    return Arrival(tenant=tenant, fingerprint=hash((tenant, prompt)), ticket_id=ticket_id, via=hash(request_id))

"""Exposure of a server to the network: rules that refuse a server opened by mistake, and its addresses and access as
text for the person who starts it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .config import Settings
from .errors import ConfigError
from .host_names import ANY, CONTAINER_HOSTS, address_of, addresses_of, is_loopback, url_of

InThread = Callable[[Callable[[], list[str]]], Awaitable[list[str]]]

LOOKUP_S = 1.0
ROUTED_TO = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))  # documentation prefixes


@dataclass(frozen=True)
class Access:
    """One fact about access to a server. `open`: strangers have it, so a person should know."""

    subject: str
    text: str
    open: bool = False


@dataclass(frozen=True)
class Reach:
    """URLs under which clients reach HTTP and gRPC, the nearest first, and who has access."""

    http: tuple[str, ...]
    grpc: tuple[str, ...]
    access: tuple[Access, ...]

    @property
    def url(self) -> str:
        """HTTP's URL on this machine."""
        return self.http[0]


def check(settings: Settings) -> None:
    """Raise ConfigError if the server would be open to the network without a flag that permits it, or if such a flag
    has no effect."""
    _check_http(settings)
    if settings.grpc_port is not None:
        _check_grpc(settings)


def check_open(host: str, *, has_key: bool, no_auth: bool, keys_file: bool = True) -> None:
    """Check an HTTP server at `host`; `keys_file`: its keys may be in a file. Raises ConfigError."""
    if has_key and no_auth:
        raise ConfigError(
            "--no-auth and an API key contradict each other: leave one out (--api-key, --api-keys, or "
            "TREADLE_API_KEY or TREADLE_API_KEYS in the environment)",
            param="no_auth",
        )
    local = is_loopback(host)
    if local and no_auth:
        raise ConfigError(f"--no-auth does nothing on {host}, where no key is needed: leave it out", param="no_auth")
    if not (local or has_key or no_auth):
        ways = "--api-key, or --api-keys" if keys_file else "--api-key"
        raise ConfigError(
            f"--host {host} opens the server to the network without a key: set TREADLE_API_KEY (or {ways}), or give "
            "--no-auth to let everyone in",
            param="host",
        )


def _check_http(settings: Settings) -> None:
    check_open(settings.host, has_key=settings.has_keys, no_auth=settings.no_auth)


def _check_grpc(settings: Settings) -> None:
    host = grpc_host(settings)
    if settings.grpc_no_auth and settings.grpc_client_ca is not None:
        raise ConfigError(
            "--grpc-no-auth and --grpc-client-ca contradict each other: leave one out", param="grpc_no_auth"
        )
    if settings.grpc_auth and settings.grpc_no_auth:
        raise ConfigError("--grpc-auth and --grpc-no-auth contradict each other: leave one out", param="grpc_auth")
    if settings.grpc_auth and not settings.has_keys:
        raise ConfigError(
            "--grpc-auth asks gRPC clients for an API key and there is none: set TREADLE_API_KEY, or give --api-keys",
            param="grpc_auth",
        )
    local = is_loopback(host)
    if local and settings.grpc_no_auth:
        raise ConfigError(
            f"--grpc-no-auth does nothing on {host}, where nothing is asked for: leave it out", param="grpc_no_auth"
        )
    if not (local or settings.has_keys or settings.grpc_no_auth or settings.grpc_client_ca is not None):
        raise ConfigError(
            f"gRPC on {host} is open to the network, as there is no API key to ask for: keep it here with --grpc-host "
            "127.0.0.1, set TREADLE_API_KEY, ask clients for a certificate with --grpc-client-ca, or give "
            "--grpc-no-auth to let everyone in",
            param="grpc_host",
        )


def grpc_host(settings: Settings) -> str:
    """Return the address that gRPC binds."""
    return settings.grpc_host or settings.host


async def reach_of(settings: Settings, port: int, grpc_port: int | None, in_thread: InThread) -> Reach:
    """Return the reach of a server that listens on these ports. `in_thread` runs a look-up off the event loop."""
    grpc: tuple[str, ...] = ()
    if grpc_port is not None:
        scheme = "grpc" if settings.grpc_cert is None else "grpcs"
        host = grpc_host(settings)
        host = "::" if host == "0.0.0.0" else host  # gRPC takes either wildcard for both families
        grpc = tuple(url_of(scheme, at, grpc_port) for at in await addresses(host, in_thread))
    http = tuple(url_of("http", at, port) for at in await addresses(settings.host, in_thread))
    return Reach(http, grpc, access_of(settings))


def access_of(settings: Settings) -> tuple[Access, ...]:
    """Return the access that these settings give; they have passed `check`."""
    lines = [http_access(settings.host, has_key=settings.has_keys, no_auth=settings.no_auth)]
    if settings.grpc_port is not None:
        lines.append(_grpc_access(settings))
    if settings.allowed_host or settings.no_auth:
        lines.append(_names(settings))
    if settings.cors_origin:
        lines.append(_pages(settings))
    return tuple(lines)


def http_access(host: str, *, has_key: bool, no_auth: bool) -> Access:
    """Return the access to an HTTP server at `host` that has passed `check_open`."""
    if no_auth:
        return Access("HTTP", "anyone who reaches these addresses: no key is asked for (--no-auth)", open=True)
    clients = "anyone on this machine" if is_loopback(host) else "anyone who reaches these addresses"
    return Access("HTTP", f"{clients}, with an API key" if has_key else clients)


def _grpc_access(settings: Settings) -> Access:
    if settings.grpc_client_ca is not None:
        more = " and an API key (--grpc-auth)" if settings.grpc_auth else ""
        return Access("gRPC", f"clients with a certificate of {settings.grpc_client_ca}{more}")
    if settings.grpc_no_auth:
        return Access("gRPC", "anyone who reaches these addresses: no key is asked for (--grpc-no-auth)", open=True)
    local = is_loopback(grpc_host(settings))
    clients = "anyone on this machine" if local else "anyone who reaches these addresses"
    if not settings.has_keys:
        return Access("gRPC", clients)
    if settings.grpc_auth:
        return Access("gRPC", f"{clients}, with an API key (--grpc-auth)")
    return Access(
        "gRPC", f"{clients}, without a key" if local else f"{clients}, with an API key; this machine without one"
    )


def _names(settings: Settings) -> Access:
    if ANY in settings.allowed_host:
        return Access("names", "every host name (--allowed-host '*')", open=not settings.has_keys)
    return Access("names", ", ".join(["addresses", "localhost", *sorted(CONTAINER_HOSTS), *settings.allowed_host]))


def _pages(settings: Settings) -> Access:
    if ANY in settings.cors_origin:
        return Access("pages", "of every web site (--cors-origin '*')", open=not settings.has_keys)
    return Access("pages", "of " + ", ".join(settings.cors_origin))


# Addresses ------------------------------------------------------------------------------------------------------------


async def addresses(host: str, in_thread: InThread) -> list[str]:
    """Return the addresses under which clients reach a server bound to `host`: this machine's own for a wildcard."""
    address = address_of(host)
    if address is None or not address.is_unspecified:
        return [host]
    found = ["127.0.0.1", *_routed_addresses()]
    with contextlib.suppress(TimeoutError, OSError):
        found += await asyncio.wait_for(in_thread(_hostname_addresses), LOOKUP_S)
    return [text for text in dict.fromkeys(found) if _is_reachable(text, both_families=address.version == 6)]


def _is_reachable(text: str, *, both_families: bool) -> bool:
    """Whether clients elsewhere can use this address. True for 127.0.0.1 as well, which serves clients here."""
    address = address_of(text)
    if address is None or (address.version == 6 and not both_families):
        return False
    return text == "127.0.0.1" or not (address.is_loopback or address.is_link_local or address.is_unspecified)


def _routed_addresses() -> list[str]:
    """Return the source addresses of this machine's default routes. Connecting a datagram socket sends nothing."""
    found = []
    for family, to in ROUTED_TO:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((to, 9))
            found.append(str(sock.getsockname()[0]))
    return found


def _hostname_addresses() -> list[str]:
    """Return the addresses of this machine's own name."""
    return addresses_of(socket.gethostname())

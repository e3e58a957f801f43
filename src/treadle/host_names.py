"""Syntax of host names, addresses and web origins, and tests whether they are this machine. Only `resolved` asks a
resolver."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from .errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

ANY = "*"
IPV6_SITE_BITS = 64
MAX_NAME = 253
CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
"""The names under which containers reach their host. `.internal` is reserved: no public DNS server can claim them."""

PROGRAM_SCHEMES = frozenset(
    {"app", "capacitor", "chrome-extension", "electron", "ionic", "moz-extension", "obsidian"}
    | {"safari-web-extension", "tauri", "vscode-file", "vscode-webview"}
)
"""Schemes of the pages of desktop and mobile programs and of browser extensions: no web site can have one."""

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_HEADER = re.compile(r"(\[[0-9a-f:.]+(?:%[a-z0-9._~-]+)?\]|[a-z0-9._-]+)(?::\d{0,5})?", re.IGNORECASE)
_ORIGIN = re.compile(rf"([a-z][a-z0-9+.-]*)://({_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:.]+\])(?::(\d{{1,5}}))?")
_PROGRAM = re.compile(r"([a-z][a-z0-9+.-]*)://[a-z0-9._-]*(?::\d{1,5})?")
_SHORT = re.compile(r"(?:0x[0-9a-f]+|[0-9]+)(?:\.(?:0x[0-9a-f]+|[0-9]+)){0,3}", re.IGNORECASE)
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def host_of(header: str) -> str | None:
    """Return the name or address in a Host header: lower case, without port, brackets and final dot. None if the header
    is not one host with an optional port."""
    match = _HEADER.fullmatch(header.strip())
    if match is None:
        return None
    host = match[1].lower().strip("[]").removesuffix(".")
    return host if is_pattern(host) or address_of(host) is not None else None


def address_of(host: str) -> Address | None:
    """Return `host` as an address; None for a name. An IPv4 address mapped to IPv6 becomes the IPv4 address."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def site_of(address: Address) -> Address | ipaddress.IPv6Network:
    """Return the part of an address that identifies one client: all of an IPv4 address, the /64 network of an IPv6 one,
    since a client with one address of it can have all."""
    if address.version == 4:
        return address
    return ipaddress.IPv6Network((int(address), IPV6_SITE_BITS), strict=False)


def bindable(host: str) -> str:
    """Return `host` in the form that every library reads: an IPv6 address without brackets, a short IPv4 address
    (127.1) in full."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if bare != host and address_of(bare.partition("%")[0]) is not None:
        return bare
    if _SHORT.fullmatch(host):
        with contextlib.suppress(OSError):
            return socket.inet_ntoa(socket.inet_aton(host))
    return host


def is_this_machine(host: str) -> bool:
    """Whether `host` is a loopback address, `localhost`, or a name below it."""
    address = address_of(host)
    if address is not None:
        return address.is_loopback
    return host == "localhost" or host.endswith(".localhost")


def is_pattern(text: str) -> bool:
    """Whether `text` is a host name, or `*.` and a host name, in lower case."""
    name = text.removeprefix("*.")
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None and address_of(name) is None


def matches(host: str, pattern: str) -> bool:
    """Whether `host` is the name `pattern` or, if that begins with `*.`, a name below it."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def origin_of(text: str) -> str | None:
    """Return `text` as browsers write an origin: `scheme://host`, with the port unless it is the scheme's own. None for
    text that is no origin, and for `null`."""
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        return None
    scheme, host, port = match.groups()
    return f"{scheme}://{host}" + ("" if port in (None, _DEFAULT_PORTS.get(scheme)) else f":{port}")


def is_program(origin: str) -> bool:
    """Whether `origin` is that of a program's pages or of a browser extension."""
    match = _PROGRAM.fullmatch(origin.lower())
    return match is not None and match[1] in PROGRAM_SCHEMES


def nearest_origin(text: str) -> str | None:
    """Return the origin that was probably meant: with a scheme, without a path. None if it cannot be guessed."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
    except ValueError:
        return None
    return origin_of(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}")


def url_of(scheme: str, host: str, port: int) -> str:
    """Return the URL of a server at `host`."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def server_of(url: str, schemes: Collection[str]) -> SplitResult | None:
    """Return the parts of a server's URL, whose scheme is http where it names none; None for text that is no URL of
    one of `schemes`, with a host, a port from 1 to 65535 if any, and neither a password nor blanks."""
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        return None
    host = parts.hostname
    if not host or parts.scheme not in schemes or port == 0 or "@" in parts.netloc or re.search(r"[\s\0-\x1f]", given):
        return None
    if ":" in host and address_of(host.partition("%")[0]) is None:
        return None
    return parts


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` is reached from this machine alone; names are looked up. Raises ConfigError for
    a name that has no address."""
    if address_of(host) is not None or host == "localhost":
        return is_this_machine(host)
    return all(is_this_machine(address) for address in resolved(host))


def addresses_of(host: str, port: int | None = None) -> list[str]:
    """Return the addresses that the system knows of a name, which may take it long. Raises OSError and UnicodeError."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def resolved(host: str) -> list[str]:
    """Return the addresses of `host`. Raises ConfigError if it has none."""
    try:
        return addresses_of(host)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "this is no host name"
        raise ConfigError(
            f"can't listen on '{host}': {reason}; give --host an address or a name of this machine"
        ) from error

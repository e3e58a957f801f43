"""Fetcher of images by URL: from hosts of the operator's list alone, and never from an address that is not public.

- The name is looked up once, when the connection is made, and the connection goes to an address that was checked. So
  a name that changes its address in between gains nothing.
- One address that is not public refuses the name: of a mixed answer nobody knows which one will be taken.
- A redirect is a new URL with the same checks.
- Bytes, redirects and time are limited while the answer is read. So is what one tenant fetches at once, and looks up:
  hosts that answer slowly, or whose names do, hold up nobody else's images.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from ...errors import InvalidRequest
from ...host_names import ANY, Address, address_of, host_of, matches
from .name_lookups import NameLookups
from .needed import MAX_IMAGE_BYTES, too_large
from .turns import FairTurns

TOTAL_S = 10.0
MAX_REDIRECTS = 3
AT_ONCE = 16
AT_ONCE_EACH = 8
MAX_ADDRESSES = 4
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = [(b"accept", b"image/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"treadle")]

_NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in (
        *("192.0.0.0/24", "192.88.99.0/24"),
        # Each address of these stands for an IPv4 address: mapped, translated (NAT64), or tunnelled.
        *("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16"),
        *("fec0::/10", "3fff::/20", "5f00::/16"),
    )
]

_BLANKS = "".join(map(chr, range(0x21)))
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
"""A host that URLs take for an IPv4 address, by its last label: some notations of these look like names."""

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


class _Refused(Exception):
    """A URL that is not fetched, with the words for the client."""


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet: neither private, nor of this machine or link, nor one that
    stands for another address."""
    return address.is_global and not address.is_multicast and not any(address in network for network in _NOT_PUBLIC)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connections to checked addresses of the names they are asked for. Each address but the last gets `limit_s`
    seconds."""

    def __init__(self, lookup: Lookup, allows: Callable[[Address], bool], limit_s: float) -> None:
        self._lookup = lookup
        self._allows = allows
        self._limit_s = limit_s
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            found = await self._lookup(host, port)
        except (OSError, UnicodeError):
            raise _Refused("its host has no address") from None
        addresses = [address_of(text.partition("%")[0]) for text in found]
        if not addresses:
            raise _Refused("its host has no address")
        if any(address is None or not self._allows(address) for address in addresses):
            raise _Refused("its host is not on the public internet")
        *others, last = (str(address) for address in addresses[:MAX_ADDRESSES])
        for address in others:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._inner.connect_tcp(address, port, self._limit_s, local_address, socket_options)
        return await self._inner.connect_tcp(last, port, timeout, local_address, socket_options)


class ImageFetcher:
    """Fetcher of images from `hosts`, which are names, `*.` and a name, or `*` for every host. `allows` tests an
    address; `ports` are those of the schemes."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        total_s: float = TOTAL_S,
        lookup: Lookup | None = None,
        allows: Callable[[Address], bool] = is_public,
        ports: dict[str, int] | None = None,
    ) -> None:
        self._hosts = tuple(host.lower() for host in hosts)
        self._total_s = total_s
        self._ports = PORTS if ports is None else ports
        self._lookup = lookup
        self._allows = allows
        self._names = NameLookups()
        self._turns = FairTurns(
            AT_ONCE, AT_ONCE_EACH, total_s, "the server is busy: too many images wait to be fetched"
        )
        self._tls: ssl.SSLContext | None = None

    def deadline(self) -> float:
        """Return the time of the event loop until which all that a request begins to fetch now may take: as long as one
        URL may wait for others and take."""
        return asyncio.get_running_loop().time() + 2 * self._total_s

    async def fetch(self, url: str, at: str, tenant: str = "", until: float | None = None) -> tuple[bytes, str]:
        """Return the bytes at a URL, and their media type where it is not one of images; `until` is the deadline of all
        of its request. Raises InvalidRequest, with `at` as its field, and Busy where others take too long."""
        began = False
        try:
            async with asyncio.timeout_at(until), self._turns.turn(tenant), asyncio.timeout(self._total_s):
                began = True
                return await self._follow(url, at, tenant)
        except _Refused as refused:
            raise InvalidRequest(f"{at} can't be fetched: {refused}", param=at) from None
        except TimeoutError:
            if not began:
                raise self._turns.refusal() from None
            limits = f"{self._total_s:g} s, or all of the request's within {2 * self._total_s:g} s"
            raise InvalidRequest(f"{at} can't be fetched: it did not come within {limits}", param=at) from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
            name = type(error).__name__
            raise InvalidRequest(f"{at} can't be fetched: the connection failed ({name})", param=at) from None

    async def _follow(self, url: str, at: str, tenant: str) -> tuple[bytes, str]:
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            answer = await self._get(url, at, tenant)
            if not isinstance(answer, str):
                return answer
            url = answer
        raise _Refused(f"it redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: str) -> None:
        """Raise _Refused for a URL that is not fetched."""
        parts = _split(url)
        if parts.scheme not in self._ports or not parts.hostname:
            raise _Refused("it leads to something that is no http(s) URL")
        if parts.username is not None or parts.password is not None:
            raise _Refused("it has a user name or a password")
        if _port(parts) not in (None, self._ports[parts.scheme]):
            raise _Refused("it has a port of its own")
        host = host_of(parts.hostname)
        if host is None or address_of(host) is not None or _NUMBER.fullmatch(host):
            raise _Refused("its host must be a name")
        if not any(allowed == ANY or matches(host, allowed) for allowed in self._hosts):
            listed = "the server fetches none" if not self._hosts else "the server fetches from others"
            raise _Refused(f"its host is not allowed ({listed}, see --image-hosts): send the image as a data: URL")

    async def _get(self, url: str, at: str, tenant: str) -> tuple[bytes, str] | str:
        """Return the bytes and the media type at a URL, or the URL that it redirects to."""
        parts = _split(url)
        port = self._ports[parts.scheme]
        if parts.scheme == "https" and self._tls is None:
            self._tls = await asyncio.to_thread(httpcore.default_ssl_context)  # reading certificates takes 30 ms
        lookup = self._lookup or partial(self._names.look_up, tenant=tenant)
        backend = _CheckedBackend(lookup, self._allows, self._total_s / MAX_ADDRESSES)
        async with httpcore.AsyncConnectionPool(
            ssl_context=self._tls, network_backend=backend, max_connections=1, retries=0
        ) as pool:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            assert parts.hostname is not None
            place = httpcore.URL(scheme=parts.scheme, host=parts.hostname, port=port, target=_ascii(target))
            headers = [(b"host", parts.hostname.encode()), *HEADERS]
            async with pool.stream("GET", place, headers=headers) as response:
                return await _read(response, url, at)


async def _read(response: httpcore.Response, url: str, at: str) -> tuple[bytes, str] | str:
    given = {name.lower(): value for name, value in response.headers}
    if response.status in REDIRECTS and b"location" in given:
        return _joined(url, given[b"location"].decode("latin-1"))
    if response.status != 200:
        raise _Refused(f"its server answered {response.status}")
    length = given.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > MAX_IMAGE_BYTES:
        raise too_large(at)
    data = bytearray()
    async for part in response.aiter_stream():
        data += part
        if len(data) > MAX_IMAGE_BYTES:
            raise too_large(at)
    media_type = given.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    return bytes(data), "" if media_type.startswith("image/") else media_type[:64]


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url.strip(_BLANKS))
    except ValueError:
        raise _Refused("it is no URL") from None


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise _Refused("it redirects to something that is no URL") from None


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        raise _Refused("its port is no number") from None


def _ascii(target: str) -> bytes:
    """Return a path and a query with their spaces and control characters encoded, as browsers do."""
    try:
        return re.sub(r"[\x00-\x20\x7f]", lambda found: f"%{ord(found[0]):02X}", target).encode("ascii")
    except UnicodeEncodeError:
        raise _Refused("it has characters beyond ASCII: encode them with %") from None

"""Images by URL: from listed hosts alone, never from an address that is not public, and within limits."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpcore
import pytest

from tests.media.pictures import png
from tests.support.aio import in_loop
from treadle.errors import Busy, InvalidRequest
from treadle.fronts.media import fetch, name_lookups
from treadle.fronts.media.fetch import ImageFetcher, is_public
from treadle.fronts.media.name_lookups import NameLookups

DATA = png(20, 10)
Answer = Callable[[str, asyncio.StreamWriter], Any]


def ok(data: bytes = DATA, kind: str = "image/png", *more: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"content-type: {kind}", f"content-length: {len(data)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def redirect(to: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n".encode()


class Site:
    """A web server on a port of this machine, which is a public one to the fetcher: `paths` are its answers."""

    def __init__(self, port: int, paths: dict[str, Any]) -> None:
        self.port = port
        self.paths = paths
        self.asked: list[str] = []
        self.looked_up: list[str] = []
        self.addresses: dict[str, list[str]] = {}

    async def look_up(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        if host == "nowhere.example":
            raise socket.gaierror(8, "not known")
        return self.addresses.get(host, ["127.0.0.1"])

    def fetcher(self, *hosts: str, **options: Any) -> ImageFetcher:
        ports = {"http": self.port, "https": 443}
        return ImageFetcher(
            hosts or ("pics.example",),
            lookup=self.look_up,
            ports=ports,
            **{"allows": lambda address: address == ipaddress.ip_address("127.0.0.1") or is_public(address)} | options,
        )


@asynccontextmanager
async def site(**paths: Any) -> AsyncIterator[Site]:
    found: Site

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode().partition("?")[0].strip("/")
            found.asked.append(head.decode())
            answer = found.paths[path]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    tasks: set[asyncio.Task[None]] = set()
    server = await asyncio.start_server(
        lambda reader, writer: tasks.add(asyncio.create_task(serve(reader, writer))), "127.0.0.1", 0
    )
    found = Site(server.sockets[0].getsockname()[1], paths)
    try:
        yield found
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await fetcher.fetch(url, "at")
    assert caught.value.param == "at"
    return caught.value.message


@in_loop
async def test_an_image_comes_from_a_listed_host() -> None:
    async with site(a=ok(), b=ok(kind="text/html; charset=utf-8")) as web:
        fetcher = web.fetcher("*.example", "other.org")
        assert await fetcher.fetch("http://pics.example/a?size=1#x", "at") == (DATA, "")
        assert await fetcher.fetch("HTTP://PICS.example./a", "at") == (DATA, "")
        assert (await fetcher.fetch("http://pics.example/b", "at"))[1] == "text/html"
        assert web.asked[0].startswith("GET /a?size=1 HTTP/1.1\r\nhost: pics.example\r\n")
        assert "cookie" not in web.asked[0].lower()
        assert web.looked_up == ["pics.example", "pics.example.", "pics.example"]


@in_loop
async def test_chunked_answers_are_read() -> None:
    half = len(DATA) // 2
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (DATA[:half], DATA[half:], b""))
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n" + parts
    async with site(a=answer) as web:
        assert await web.fetcher().fetch("http://pics.example/a", "at") == (DATA, "")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://evil.org/a", "its host is not allowed (the server fetches from others, see --image-hosts)"),
        ("http://pics.example.evil.org/a", "not allowed"),
        ("http://xpics.example/a", "not allowed"),
        ("http://127.0.0.1/a", "its host must be a name"),
        ("http://[::1]/a", "its host must be a name"),
        ("http://2130706433/a", "its host must be a name"),
        ("http://pics.example:22/a", "a port of its own"),
        ("http://pics.example:x/a", "its port is no number"),
        ("http://pics.example@evil.org/a", "a user name or a password"),
        ("http://user:word@pics.example/a", "a user name or a password"),
        ("http://[pics.example/a", "it is no URL"),
        ("http:///a", "no http(s) URL"),
        ("http://pics.example/\u00e4", "beyond ASCII"),
    ],
)
@in_loop
async def test_a_url_that_is_not_listed_is_not_even_looked_up(url: str, words: str) -> None:
    async with site(a=ok()) as web:
        assert words in await refusal(web.fetcher(), url)
        assert (web.looked_up, web.asked) == ([], [])


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f.1", "127.1", "0177.0.0.1", "0", "0x7F000001.", "127.0.0.1.", "pics.0x", "a.b.1"]
)
@in_loop
async def test_an_address_in_another_notation_is_no_name(host: str) -> None:
    async with site(a=ok()) as web:
        assert "its host must be a name" in await refusal(web.fetcher("*"), f"http://{host}/a")
        assert (web.looked_up, web.asked) == ([], [])


@in_loop
async def test_spaces_and_control_characters_are_encoded_as_browsers_do() -> None:
    async with site(**{"a%20b%01": ok(), "c": redirect("/a b\x01?x y")}) as web:
        for url in (" http://pics.example/a b\x01?x y ", "http://pics.example/c"):
            assert (await web.fetcher().fetch(url, "at"))[0] == DATA
            assert web.asked[-1].startswith("GET /a%20b%01?x%20y HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.2", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *(
            "::1",
            "::",
            "fe80::1",
            "fe80::1%eth0",
            "fd00::1",
            "::ffff:10.0.0.1",
            "::ffff:0:127.0.0.1",
            "::10.0.0.1",
            "64:ff9b::a00:1",
        ),
        *("2002:a00:1::1", "2001:0:a00:1::1", "224.0.0.1", "ff02::1", "255.255.255.255", "198.18.0.1", "192.0.0.8"),
        *("192.88.99.1", "fec0::1", "64:ff9b:1::1", "no address"),
    ],
)
@in_loop
async def test_no_connection_goes_to_an_address_that_is_not_public(address: str) -> None:
    """Also where another address of the name is: nobody knows which of them would be taken."""
    async with site(a=ok()) as web:
        for addresses in ([address], ["8.8.8.8", address]):
            web.addresses["pics.example"] = addresses
            assert "not on the public internet" in await refusal(web.fetcher(), "http://pics.example/a")
        assert web.asked == []


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_public(address: str) -> None:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    assert is_public(mapped or found)


@in_loop
async def test_each_redirect_is_checked_as_a_url() -> None:
    async with site(
        a=redirect("/b"),
        b=redirect("http://also.example/c", 307),
        c=ok(),
        evil=redirect("http://evil.org/"),
        inside=redirect("http://inside.example/c"),
        file=redirect("file:///etc/passwd"),
        broken=redirect("http://[::1/"),
        loop=redirect("/loop"),
        bare=b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n",
    ) as web:
        web.addresses["inside.example"] = ["10.0.0.1"]
        fetcher = web.fetcher("pics.example", "*.example")
        assert (await fetcher.fetch("http://pics.example/a", "at"))[0] == DATA
        for path, words in {
            "evil": "not allowed",
            "inside": "not on the public internet",
            "file": "no http(s) URL",
            "broken": "redirects to something that is no URL",
            "loop": "redirects more than 3 times",
            "bare": "answered 302",
        }.items():
            assert words in await refusal(fetcher, f"http://pics.example/{path}")


@in_loop
async def test_a_name_that_changes_its_address_gains_nothing() -> None:
    """It is looked up once for a connection, and the connection goes to what was checked."""
    async with site(a=ok()) as web:
        answers = [["127.0.0.1"], ["10.0.0.1"]]

        async def changing(host: str, port: int) -> list[str]:
            return answers.pop(0)

        fetcher = web.fetcher()
        fetcher._lookup = changing
        assert (await fetcher.fetch("http://pics.example/a", "at"))[0] == DATA
        assert len(answers) == 1
        assert "not on the public internet" in await refusal(fetcher, "http://pics.example/a")


async def stalls(writer: asyncio.StreamWriter) -> None:
    writer.write(ok()[:-20])
    await writer.drain()
    await asyncio.sleep(20)


async def drips(writer: asyncio.StreamWriter) -> None:
    for byte in ok(DATA * 50):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.01)


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1000)


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n")
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


@in_loop
async def test_size_and_time_are_limited_while_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_IMAGE_BYTES", 1 << 20)
    said = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"
    async with site(stalls=stalls, drips=drips, endless=endless, said=said) as web:
        for path in ("stalls", "drips"):
            message = await refusal(web.fetcher(total_s=0.3), f"http://pics.example/{path}")
            assert "did not come within 0.3 s" in message
        for path in ("endless", "said"):
            assert "an image of over" in await refusal(web.fetcher(), f"http://pics.example/{path}")


@in_loop
async def test_failures_of_the_other_server_are_told() -> None:
    async with site(
        gone=b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", junk=b"SSH-2.0-OpenSSH\r\n", cut=ok()[:-5]
    ) as web:
        fetcher = web.fetcher("*")
        assert "answered 404" in await refusal(fetcher, "http://pics.example/gone")
        assert "the connection failed" in await refusal(fetcher, "http://pics.example/junk")
        assert "the connection failed" in await refusal(fetcher, "http://pics.example/cut")
        assert "no address" in await refusal(fetcher, "http://nowhere.example/")
        web.addresses["empty.example"] = []
        assert "no address" in await refusal(fetcher, "http://empty.example/")


@in_loop
async def test_another_address_of_a_name_is_tried() -> None:
    async with site(a=ok()) as web:
        web.addresses["pics.example"] = ["127.0.0.9", "127.0.0.1"]
        fetcher = web.fetcher(allows=lambda address: True)
        assert (await fetcher.fetch("http://pics.example/a", "at"))[0] == DATA
        web.addresses["pics.example"] = ["127.0.0.9"]
        assert "the connection failed" in await refusal(fetcher, "http://pics.example/a")


@in_loop
async def test_an_address_that_does_not_answer_leaves_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(a=ok()) as web:
        web.addresses["pics.example"] = ["192.0.2.1", "127.0.0.1"]
        fetcher = web.fetcher(allows=lambda address: True)
        connect, limits = httpcore.AnyIOBackend.connect_tcp, list[float | None]()

        async def connected(self: Any, host: str, port: int, timeout: float | None = None, *more: Any) -> Any:
            if host == "192.0.2.1":
                limits.append(timeout)
                raise httpcore.ConnectTimeout
            return await connect(self, host, port, timeout, *more)

        monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connected)
        assert (await fetcher.fetch("http://pics.example/a", "at"))[0] == DATA
        assert limits == [fetch.TOTAL_S / fetch.MAX_ADDRESSES]


@in_loop
async def test_certificates_are_read_once_and_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    context, threads = httpcore.default_ssl_context, list[str]()

    def read() -> ssl.SSLContext:
        threads.append(threading.current_thread().name)
        return context()

    monkeypatch.setattr(httpcore, "default_ssl_context", read)
    fetcher = ImageFetcher(("pics.example",), lookup=Site(0, {}).look_up, ports={"http": 80, "https": 1})
    for _ in range(2):
        assert "not on the public internet" in await refusal(fetcher, "https://pics.example/a")
    assert len(threads) == 1
    assert threads[0] != threading.current_thread().name


@in_loop
async def test_slow_hosts_of_one_tenant_hold_up_nobody_elses_images() -> None:
    goes = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        await goes.wait()
        writer.write(ok())

    async with site(slow=slow, a=ok()) as web:
        fetcher = web.fetcher()
        waiting = [asyncio.create_task(fetcher.fetch("http://pics.example/slow", "at", "one")) for _ in range(40)]
        await asyncio.sleep(0.05)
        assert (await fetcher.fetch("http://pics.example/a", "at", "other"))[0] == DATA
        assert len(web.asked) == fetch.AT_ONCE_EACH + 1
        goes.set()
        assert {data for data, _ in await asyncio.gather(*waiting)} == {DATA}


@in_loop
async def test_waiting_for_others_is_no_fault_of_the_image() -> None:
    async with site(slow=silent) as web:
        fetcher = web.fetcher(total_s=0.3)
        tasks = [asyncio.create_task(fetcher.fetch("http://pics.example/slow", "at", "one")) for _ in range(20)]
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(end, Busy) for end in ends) >= 20 - 2 * fetch.AT_ONCE_EACH
        assert all(isinstance(end, Busy | InvalidRequest) for end in ends)


@in_loop
async def test_without_a_list_nothing_is_fetched() -> None:
    assert "the server fetches none" in await refusal(ImageFetcher(()), "http://pics.example/a")


@in_loop
async def test_all_that_a_request_fetches_has_one_deadline() -> None:
    """Also what has waited for its turn until then, which is nobody's fault."""

    async with site(slow=silent) as web:
        fetcher = web.fetcher(total_s=30.0)
        until = asyncio.get_running_loop().time() + 0.2
        tasks = [fetcher.fetch("http://pics.example/slow", "at", "one", until) for _ in range(fetch.AT_ONCE_EACH + 2)]
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(end, InvalidRequest) for end in ends) == fetch.AT_ONCE_EACH
        assert sum(isinstance(end, Busy) for end in ends) == 2


@in_loop
async def test_names_that_nobody_answers_for_hold_up_their_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each goes on when its image is given up, and in no thread that the server's end waits for."""
    monkeypatch.setattr(name_lookups, "MOST_EACH", 3)
    goes, names = threading.Event(), list[str]()

    def resolve(host: str, port: int) -> list[str]:
        names.append(host)
        assert threading.current_thread().daemon
        if host == "slow.example":
            goes.wait()
        return ["10.0.0.1"]

    fetcher = ImageFetcher(("*",), total_s=0.1)
    fetcher._names = NameLookups(resolve)
    for _ in range(3):
        assert "did not come within" in await refusal(fetcher, "http://slow.example/a")
    with pytest.raises(Busy, match="too many names"):
        await fetcher.fetch("http://quick.example/a", "at", "")
    assert names == ["slow.example"] * 3
    with pytest.raises(InvalidRequest, match="not on the public internet"):
        await fetcher.fetch("http://quick.example/a", "at", "other")
    goes.set()
    while fetcher._names._held:
        await asyncio.sleep(0.01)
    assert "not on the public internet" in await refusal(fetcher, "http://slow.example/a")


def test_a_name_that_is_found_when_the_server_has_ended_disturbs_nobody() -> None:
    goes = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        goes.wait()
        return []

    async def leaves() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(NameLookups(resolve).look_up("slow.example", 80), 0.05)

    asyncio.run(leaves())
    (thread,) = (one for one in threading.enumerate() if one.name == "look-up of a host")
    goes.set()
    thread.join()


@in_loop
async def test_names_are_looked_up_by_the_machine() -> None:
    assert "127.0.0.1" in await NameLookups().look_up("localhost", 80)
    with pytest.raises(socket.gaierror):
        await NameLookups().look_up("nowhere.invalid", 80)

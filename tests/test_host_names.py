"""Names, addresses and origins as they come in headers and settings."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from treadle.errors import ConfigError
from treadle.host_names import (
    address_of,
    bindable,
    host_of,
    is_loopback,
    is_this_machine,
    matches,
    origin_of,
    resolved,
    server_of,
    url_of,
)

NO_SERVERS = (
    *("ftp://x", "http://", "", "http://h:port", "h:99999", "h:0", "h:-1", "::1", "http://[::1", "http://[zz]:80"),
    *("http://a b:80", "http://h:80 ", "h/a\nb", "user:word@h"),
)


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        (" mybox.local. ", "mybox.local"),
        ("mybox.local.:80", "mybox.local"),
        ("192.168.1.5:8000", "192.168.1.5"),
        ("[::1]:8000", "::1"),
        ("[FE80::1%eth0]", "fe80::1%eth0"),
        ("my_service", "my_service"),
        ("", None),
        (":80", None),
        ("a:b", None),
        ("a/?x=.b", None),
        ("a b", None),
        ("a,b", None),
        ("a@b", None),
        ("..", None),
        ("-a", None),
        ("[::1", None),
        ("::1", None),
        ("[nope]", None),
        ("b\u00fccher", None),
        ("a:123456", None),
    ],
)
def test_the_host_of_a_header(header: str, host: str | None) -> None:
    assert host_of(header) == host


@pytest.mark.parametrize(
    "host", ["localhost", "a.localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "::ffff:127.0.0.1"]
)
def test_names_of_this_machine(host: str) -> None:
    assert is_this_machine(host)
    if host != "a.localhost":  # a server can't rely on its resolver there
        assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "localhost.example", "xlocalhost", "8.8.8.8"])
def test_names_of_others(host: str) -> None:
    assert not is_this_machine(host)


def test_a_mapped_address_is_the_one_it_maps() -> None:
    assert address_of("::ffff:192.168.1.5") == address_of("192.168.1.5")
    assert address_of("mybox") is None


@pytest.mark.parametrize(
    ("host", "pattern", "does"),
    [
        ("mybox.local", "mybox.local", True),
        ("a.mybox.local", "mybox.local", False),
        ("a.mybox.local", "*.mybox.local", True),
        ("a.b.mybox.local", "*.mybox.local", True),
        ("mybox.local", "*.mybox.local", False),
        ("evilmybox.local", "*.mybox.local", False),
    ],
)
def test_patterns_match_whole_labels(host: str, pattern: str, does: bool) -> None:
    assert matches(host, pattern) is does


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("HTTPS://Chat.Example.org:443", "https://chat.example.org"),
        ("http://a:80", "http://a"),
        ("http://a:443", "http://a:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("vscode-webview://abc", "vscode-webview://abc"),
        ("http://a/", None),
        ("http://a:x", None),
        ("http://localhost#.evil.example", None),
        ("http://localhost@evil.example", None),
        ("http://localhost http://evil.example", None),
        ("null", None),
        ("*", None),
        ("", None),
    ],
)
def test_origins_are_written_as_browsers_write_them(text: str, origin: str | None) -> None:
    assert origin_of(text) == origin


def answers(*addresses: str) -> Any:
    return lambda host, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, 0)) for text in addresses]


@pytest.mark.parametrize(
    ("addresses", "local"),
    [(("127.0.0.1", "::1"), True), (("127.0.1.1",), True), (("127.0.0.1", "192.168.1.5"), False)],
)
def test_a_name_is_loopback_where_all_its_addresses_are(
    addresses: tuple[str, ...], local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answers(*addresses))
    assert is_loopback("mybox") is local


@pytest.mark.parametrize("host", ["", "a..b", "nowhere.invalid"])
def test_a_name_without_an_address_is_told(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, *_: Any, **__: Any) -> Any:
        name.encode("idna")
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(ConfigError, match=rf"can't listen on '{host}': .*; give --host an address"):
        resolved(host)


def test_urls() -> None:
    assert url_of("http", "::1", 80) == "http://[::1]:80"
    assert url_of("grpc", "mybox", 80) == "grpc://mybox:80"


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000),
        ("mybox:80/v1/", "mybox", 80),
        ("https://h", "h", None),
        ("HTTP://[::1]:1", "::1", 1),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_a_url_of_a_server_has_a_host_and_a_port(url: str, host: str, port: int | None) -> None:
    parts = server_of(url, ("http", "https"))
    assert parts is not None
    assert (parts.hostname, parts.port) == (host, port)


@pytest.mark.parametrize("url", NO_SERVERS)
def test_other_texts_are_no_url_of_a_server(url: str) -> None:
    assert server_of(url, ("http", "https")) is None


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ("[::1]", "::1"),
        ("[::]", "::"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("127.1", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("0x7f.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("localhost", "localhost"),
        ("[localhost]", "[localhost]"),
        ("[::1", "[::1"),
        ("1.2.3.4.5", "1.2.3.4.5"),
        ("300.1.1.1", "300.1.1.1"),
    ],
)
def test_an_address_to_bind_is_written_as_every_library_reads_it(given: str, bound: str) -> None:
    assert bindable(given) == bound

"""Which servers may open to the network, and what the person who starts one is told."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.aio import in_loop
from treadle import network_exposure
from treadle.config import Settings
from treadle.errors import ConfigError
from treadle.host_names import address_of
from treadle.network_exposure import access_of, check, check_open, reach_of

LAN = "192.168.1.5"
CA: dict[str, Any] = {name: Path("x.pem") for name in ("grpc_cert", "grpc_key", "grpc_client_ca")}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"host": "localhost"},
        {"host": "::1", "grpc_port": 1},
        {"api_key": "k"},
        {"host": "0.0.0.0", "api_key": "k"},
        {"host": LAN, "no_auth": True},
        {"host": LAN, "api_key": "k", "grpc_port": 1},
        {"host": LAN, "api_keys": Path("keys.toml"), "grpc_port": 1, "grpc_auth": True},
        {"host": "0.0.0.0", "api_key": "k", "grpc_port": 1, "grpc_host": "127.0.0.1"},
        {"host": "0.0.0.0", "api_key": "k", "grpc_port": 1, "grpc_no_auth": True},
        {"host": "0.0.0.0", "no_auth": True, "grpc_port": 1, "grpc_no_auth": True},
        {"host": "0.0.0.0", "api_key": "k", "grpc_port": 1, **CA},
        {"grpc_port": 1, "grpc_host": LAN, "grpc_no_auth": True},
    ],
)
def test_servers_that_start(given: dict[str, Any]) -> None:
    check(Settings(**given))


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"host": "0.0.0.0"}, "host", "--host 0.0.0.0 opens the server .* set TREADLE_API_KEY .* give --no-auth"),
        ({"host": "::"}, "host", "TREADLE_API_KEY"),
        ({"host": LAN}, "host", "TREADLE_API_KEY"),
        ({"host": LAN, "grpc_port": 1, "grpc_no_auth": True}, "host", "TREADLE_API_KEY"),
        ({"no_auth": True}, "no_auth", "--no-auth does nothing on 127.0.0.1"),
        ({"no_auth": True, "api_key": "k"}, "no_auth", "contradict each other"),
        ({"no_auth": True, "api_key": "k", "host": LAN}, "no_auth", "contradict each other"),
        (
            {"host": LAN, "no_auth": True, "grpc_port": 1},
            "grpc_host",
            "gRPC on 192.168.1.5 .* --grpc-host 127.0.0.1, set TREADLE_API_KEY",
        ),
        ({"grpc_port": 1, "grpc_auth": True}, "grpc_auth", "there is none: set TREADLE_API_KEY"),
        (
            {"api_key": "k", "grpc_port": 1, "grpc_host": LAN, "grpc_auth": True, "grpc_no_auth": True},
            "grpc_auth",
            "contradict each other",
        ),
        ({"grpc_port": 1, "grpc_host": "0.0.0.0"}, "grpc_host", "--grpc-client-ca.* --grpc-no-auth"),
        ({"grpc_port": 1, "grpc_no_auth": True}, "grpc_no_auth", "--grpc-no-auth does nothing on 127.0.0.1"),
        ({"grpc_port": 1, "grpc_host": LAN, "grpc_no_auth": True, **CA}, "grpc_no_auth", "contradict each other"),
    ],
)
def test_servers_that_would_be_open_unasked_and_flags_that_would_do_nothing(
    given: dict[str, Any], param: str, says: str
) -> None:
    """S1: D23"""
    with pytest.raises(ConfigError, match=says) as raised:
        check(Settings(**given))
    assert raised.value.param == param
    assert "\n" not in raised.value.message


def test_grpc_tls_alone_asks_for_nothing() -> None:
    pair = {name: CA[name] for name in ("grpc_cert", "grpc_key")}
    with pytest.raises(ConfigError, match="--grpc-no-auth"):
        check(Settings(grpc_port=1, grpc_host=LAN, **pair))


@pytest.mark.parametrize(("addresses", "local"), [(["127.0.1.1"], True), (["127.0.0.1", LAN], False)])
def test_a_name_is_what_it_resolves_to(addresses: list[str], local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.host_names.resolved", lambda host: addresses)
    if local:
        check_open("mybox", has_key=False, no_auth=False)
    else:
        with pytest.raises(ConfigError, match="--host mybox opens the server"):
            check_open("mybox", has_key=False, no_auth=False)


# What is told


def told(**given: Any) -> list[tuple[str, str, bool]]:
    return [(access.subject, access.text, access.open) for access in access_of(Settings(**given))]


def test_who_may_come_in() -> None:
    assert told() == [("HTTP", "anyone on this machine", False)]
    assert told(api_key="k") == [("HTTP", "anyone on this machine, with an API key", False)]
    assert told(api_key="k", host=LAN) == [("HTTP", "anyone who reaches these addresses, with an API key", False)]
    assert told(no_auth=True, host=LAN)[0] == (
        *("HTTP", "anyone who reaches these addresses: no key is asked for (--no-auth)"),
        True,
    )


def test_who_may_come_in_over_grpc() -> None:
    assert told(grpc_port=1)[1] == ("gRPC", "anyone on this machine", False)
    assert told(grpc_port=1, api_key="k")[1] == ("gRPC", "anyone on this machine, without a key", False)
    strict = {"grpc_port": 1, "api_key": "k", "grpc_auth": True}
    assert told(**strict)[1] == ("gRPC", "anyone on this machine, with an API key (--grpc-auth)", False)
    assert told(**strict, grpc_host=LAN)[1][1] == "anyone who reaches these addresses, with an API key (--grpc-auth)"
    assert told(**strict, **CA)[1][1] == "clients with a certificate of x.pem and an API key (--grpc-auth)"
    assert told(grpc_port=1, grpc_host=LAN, api_key="k")[1] == (
        *("gRPC", "anyone who reaches these addresses, with an API key; this machine without one"),
        False,
    )
    assert told(grpc_port=1, **CA)[1] == ("gRPC", "clients with a certificate of x.pem", False)
    assert told(grpc_port=1, grpc_host=LAN, grpc_no_auth=True)[1] == (
        *("gRPC", "anyone who reaches these addresses: no key is asked for (--grpc-no-auth)"),
        True,
    )


def test_which_names_and_pages() -> None:
    own = "addresses, localhost, host.containers.internal, host.docker.internal"
    assert told(host=LAN, no_auth=True)[1] == ("names", own, False)
    assert told(allowed_host=("a.lan", "*.b.lan"))[1] == ("names", f"{own}, a.lan, *.b.lan", False)
    assert told(allowed_host=("*",))[1] == ("names", "every host name (--allowed-host '*')", True)
    assert told(allowed_host=("*",), api_key="k")[1][2] is False
    assert told(cors_origin=("http://a", "app://b"))[1] == ("pages", "of http://a, app://b", False)
    assert told(cors_origin=("*",))[1] == ("pages", "of every web site (--cors-origin '*')", True)


async def aside(work: Callable[[], list[str]]) -> list[str]:
    return work()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two networks, with addresses that are of no use to clients among its own."""
    monkeypatch.setattr(network_exposure, "_routed_addresses", lambda: [LAN, "fd00::5"])
    named = ["127.0.1.1", LAN, "10.0.0.5", "::1", "fe80::1%eth0", "0.0.0.0", "nonsense"]
    monkeypatch.setattr(network_exposure, "_hostname_addresses", lambda: named)


@pytest.mark.usefixtures("machine")
@in_loop
async def test_a_wildcard_is_told_as_the_addresses_that_clients_use() -> None:
    reach = await reach_of(Settings(host="0.0.0.0", grpc_port=0), 80, 90, aside)
    assert reach.http == ("http://127.0.0.1:80", f"http://{LAN}:80", "http://10.0.0.5:80")
    assert reach.url == "http://127.0.0.1:80"
    both = ("127.0.0.1", LAN, "[fd00::5]", "10.0.0.5")
    assert reach.grpc == tuple(f"grpc://{host}:90" for host in both), "gRPC takes both families"
    reach = await reach_of(Settings(host="::", grpc_port=0, grpc_host=LAN, **CA), 80, 90, aside)
    assert reach.http == tuple(f"http://{host}:80" for host in both)
    assert reach.grpc == (f"grpcs://{LAN}:90",)


@in_loop
async def test_one_address_is_told_as_it_is() -> None:
    reach = await reach_of(Settings(host="::1"), 80, None, aside)
    assert (reach.http, reach.grpc) == (("http://[::1]:80",), ())


@pytest.mark.parametrize("failure", [socket.gaierror(-2, "unknown"), TimeoutError()])
@in_loop
async def test_a_machine_whose_name_is_unknown_or_slow_starts_all_the_same(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(work: Callable[[], list[str]]) -> list[str]:
        raise failure

    monkeypatch.setattr(network_exposure, "_routed_addresses", list)
    assert (await reach_of(Settings(host="::"), 80, None, fails)).http == ("http://127.0.0.1:80",)


def test_this_machines_own_addresses_are_addresses() -> None:
    """Whatever they are here: nothing is sent to find them."""
    for text in network_exposure._routed_addresses():
        assert address_of(text) is not None

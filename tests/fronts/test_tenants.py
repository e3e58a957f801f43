"""Whose share a request counts against, and what it is recognised by."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from treadle.fronts.authentication import Authenticator
from treadle.fronts.tenants import MAX_TICKET_CHARS, call_arrival, peer_tenant, web_arrival


def scope(client: tuple[str, int] | None = ("192.0.2.1", 5000), path: str = "/v1/completions", **headers: str) -> Any:
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "client": client, "headers": lines}


@pytest.mark.parametrize(
    ("host", "tenant"),
    [
        ("127.0.0.1", "local"),
        ("127.3.2.1", "local"),
        ("::1", "local"),
        ("::ffff:127.0.0.1", "local"),
        ("", "local"),
        ("/run/socket", "local"),
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("[2001:db8::1]", "20010db8000000000000000000000000/64"),
        ("2001:db8::ffff:1", "20010db8000000000000000000000000/64"),
    ],
)
def test_peers_are_told_apart_by_address(host: str, tenant: str) -> None:
    """D16: a network of IPv6 is one, as any client may have as many addresses of it as it likes."""
    assert peer_tenant(host) == tenant


def test_with_a_key_the_key_is_the_tenant() -> None:
    door = Authenticator()
    caller = door.caller((), "192.0.2.1")
    assert caller.tenant == "192.0.2.1"
    assert dataclasses.replace(caller, name="k").tenant == "key k"
    assert web_arrival(scope(), caller.tenant).tenant == "192.0.2.1"
    assert not web_arrival(scope(None), "local").via


def test_a_request_has_one_arrival_however_often_it_is_asked_for() -> None:
    it = scope()
    assert web_arrival(it, "s") is web_arrival(it, "s")


def test_the_same_request_has_the_same_fingerprint_on_any_connection() -> None:
    def printed(**more: Any) -> int:
        tenant = more.pop("tenant", "s")
        return web_arrival(scope(**{"content_length": "100", "user_agent": "SDK/1", **more}), tenant).fingerprint

    assert printed() == printed(client=("192.0.2.1", 6000))
    others = [
        printed(tenant="t"),
        printed(path="/v1/chat/completions"),
        printed(content_length="101"),
        printed(user_agent="SDK/2"),
        printed(idempotency_key="1"),
    ]
    assert len({printed(), *others}) == 6
    assert web_arrival(scope(), "s").via != web_arrival(scope(("192.0.2.1", 1)), "s").via


@pytest.mark.parametrize(
    ("count", "repeat"), [("0", False), ("1", True), ("2", True), ("x", None), ("", None), ("1" * 10, None)]
)
def test_official_sdks_say_which_requests_are_repeats(count: str, repeat: bool | None) -> None:
    assert web_arrival(scope(x_stainless_retry_count=count), "s").repeat is repeat
    assert web_arrival(scope(), "s").repeat is None


def test_a_ticket_that_a_client_names_is_bounded() -> None:
    assert web_arrival(scope(x_treadle_ticket="abc"), "s").ticket_id == "abc"
    assert len(web_arrival(scope(x_treadle_ticket="a" * 5000), "s").ticket_id) == MAX_TICKET_CHARS
    assert web_arrival(scope(x_treadle_ticket="\xff"), "s").ticket_id


def test_a_call_is_known_by_its_prompt_its_ticket_and_its_id() -> None:
    first = call_arrival("192.0.2.1", (("x-treadle-ticket", "abc"),), "r1", b"\x01\x02")
    again = call_arrival("192.0.2.1", (("x-treadle-ticket", b"abc"),), "r1", b"\x01\x02")
    other = call_arrival("local", None, "r2", b"text")
    assert (first.tenant, first.ticket_id, again.ticket_id) == ("192.0.2.1", "abc", "")
    assert (first.fingerprint, first.via) == (again.fingerprint, again.via)
    assert other.tenant == "local"
    assert other.fingerprint != first.fingerprint

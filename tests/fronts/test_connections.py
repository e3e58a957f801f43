"""The books of connections: limits, shares of peers, and what is said of refusals."""

from __future__ import annotations

import logging

import pytest

from treadle.core.refusals import Refusal
from treadle.fronts.connections import LOG_EVERY_S, Connections, peer_of


def test_a_place_is_had_until_the_limit_and_again_when_one_leaves() -> None:
    books = Connections(2)
    assert [books.enter("10.0.0.1"), books.enter("10.0.0.2")] == [None, None]
    assert books.enter("10.0.0.3") is Refusal.CONNECTIONS
    books.leave("10.0.0.1")
    assert books.enter("10.0.0.3") is None
    assert books.open == 2


def test_one_peer_has_its_share_and_this_machine_has_no_share_of_its_own() -> None:
    books = Connections(5, 2)
    assert [books.enter("10.0.0.1") for _ in range(3)] == [None, None, Refusal.PEER_CONNECTIONS]
    assert [books.enter("") for _ in range(4)] == [None, None, None, Refusal.CONNECTIONS]
    books.leave("10.0.0.1")
    assert books.enter("10.0.0.1") is None


def test_nothing_is_kept_of_peers_that_have_left() -> None:
    books = Connections(10, 2)
    for peer in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        books.enter(peer)
    assert books.statistics()["most_of_a_peer"] == 2
    for peer in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        books.leave(peer)
    assert (books.statistics()["peers"], books.open) == (0, 0)


def test_without_limits_everyone_comes_in() -> None:
    books = Connections()
    assert {books.enter("10.0.0.1") for _ in range(1000)} == {None}
    assert (books.statistics()["limit"], books.statistics()["per_peer"]) == (None, None)


def test_refusals_are_counted_and_told_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now, told = 100.0, []
    books = Connections(7, 3, on_refused=told.append, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            books.refused(Refusal.CONNECTIONS)
        books.refused(Refusal.PEER_CONNECTIONS)
        assert len(caplog.messages) == 2
        now += LOG_EVERY_S
        books.refused(Refusal.CONNECTIONS)
    assert len(told) == 52
    assert books.statistics()["refused"] == {"connections": 51, "peer_connections": 1}
    assert caplog.messages[2].startswith("HTTP connections are refused (51 so far): all 7 are open: raise the limit")
    assert "one address already has 3" in caplog.messages[1]


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("127.0.0.1", ""),
        ("127.9.9.9", ""),
        ("::1", ""),
        ("::ffff:127.0.0.1", ""),
        ("", ""),
    ],
)
def test_a_peer_is_an_address_or_the_network_of_an_ipv6_host(host: str, peer: str) -> None:
    assert peer_of(host) == peer

"""Who a request comes from, what they may do, and how guessing is slowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fronts.test_accounts import Clock
from treadle.core.refusals import Refusal
from treadle.errors import InsufficientScope, NotAuthenticated, TooManyWrongKeys
from treadle.fronts import auth_throttle
from treadle.fronts.auth_throttle import MOST_WRONG, AuthThrottle
from treadle.fronts.authentication import USE, Authenticator
from treadle.fronts.tenants import peer_tenant
from treadle.keys import ALL, Key, KeyLimits, KeySource, digest
from treadle.keys.file import add, remove

HERE, THERE = "127.0.0.1", "10.0.0.7"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "keys.toml"
    add(made, Key("alice", digest(b"a")))
    add(made, Key("boss", digest(b"b"), ALL))
    return made


class Door:
    def __init__(self, source: KeySource) -> None:
        self.clock = Clock()
        self.refused: list[Refusal] = []
        self.it = Authenticator(source, on_refused=self.refused.append, clock=self.clock)

    def guess(self, times: int, peer: str = THERE) -> None:
        for i in range(times):
            with pytest.raises(NotAuthenticated):
                self.it.caller([b"wrong%d" % i], peer)


@pytest.fixture
def door(path: Path) -> Door:
    return Door(KeySource(None, path))


def test_without_keys_everyone_may_do_everything_but_go_before_others() -> None:
    it = Authenticator()
    for peer in (HERE, THERE):
        caller = it.caller([b"", b"any"], peer)
        assert (caller.scopes, caller.name, caller.tenant) == (ALL, "", peer_tenant(peer))
        assert caller.tenant_digest == it.caller([b"any"], peer).tenant_digest != it.caller([], peer).tenant_digest
        caller.check_admin("this")
        caller.check_priority(0)
        caller.check_priority(5)
    it.caller([], HERE).check_priority(-1)
    it.caller([], "::1").check_priority(-1)
    with pytest.raises(InsufficientScope, match="priority is -1, and below 0") as raised:
        it.caller([], THERE).check_priority(-1)
    assert raised.value.param == "priority"


def test_a_key_gives_its_scopes(door: Door) -> None:
    alice, boss = door.it.caller([b"a"], THERE), door.it.caller([b"", b"b"], THERE)
    assert (alice.name, alice.scopes, alice.tenant, alice.admin) == ("alice", USE, "key alice", False)
    assert (boss.name, boss.scopes, boss.admin) == ("boss", ALL, True)
    assert alice.tenant_digest != boss.tenant_digest
    alice.check_priority(0)
    boss.check_priority(-5)
    boss.check_admin("this")
    with pytest.raises(InsufficientScope, match="emptying needs the scope 'admin': use an API key"):
        alice.check_admin("emptying")
    for peer in (HERE, THERE):
        with pytest.raises(InsufficientScope):
            door.it.caller([b"a"], peer).check_priority(-1)


@pytest.mark.parametrize("given", [[], [b""], [b"wrong"], [b"alice"], [digest(b"a")], [b"a "]])
def test_nothing_else_comes_in(door: Door, given: list[bytes]) -> None:
    with pytest.raises(NotAuthenticated):
        door.it.caller(given, HERE)
    assert door.refused == [Refusal.NOT_AUTHENTICATED]


def test_those_without_a_key_have_the_scopes_that_are_given_to_them_and_a_wrong_key_has_none(door: Door) -> None:
    caller = door.it.caller([], HERE, keyless=USE)
    assert (caller.scopes, caller.name) == (USE, "")
    with pytest.raises(NotAuthenticated):
        door.it.caller([b"wrong"], HERE, keyless=USE)


def test_one_right_key_of_two_opens(door: Door) -> None:
    assert door.it.caller([b"wrong", b"a"], THERE).name == "alice"
    assert door.it.caller([b"a", b"wrong"], THERE).name == "alice"


def test_guessing_is_slowed(door: Door) -> None:
    door.guess(MOST_WRONG)
    for key in (b"wrong", b"a"):
        with pytest.raises(TooManyWrongKeys, match="30 wrong API keys a minute") as raised:
            door.it.caller([key], THERE)
        assert raised.value.retry_after_s == pytest.approx(60 / MOST_WRONG)
    assert door.refused[-1] is Refusal.TOO_MANY_WRONG_KEYS
    assert door.it.caller([b"a"], "10.0.0.8").name == "alice", "others are not held up"
    with pytest.raises(NotAuthenticated):
        door.it.caller([], THERE)
    door.clock.now += 2.5
    assert door.it.caller([b"a"], THERE).name == "alice"


def test_each_key_of_a_request_is_a_guess(door: Door) -> None:
    for _ in range(MOST_WRONG // 2):
        with pytest.raises(NotAuthenticated):
            door.it.caller([b"one", b"two"], THERE)
    with pytest.raises(TooManyWrongKeys):
        door.it.caller([b"a"], THERE)


def test_those_who_came_before_are_not_locked_out_by_a_neighbour(door: Door) -> None:
    door.it.caller([b"a"], THERE)
    door.guess(MOST_WRONG)
    assert door.it.caller([b"a"], THERE).name == "alice"
    with pytest.raises(TooManyWrongKeys):
        door.it.caller([b"b"], THERE)


def test_this_machine_is_never_locked_out(door: Door) -> None:
    """Everybody behind a reverse proxy here comes from it."""
    door.guess(3 * MOST_WRONG, HERE)
    assert door.it.caller([b"a"], HERE).name == "alice"


def test_an_ipv6_site_counts_as_one(door: Door) -> None:
    for i in range(MOST_WRONG):
        door.guess(1, f"2001:db8::{i:x}")
    with pytest.raises(TooManyWrongKeys):
        door.it.caller([b"a"], "2001:db8::ffff")
    assert door.it.caller([b"a"], "2001:db8:0:1::1").name == "alice"


def test_the_table_of_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_throttle, "MOST_PEERS", 10)
    monkeypatch.setattr(auth_throttle, "MOST_NAMES", 2)
    table = AuthThrottle()
    for i in range(100):
        table.wrong(f"10.0.0.{i}", 1, 0.0)
        table.right("10.1.0.1", f"k{i}", 0.0)
    assert len(table) == 10
    assert len(table._peers["10.1.0.1"].names) == 2
    table.check("not-an-address", None, 0.0)
    table.wrong("not-an-address", 1, 0.0)


def test_an_account_lives_as_long_as_its_key(path: Path) -> None:
    source = KeySource(None, path)
    door = Door(source)
    alice = door.it.caller([b"a"], HERE).account
    assert door.it.caller([b"a"], THERE).account is alice
    assert [usage.key for usage in door.it.usage()] == ["alice", "boss"]
    remove(path, "alice")
    add(path, Key("carol", digest(b"c"), limits=KeyLimits(max_running=1)))
    source.ring = KeySource(None, path).ring
    door.it.caller([b"c"], HERE)
    assert [usage.key for usage in door.it.usage()] == ["boss", "carol"]
    assert "alice" not in door.it._accounts
    with pytest.raises(NotAuthenticated):
        door.it.caller([b"a"], HERE)

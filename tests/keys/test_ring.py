"""API keys in memory."""

from __future__ import annotations

from treadle.keys import ALL, SINGLE, Key, Keyring, Scope, digest, new_key, single_key


def test_a_key_is_found_by_its_bytes_alone() -> None:
    ring = Keyring([Key("a", digest(b"one")), single_key("two")])
    found = ring.find(b"one")
    assert found is not None
    assert (found.name, found.scopes) == ("a", {Scope.USE})
    single = ring.find(b"two")
    assert single is not None
    assert (single.name, single.scopes) == (SINGLE, ALL)
    for wrong in (b"", b"on", b"one ", b"three", digest(b"one"), digest(b"one").hex().encode(), b"\xff\x00"):
        assert ring.find(wrong) is None
    assert [key.name for key in ring] == ["a", SINGLE]
    assert len(ring) == 2
    assert Keyring().find(b"") is None


def test_a_hash_is_in_no_text_of_a_key() -> None:
    assert digest(b"one").hex() not in repr(Key("a", digest(b"one")))
    assert repr(digest(b"one")) not in repr(Key("a", digest(b"one")))


def test_new_keys_are_random_and_fit_a_header() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.isascii() and " " not in key and len(key) >= 43 + len("sk-treadle-") for key in made)

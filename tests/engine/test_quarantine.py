"""Quarantine: fingerprints, expiry and size."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.owners import Clock
from treadle.core.messages import Image, Sampling, Submit
from treadle.engine.quarantine import EXPIRY_S, MAX_ENTRIES, Quarantine
from treadle.errors import Quarantined

REQUEST = Submit(id="1.0", prompt=(1, 2, 3), max_tokens=5, sampling=Sampling(temperature=0.7, seed=1))


def with_(**fields: object) -> Submit:
    return msgspec.structs.replace(REQUEST, **fields)


def test_only_what_was_added_is_refused_and_not_for_ever():
    clock = Clock()
    table = Quarantine(clock)
    table.check(REQUEST)
    table.add(REQUEST)
    with pytest.raises(Quarantined):
        table.check(REQUEST)
    table.check(with_(prompt=(1, 2, 4)))
    clock.now += EXPIRY_S
    table.check(REQUEST)
    assert (len(table), table.condemned) == (0, 1)


@pytest.mark.parametrize(
    "again",
    [
        with_(id="2.0", group="2", max_tokens=7, max_wait_s=3.0, priority=4, salt="x", stop_token_ids=(9,)),
        with_(sampling=Sampling(temperature=0.7, seed=2)),
        with_(generated=(4, 5), resumed=True, scored=2),
    ],
)
def test_a_retry_is_the_same_request(again):
    """Its id is new, and so is the seed that the server draws where the client gave none."""
    table = Quarantine(Clock())
    table.add(REQUEST)
    with pytest.raises(Quarantined):
        table.check(again)


@pytest.mark.parametrize(
    "other",
    [
        with_(sampling=Sampling(temperature=0.8, seed=1)),
        with_(logprobs=2),
        with_(prompt_logprobs=0),
        with_(prompt=(1,)),
        with_(images=(Image(start=1, count=1, hash=b"other", shm="pixels", shape=(4,)),)),
    ],
)
def test_what_is_computed_differently_is_another_request(other):
    table = Quarantine(Clock())
    table.add(REQUEST)
    table.check(other)


def test_the_table_is_bounded_and_the_oldest_gives_way():
    table = Quarantine(Clock())
    for i in range(MAX_ENTRIES + 1):
        table.add(with_(prompt=(i,)))
    assert len(table) == MAX_ENTRIES
    table.check(with_(prompt=(0,)))
    with pytest.raises(Quarantined):
        table.check(with_(prompt=(1,)))


def test_fingerprints_are_the_process_s_own():
    assert Quarantine(Clock()).fingerprint(REQUEST) != Quarantine(Clock()).fingerprint(REQUEST)

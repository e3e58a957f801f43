"""Workloads are functions of a seed: the same everywhere, and what their names promise."""

from __future__ import annotations

import msgspec
import pytest

from treadle.bench import lorem
from treadle.bench.errors import BenchError
from treadle.bench.plan import Request, Workload
from treadle.bench.workloads import KINDS, SWEEP, build, digest

NAMES = [*KINDS, "sweep"]


def one(name: str, seed: int = 0, **options: float) -> Workload:
    (workload,) = build(name, seed, options)
    return workload


def words(request: Request) -> int:
    return sum(len(message.content.split()) for message in request.messages)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_requests_to_the_letter(name: str) -> None:
    first, again, other = build(name, 7), build(name, 7), build(name, 8)
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert [digest(w) for w in first] != [digest(w) for w in other]


@pytest.mark.parametrize("name", NAMES)
def test_rounds_differ_in_their_words_alone(name: str) -> None:
    """A server that remembers prompts must not be faster in the second round."""
    for first, second in zip(build(name, 7), build(name, 7, round_=2), strict=True):
        assert [(r.id, r.max_tokens, words(r)) for r in first.requests] == [
            (r.id, r.max_tokens, words(r)) for r in second.requests
        ]
        assert not {r.messages for r in first.requests} & {r.messages for r in second.requests}


def test_a_seed_means_the_same_on_every_machine() -> None:
    """F11: a figure can be looked at again later."""
    assert digest(one("burst")) == "4b5bfedb2edb650d"
    assert digest(one("agents", 3)) == "8d7dffb899f491a2"


@pytest.mark.parametrize("name", NAMES)
def test_every_request_has_an_id_and_waits_only_for_those_that_come(name: str) -> None:
    for workload in build(name, 1):
        ids = [request.id for request in workload.requests]
        assert len(set(ids)) == len(ids)
        known = set(ids)
        for request in workload.requests:
            for moment in (request.after, request.leave):
                assert moment is None or moment.of in known


@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits_in_a_circle(name: str) -> None:
    for workload in build(name, 1):
        before = {r.id: r.after.of for r in workload.requests if r.after is not None}
        for id_ in before:
            seen, at = {id_}, id_
            while at in before:
                at = before[at]
                assert at not in seen
                seen.add(at)


def test_a_burst_is_staggered_and_four_times_its_concurrency() -> None:
    """B2, P1"""
    workload = one("burst", c=16, tokens=8)
    assert (len(workload.requests), workload.concurrency) == (64, 16)
    assert [r.at_s for r in workload.requests[:3]] == pytest.approx([0.0, 0.1, 0.2])
    assert all(r.max_tokens == 8 for r in workload.requests)


@pytest.mark.parametrize(("name", "prompt", "tokens"), [("chat", 100, 256), ("agent", 2500, 256)])
def test_sizes_are_what_they_are_called_by(name: str, prompt: int, tokens: int) -> None:
    """F11: D(100,256) and D(2500,256)"""
    assert {(words(r), r.max_tokens) for r in one(name).requests} == {(prompt, tokens)}


def test_a_workload_is_called_by_what_was_chosen() -> None:
    """So that one run may have it in several sizes."""
    assert [one("burst").name, one("burst", c=16, every_s=0.05).name] == ["burst", "burst c=16 every_s=0.05"]


def test_agents_share_their_beginning_and_grow_turn_by_turn() -> None:
    requests = {r.id: r for r in one("agents", agents=2, turns=3).requests}
    assert requests["0.0"].messages[0] == requests["1.0"].messages[0]
    assert requests["0.0"].messages[1] != requests["1.0"].messages[1]
    for turn in (1, 2):
        before = requests[f"0.{turn - 1}"].messages
        assert requests[f"0.{turn}"].messages[: len(before)] == before
        assert len(requests[f"0.{turn}"].messages) == len(before) + 2


def test_a_sweep_is_one_workload_a_concurrency() -> None:
    levels = build("sweep", 0, {"most": 20})
    assert [w.name for w in levels] == [f"sweep c={c}" for c in SWEEP if c <= 20]
    assert [len({r.id.split(".")[0] for r in w.requests}) for w in levels] == [c for c in SWEEP if c <= 20]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("brust", {}, "no workload 'brust'"),
        ("burst", {"cc": 3}, "no option 'cc'"),
        ("burst", {"c": 0}, "must be above 0"),
        ("burst", {"tokens": -1}, "must be above 0"),
        ("burst", {"c": float("nan")}, "must be above 0"),
        ("sweep", {"most": 0.5}, "at least 1"),
        ("burst", {"c": 1e9}, r"option c=1e\+09 of workload 'burst' must be 1,000,000 or less"),
    ],
)
def test_what_is_wrong_is_named(name: str, options: dict[str, float], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        build(name, 0, options)


@pytest.mark.parametrize(("name", "options"), [("burst", {"c": 1e4}), ("chat", {"c": 5, "prompt": 5e4})])
def test_more_than_the_client_holds_is_refused(
    name: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lorem, "MOST_WORDS", 100_000)
    with pytest.raises(BenchError, match=r"more requests and words than this client holds .* give smaller options"):
        build(name, 0, options)

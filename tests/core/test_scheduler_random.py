"""Seeded random lives: every request ends once, whoever was not disturbed gets what it would have got alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.core.drive import NO_VISION, Bench, expected
from treadle.core import block_budget
from treadle.core.grammar_state import PENDING
from treadle.core.image import Image, VisionCapabilities
from treadle.core.messages import CancelReason, Constraint, Finish, FinishReason, Pooling, Submit
from treadle.core.plan import StepPlan


def _trunk(number: int, length: int) -> tuple[int, ...]:
    """What prompts begin with that come at about the same time; later ones find nothing of it in the cache."""
    first = 7 * (number // 10)
    return tuple(range(first, first + length))


class Life:
    """One seed's random operations."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        memory: dict[str, Any] = {"kv_tokens": chance.choice((0, 0, 150)), "drafts": chance.choice((0, 0, 2))}
        if chance.random() < 0.7:
            block = chance.choice((1, 4, 16))
            memory = {
                "block": block,
                "blocks": chance.choice((0, 220, 500)) // block,
                "lookahead": chance.choice((0, 1, 1, 2)),
                "drafts": chance.choice((0, 0, 1, 4)),
            }
        memory["guarded"] = memory["drafts"] > 0 and chance.random() < 0.5
        self.bench = Bench(
            max_running=chance.choice((1, 2, 4, 7)),
            prefill_tokens=chance.choice((8, 16, 40, 512)),
            cache=chance.random() < 0.7,
            share=chance.random() < 0.5,
            vision=chance.choice((NO_VISION, VisionCapabilities(3), VisionCapabilities(5, quadratic=8, whole=True))),
            **memory,
        )
        self.bench.runner.tower.most = chance.choice((0, 2))
        self.bench.runner.raises_late = self.raises_late
        self.requests: dict[str, Submit] = {}
        self.cancelled: set[str] = set()
        self.poison = {f"{i}" for i in range(120) if chance.random() < 0.02}
        self.troubled = chance.random() < 0.5
        self.mix = chance.choice(("sscttttf", "sssgctttttttt", "sgctttttttf", "ssssggcttttttttttf"))
        self.constrained = chance.choice((0.0, 0.0, 0.5))
        self.bench.runner.raises = self.raises
        if chance.random() < 0.5:
            self.bench.runner.cost = self.cost

    def raises(self, plan: StepPlan) -> bool:
        return self.troubled and bool(set(plan.sequence_ids) & self.poison)

    def raises_late(self, plan: StepPlan) -> bool:
        return self.troubled and self.chance.random() < 0.02

    def cost(self, prefill: int, decode: int) -> tuple[float, float]:
        noise = self.chance.uniform(0.5, 2.0)
        return (0.01 + 0.002 * prefill) * noise if prefill else 0.0, 0.03 * noise if decode else 0.0

    def submit(self, number: int) -> None:
        chance = self.chance
        id_ = f"{number}"
        stops = tuple(chance.sample(range(1000), chance.choice((0, 0, 60))))
        length = chance.choice((1, 2, 15, 16, 17, 60, 90, 200))
        trunk, own = _trunk(number, chance.choice((2, 16, 90, 120, 200))), chance.choice((0, 0, 1, 9, 30))
        prompt = chance.choice((length, (*trunk, *chance.sample(range(900), own))))
        pooling = chance.choice((None, None, None, *Pooling))
        scored = None if pooling else chance.choice((None, None, None, 0))
        self.requests[id_] = self.bench.submit(
            id_,
            prompt=prompt,
            images=self.images(prompt if isinstance(prompt, int) else len(prompt)),
            max_tokens=0 if pooling else chance.choice((0, 1, 2, 5, 12, 30)),
            prompt_logprobs=scored,
            pooling=pooling,
            salt=chance.choice(("", "", "x")),
            stop_token_ids=stops,
            min_tokens=chance.choice((0, 0, 3)),
            priority=chance.choice((0, 0, 0, 1, -1)),
            max_wait_s=chance.choice((0.0, 0.2, 1000.0, 1000.0)),
            group=chance.choice(("", f"g{number // 4}")),
            constraint=self.constraint(),
        )

    def images(self, tokens: int) -> tuple[Image, ...]:
        """Up to three of a few pictures; where they are computed whole they fit into a step, and text follows."""
        vision, chance, found, behind = self.bench.shape.vision, self.chance, list[Image](), 0
        while vision.layers and chance.random() < 0.5 and len(found) < 3:
            start, count = behind + chance.choice((0, 1, 5, 20)), chance.choice((1, 2, 6, 8))
            behind = start + count
            if behind < tokens:
                hash_, patches = chance.choice((b"cat", b"dog", b"owl")), chance.choice((1, 4, 40))
                found.append(Image(start=start, count=count, hash=hash_, shm="pixels", shape=(patches, 3)))
        return tuple(found)

    def constraint(self) -> Constraint | None:
        """One of a few grammars, some of which can't be compiled."""
        if self.constrained == 0.0 or self.chance.random() > self.constrained:
            return None
        return Constraint(kind="lark", grammar=self.chance.choice(("a", "b", "c", "bad")))

    def compile(self) -> None:
        """End the compiling of grammars, and drop compiled ones, by lot."""
        grammars, chance = self.bench.runner.grammars, self.chance
        for grammar, status in list(grammars.items()):
            if status is PENDING and chance.random() < 0.5:
                self.bench.runner.compile(grammar, "drawn by lot" if grammar == "bad" else "")
            elif status is not PENDING and chance.random() < 0.1:
                del grammars[grammar]

    def submit_group(self, number: int) -> int:
        """Several that begin alike at once, of one prompt or with tails of their own; how many."""
        count, prompt = self.chance.randint(2, 4), _trunk(number, self.chance.choice((60, 90, 150)))
        own = self.chance.choice((0, 0, 5, 25))
        for i in range(number, number + count):
            ask: dict[str, Any] = {"max_tokens": self.chance.choice((0, 3, 20)), "group": f"together {number}"}
            ask["constraint"] = self.constraint()
            ask["prompt"] = (*prompt, *self.chance.sample(range(900), own))
            self.requests[f"{i}"] = self.bench.submit(f"{i}", **ask)
        return count

    def cancel(self, upto: int) -> None:
        id_ = f"{self.chance.randint(0, upto + 2)}"
        self.cancelled.add(id_)
        self.bench.cancel(id_, self.chance.choice(list(CancelReason)))

    def run(self, requests: int = 120) -> None:
        number = 0
        while number < requests:
            match self.chance.choice(self.mix):
                case "s":
                    self.submit(number)
                    number += 1
                case "g":
                    number += self.submit_group(number)
                case "c":
                    self.cancel(number)
                case "f" if self.requests:
                    self.bench.runner.failures.setdefault(self.chance.choice(list(self.requests)), "drawn by lot")
                case _:
                    self.compile()
                    self.bench.step()
        while self.bench.scheduler.live:
            self.compile()
            self.bench.step()
        self.bench.run()


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(150))
def test_every_request_ends_once_and_nothing_is_left(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1 to B7: also where rows outgrow the cache as soon as they run, as few tokens are expected of them."""
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", seed % 3)
    life = Life(seed)
    life.run()
    bench = life.bench
    bench.assert_idle()
    for id_, request in life.requests.items():
        heard = bench.heard[id_]
        assert heard.finish is not None, f"{id_} never ended"
        tokens, finish = expected(request)
        assert tuple(heard.tokens) == tokens[: len(heard.tokens)], "tokens are those it gets alone"
        assert heard.admitted == 1 or (heard.admitted == 0 and not heard.tokens)
        assert len(heard.cached) <= 1, "what was reused is told once"
        if request.constraint is not None and request.constraint.grammar == "bad":
            assert heard.admitted == 0
        scores = [-float(token) for token in request.prompt[1:]] if request.prompt_logprobs is not None else []
        assert heard.scores == scores[: len(heard.scores)], "each score comes once and in order"
        if heard.finish == finish:
            assert heard.scores == scores
        _check_end(life, id_, heard.finish, finish)
    count = bench.statistics()
    assert count.finished + count.cancelled + count.expired + count.failed == len(life.requests)
    assert count.completion_tokens == sum(len(heard.tokens) for heard in bench.heard.values())


def _check_end(life: Life, id_: str, got: Finish, undisturbed: Finish) -> None:
    request = life.requests[id_]
    match got.reason:
        case FinishReason.CANCELLED:
            assert id_ in life.cancelled
        case FinishReason.EXPIRED:
            assert request.max_wait_s < 1000
        case FinishReason.ERROR if got.code == "context_length_exceeded":
            assert len(request.prompt) + request.max_tokens > life.bench.scheduler.limits.capacity
        case FinishReason.ERROR if got.code == "invalid_grammar":
            assert request.constraint is not None
            assert request.constraint.grammar == "bad"
        case FinishReason.ERROR:
            assert got.message == "drawn by lot" or life.troubled
        case _:
            assert got == undisturbed or id_ in life.cancelled


def test_random_lives_have_rows_that_wait_for_each_other() -> None:
    """So that what the lives above check is checked of them as well."""
    waits = 0
    for seed in range(24):
        life = Life(seed)
        life.run(60)
        waits += life.bench.waits
    assert waits > 100


@pytest.mark.parametrize("seed", range(10))
def test_undisturbed_lives_are_complete(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(max_running=5, prefill_tokens=24)
    bench.runner.cost = lambda prefill, decode: (0.001 * prefill, 0.01 if decode else 0.0)
    requests = []
    for i in range(60):
        requests.append(bench.submit(f"{i}", prompt=chance.randint(1, 120), max_tokens=chance.randint(1, 20)))
        for _ in range(chance.randint(0, 4)):
            bench.step()
    bench.run()
    for request in requests:
        bench.assert_undisturbed(request)
    bench.assert_idle()

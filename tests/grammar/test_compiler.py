"""The compiler of grammars: its threads, its cache, and what each matcher may spend."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from treadle.core.grammar_state import PENDING, READY, GrammarState
from treadle.core.messages import Constraint
from treadle.core.statistics import GrammarStatistics
from treadle.grammar import compiler as module
from treadle.grammar.compiler import GrammarCompiler
from treadle.grammar.completions import ending_of
from treadle.grammar.faults import FAILED, fault_of_matcher, has_failed
from treadle.grammar.limits import LIMITS

WAIT_S = 120.0  # compilers run at low priority: a busy machine makes two seconds twenty


class Bytes:
    """A tokenizer of single bytes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


def regex(text: str = "a+b", *, close: bool = False) -> Constraint:
    return Constraint(kind="regex", grammar=LLMatcher.grammar_from_regex(text), close_at_limit=close)


class Harness:
    """A compiler; `until` waits for a state."""

    def __init__(self, **bounds: Any) -> None:
        self.compiler = GrammarCompiler(TOKENIZER, **bounds)
        self.notified = threading.Semaphore(0)
        self.compiler.notify(self.notified.release)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, "not reached"
            time.sleep(0.001)

    def compiled(self, constraint: Constraint) -> None:
        self.until(lambda: self.compiler.state(constraint) is not PENDING)

    def accepts(self, constraint: Constraint, text: bytes) -> bool:
        matcher = self.compiler.matcher(constraint)
        assert matcher is not None
        return matcher.consume_tokens(list(text)) and matcher.is_accepting()


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.compiler.close()


def test_the_first_question_compiles_and_the_answer_is_told(harness: Harness) -> None:
    assert harness.compiler.state(regex()) is PENDING
    assert harness.notified.acquire(timeout=WAIT_S)
    assert harness.compiler.state(regex()) is READY
    assert harness.accepts(regex(), b"aab")
    assert not harness.accepts(regex(), b"aac")


def test_matchers_are_independent(harness: Harness) -> None:
    harness.compiled(regex())
    first, second = harness.compiler.matcher(regex()), harness.compiler.matcher(regex())
    assert first is not None
    assert second is not None
    assert first.consume_tokens(list(b"aab"))
    assert second.consume_tokens(list(b"aaab"))


@pytest.mark.parametrize(
    ("grammar", "message"), [("start: foo", "unknown name"), ("", ""), ("{not json", ""), ("start: /(/", "regex")]
)
def test_a_wrong_grammar_fails_with_the_reason_in_one_line(harness: Harness, grammar: str, message: str) -> None:
    constraint = Constraint(kind="lark", grammar=grammar)
    harness.compiled(constraint)
    status = harness.compiler.state(constraint)
    assert status.state is GrammarState.FAILED
    assert status.message.startswith("the grammar can't be compiled: ")
    assert message in status.message
    assert "\n" not in status.message
    assert harness.compiler.matcher(constraint) is None
    assert harness.compiler.statistics.failed == 1


def test_a_panic_fails_its_grammar_alone(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def compile(*args: object, **options: object) -> LLMatcher:
        raise Panic

    monkeypatch.setattr(module, "LLMatcher", compile)
    harness.compiled(regex("boom"))
    assert harness.compiler.state(regex("boom")).message == "the grammar can't be compiled: Panic in llguidance"
    monkeypatch.undo()
    harness.compiled(regex())
    assert harness.compiler.state(regex()) is READY


def test_without_a_vocabulary_every_grammar_fails() -> None:
    compiler = GrammarCompiler(None, unavailable="no tokens here")
    assert compiler.state(regex()).message == "no tokens here"
    assert compiler.matcher(regex()) is None
    assert compiler.statistics == GrammarStatistics()
    compiler.close()


def test_an_unknown_grammar_has_no_matcher(harness: Harness) -> None:
    assert harness.compiler.matcher(regex("new")) is None


def test_a_constraint_that_closes_waits_for_an_ending(harness: Harness) -> None:
    closing = regex("a+b", close=True)
    assert harness.compiler.state(closing) is PENDING
    harness.compiled(closing)
    found = harness.compiler.ending(closing)
    assert found is not None
    assert found.first == tuple(b"ab")
    assert harness.compiler.ending(regex("a+b")) is None
    assert harness.compiler.statistics.compiled == 1


def test_the_ending_of_a_compiled_grammar_is_found_when_one_asks_for_it(harness: Harness) -> None:
    harness.compiled(regex("a+b"))
    assert harness.notified.acquire(timeout=WAIT_S)
    matcher = harness.compiler.matcher(regex("a+b"))
    assert matcher is not None
    closing = regex("a+b", close=True)
    assert harness.compiler.ending(closing) is None
    assert harness.compiler.state(closing) is PENDING
    assert harness.compiler.state(regex("a+b")) is READY, "others do not wait"
    assert harness.notified.acquire(timeout=WAIT_S)
    assert harness.compiler.state(closing) is READY
    harness.until(lambda: not harness.compiler._cache[closing.grammar].used)
    assert harness.compiler.state(closing) is READY, "it stays when the grammar is compiled anew"


def test_a_wrong_grammar_has_no_ending(harness: Harness) -> None:
    constraint = Constraint(kind="lark", grammar="start: foo", close_at_limit=True)
    harness.compiled(constraint)
    assert harness.compiler.state(constraint).state is GrammarState.FAILED
    assert harness.compiler.ending(constraint) is None


def test_a_search_that_fails_is_logged_and_its_grammar_works(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(module, "ending_of", fails)
    constraint = regex("a+b", close=True)
    harness.compiled(constraint)
    found = harness.compiler.ending(constraint)
    assert found is not None
    assert found.first is None
    assert "close_at_limit has no effect" in caplog.text


def test_a_grammar_may_be_dropped_while_its_ending_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, begun, go = Harness(max_grammars=1), threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(WAIT_S)
        return ending_of(*args)

    monkeypatch.setattr(module, "ending_of", slow)
    constraint = regex("a+b", close=True)
    harness.compiler.state(constraint)
    assert begun.wait(WAIT_S)
    harness.compiled(regex("c"))
    go.set()
    harness.until(lambda: harness.compiler._idle == len(harness.compiler._threads))
    assert harness.compiler.ending(constraint) is None
    harness.compiler.close()


def test_a_grammar_on_which_llguidance_fails_is_compiled_anew(harness: Harness) -> None:
    number = '%json {"type": "number", "multipleOf": 3, "minimum": 0, "maximum": 9}'
    constraint = Constraint(kind="lark", grammar=f"start: number <[256]>\nnumber: {number}", close_at_limit=True)
    harness.compiled(constraint)  # the search for its ending fails, on llguidance 1.9
    matcher = harness.compiler.matcher(constraint)
    assert matcher is not None
    matcher.compute_bitmask()
    assert not matcher.is_error()
    harness.compiler.forget(constraint)
    assert harness.compiler.ending(constraint) is None
    assert harness.compiler._chars == 0
    harness.compiler.forget(constraint)
    assert harness.compiler.state(constraint) is PENDING
    harness.compiler.forget(constraint)
    harness.compiled(constraint)
    assert harness.compiler.state(constraint) is READY


def test_the_text_of_a_failure_of_llguidance_is_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Matcher:
        def __init__(self, error: str) -> None:
            self.get_error = lambda: error

    panics = ("panic: assertion failed: x <backtrace> 0: <unknown>", "unwrap() on an `Err` value: PoisonError { .. }")
    assert [fault_of_matcher(Matcher(text)) for text in panics] == [FAILED, FAILED]  # type: ignore[arg-type]
    assert "assertion failed: x" in caplog.text
    assert "unknown" not in caplog.text
    plain = fault_of_matcher(Matcher("token 1 doesn't\n fit\n<backtrace> 0: <unknown>"))  # type: ignore[arg-type]
    assert plain == "token 1 doesn't fit"
    assert not has_failed(plain)


class Held:
    """Compiling that waits until it is let go, for grammars that contain `slow`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        real = GrammarCompiler._compile

        def compile(compiler: GrammarCompiler, text: str) -> Any:
            self.begun.append(text)
            if "slow" in text:
                assert self.go.wait(WAIT_S)
            return real(compiler, text)

        monkeypatch.setattr(GrammarCompiler, "_compile", compile)


def test_others_pass_a_dear_grammar(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    assert harness.compiler.state(regex("slow")) is PENDING
    harness.until(lambda: bool(held.begun))
    harness.compiled(regex("quick"))
    harness.compiled(regex("quicker"))
    assert harness.compiler.state(regex("slow")) is PENDING
    held.go.set()
    harness.compiled(regex("slow"))
    assert harness.compiler.state(regex("slow")) is READY


def test_the_cache_drops_the_grammars_used_longest_ago_and_never_one_that_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    harness = Harness(max_grammars=3)
    slow = regex("slow")
    harness.compiler.state(slow)
    for text in ("a", "b", "a", "c"):
        harness.compiled(regex(text))
    assert harness.compiler.matcher(regex("b")) is None
    assert harness.compiler.matcher(regex("a")) is not None
    assert harness.compiler.state(slow) is PENDING
    assert harness.compiler.statistics.cached == 3
    held.go.set()
    harness.compiled(slow)
    assert harness.compiler.matcher(slow) is not None
    harness.compiler.close()


def test_the_cache_is_bounded_by_characters() -> None:
    texts = ["x" * count for count in (100, 150, 40)]
    sizes = [len(regex(text).grammar) for text in texts]
    harness = Harness(max_chars=sum(sizes) - 1)
    for text in texts:
        harness.compiled(regex(text))
    assert harness.compiler.matcher(regex(texts[0])) is None
    assert all(harness.compiler.matcher(regex(text)) is not None for text in texts[1:])
    assert harness.compiler.statistics.cached_chars == sum(sizes[1:])
    harness.compiler.close()


def test_statistics_count_each_grammar_once_and_all_the_time(harness: Harness) -> None:
    for text in ("a", "b", "a"):
        harness.compiled(regex(text))
        harness.compiler.matcher(regex(text))
    harness.compiled(Constraint(kind="lark", grammar="start: foo"))
    counted = harness.compiler.statistics
    assert (counted.compiled, counted.failed, counted.cached) == (2, 1, 3)
    assert counted.compile_s > 0


def test_a_used_grammar_is_compiled_anew_and_its_lexer_begins_again(harness: Harness) -> None:
    """Copies of a matcher share the states of their lexer: a sequence must not be stopped by those before it."""
    constraint, chance = regex(".*a.{20}"), random.Random(1)
    harness.compiled(constraint)
    for _ in range(4):
        matcher = harness.compiler.matcher(constraint)
        assert matcher is not None
        for i in range(4000):
            matcher.compute_bitmask()
            assert matcher.consume_token(chance.choice(b"ab")), f"token {i}: {matcher.get_error()}"
        before = harness.compiler.statistics.compile_s
        harness.until(lambda: not harness.compiler._cache[constraint.grammar].used)
        assert harness.compiler.statistics.compile_s >= before
    assert harness.compiler.statistics.compiled == 1
    assert harness.notified.acquire(timeout=WAIT_S)
    assert not harness.notified.acquire(blocking=False), "what is compiled anew is told nobody"


def test_one_that_is_compiled_anew_may_have_been_dropped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(max_grammars=1)
    harness.compiled(regex("slow"))
    held = Held(monkeypatch)
    assert harness.compiler.matcher(regex("slow")) is not None
    harness.until(lambda: bool(held.begun))
    harness.compiled(regex("b"))
    held.go.set()
    harness.until(lambda: harness.compiler._idle == len(harness.compiler._threads))
    assert harness.compiler.matcher(regex("slow")) is None
    assert harness.compiler.statistics.cached == 1
    harness.compiler.close()


def test_limits_end_a_sequence_that_needs_too_many_states(harness: Harness) -> None:
    constraint = regex(".*a.{60}")
    harness.compiled(constraint)
    matcher = harness.compiler.matcher(constraint)
    assert matcher is not None
    count, chance = 0, random.Random(1)
    while not matcher.is_error() and count < 50_000:
        matcher.compute_bitmask()
        matcher.consume_token(chance.choice(b"ab"))
        count += 1
    assert "too many states" in matcher.get_error()
    assert count > 1000


def test_a_grammar_may_nest_deeper_than_the_stack_of_a_text_worker(harness: Harness) -> None:
    """A deeper one ends the worker, which compiles it first."""
    rules = [f'a{i}: a{i + 1} | "x{i}"' for i in range(10_000)]
    constraint = Constraint(kind="lark", grammar="\n".join(("start: a0", *rules, 'a10000: "z"')))
    harness.compiled(constraint)
    assert harness.compiler.state(constraint) is READY


def test_the_callers_threads_keep_their_stacks(harness: Harness) -> None:
    before = threading.stack_size()
    harness.compiled(regex())
    assert threading.stack_size() == before


def test_closing_ends_the_threads_and_forgets_the_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    harness = Harness()
    harness.compiled(regex())
    harness.compiler.state(regex("slow"))
    harness.until(lambda: len(held.begun) == 2)
    threading.Timer(0.1, held.go.set).start()
    harness.compiler.close()
    assert not any(thread.is_alive() for thread in harness.compiler._threads), "they may crash an interpreter that ends"
    assert harness.compiler.matcher(regex()) is None
    assert harness.compiler.matcher(regex("slow")) is None


def test_limits_hide_the_grammar_from_messages() -> None:
    assert not LIMITS.verbose_errors

"""Constraints of single rows: triggers, reasoning and budgets, ends and failures, token by token."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from tests.support.grammars import Grammars, byte_tokenizer, lark, merged_tokenizer, piece_tokenizer, regex, schema
from tests.support.tiny import EOS
from treadle.core.messages import Constraint, Submit, Thinking
from treadle.runner.sampling.constraints import GrammarGone, RowConstraint, row_constraint
from treadle.runner.sampling.token_masks import TokenMasks
from treadle.runner.step import Step

OPEN, CLOSE, CALL, END = 261, 262, 263, 264
ADDED = ("<think>", "</think>", "<call>", "</call>")
SIZE = 280
GRAMMARS = Grammars(byte_tokenizer(SIZE, ADDED))
PIECES = Grammars(piece_tokenizer(("x<f", "=1", "=a", "f=2"), SIZE, ADDED))
EVERYTHING = object()


def made(
    constraint: Constraint | None = None,
    *history: int,
    stops: tuple[int, ...] = (EOS,),
    most: int = 1000,
    grammars: Grammars = GRAMMARS,
    **fields: Any,
) -> RowConstraint:
    request = Submit("r", (1,), most, stop_token_ids=stops, constraint=constraint, **fields)
    row = row_constraint(request, history, SIZE, grammars)
    assert row is not None
    return row


def allowed(row: RowConstraint) -> Any:
    """The tokens that may come next."""
    if row.limit is None:
        return EVERYTHING
    words = TokenMasks(SIZE).fill([row])[0]
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def feed(row: RowConstraint, tokens: bytes | tuple[int, ...]) -> None:
    for token in tokens:
        row.accept(token)
        assert not row.failure


def ids(text: str) -> set[int]:
    return set(text.encode())


def test_a_grammar_holds_from_the_first_token_and_then_only_stop_tokens_may_come() -> None:
    row = made(regex("ab?"))
    assert allowed(row) == ids("a")
    feed(row, b"a")
    assert allowed(row) == ids("b") | {EOS}
    feed(row, b"b")
    assert allowed(row) == {EOS}
    assert row.only_stops
    feed(row, (EOS,))
    assert row.ended
    assert row.over


def test_text_of_a_grammar_goes_before_stop_tokens_that_are_held_back() -> None:
    row = made(regex("a>[12][a-c]b"), stops=(EOS, *b">12c"), min_tokens=4)
    found = []
    for token in b"a>1cb":
        found.append(row.only_stops)
        feed(row, (token,))
    assert found == [False, True, True, False, False]
    assert row.only_stops, "the end"


def test_end_tokens_of_the_vocabulary_that_do_not_stop_the_sequence_are_excluded() -> None:
    row = made(regex("ab?"), stops=(ord("!"),))
    feed(row, b"a")
    assert allowed(row) == ids("b!")


def test_without_stop_tokens_a_complete_grammar_ends_the_sequence() -> None:
    row = made(regex("ab"), stops=(SIZE + 7,))
    feed(row, b"ab")
    assert row.ended
    assert allowed(row) is EVERYTHING


def test_a_grammar_that_is_complete_with_the_last_token_ends_the_sequence() -> None:
    complete, open_ended, cut = made(regex("ab"), most=2), made(regex("ab*"), most=2), made(regex("abc"), most=2)
    for row in (complete, open_ended, cut):
        feed(row, b"ab")
    assert [row.ended for row in (complete, open_ended, cut)] == [True, False, False]


def test_a_token_that_breaks_the_grammar_fails_its_row() -> None:
    row = made(regex("ab"))
    row.accept(ord("x"))
    assert "token 120 does not follow the grammar" in row.failure
    with pytest.raises(ValueError, match="token 120"):
        made(regex("ab"), *b"ax")


def test_a_grammar_that_allows_nothing_fails_its_row_and_not_its_neighbours() -> None:
    stuck, fine = made(regex("ab"), stops=()), made(regex("ab"))
    stuck.limit = type(stuck.limit)(None)  # type: ignore[misc]
    words = TokenMasks(SIZE).fill([stuck, None, fine])
    assert stuck.failure == "the grammar allows no token here"
    assert (words[0] == -1).all()
    assert (words[1] == -1).all()
    assert words[2].view(np.uint32).sum() == 1 << ord("a") % 32
    assert allowed(stuck) is EVERYTHING


def test_a_matcher_in_error_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = made(regex("ab"))
    assert row.limit is not None
    assert row.limit.matcher is not None
    row.limit.matcher.consume_token(ord("x"))
    TokenMasks(SIZE).fill([row])
    assert "the grammar can't be followed any further" in row.failure


def test_a_grammar_that_was_dropped_is_gone() -> None:
    class Empty(Grammars):
        def matcher(self, constraint: Constraint) -> LLMatcher:
            return None  # type: ignore[return-value]

    with pytest.raises(GrammarGone):
        made(regex("ab"), grammars=Empty(GRAMMARS.vocabulary))


def test_a_grammar_without_the_ending_that_closes_it_is_gone() -> None:
    """It was dropped, and compiled again for a request that needs none."""

    class Endless(Grammars):
        def ending(self, constraint: Constraint) -> None:
            return None

    assert made(regex("ab"), grammars=Endless(GRAMMARS.vocabulary))
    with pytest.raises(GrammarGone):
        made(regex("ab", close_at_limit=True), grammars=Endless(GRAMMARS.vocabulary))


def test_a_request_without_limits_has_no_constraint() -> None:
    free = Submit("r", (1,), 9, thinking=Thinking((OPEN,), (CLOSE,)))
    assert row_constraint(free, (), SIZE, GRAMMARS) is None


# Triggers ------------------------------------------------------------------------------------------------------------

TOOL = lark("start: <call> /[0-9]+/ </call>", triggers=("<call>",), then_free=True)
TEXT_TOOL = regex("<f=[0-9]+>", triggers=("<f=", "<g="), then_free=True)


def test_tokens_are_free_until_a_trigger_and_after_the_grammar_until_the_next_one() -> None:
    row = made(TOOL)
    for _ in range(2):
        assert allowed(row) is EVERYTHING
        feed(row, (*b"call <call", CALL))
        assert allowed(row) == ids("0123456789")
        feed(row, b"12")
        assert allowed(row) == ids("0123456789") | {END}
        feed(row, (END,))
    assert allowed(row) is EVERYTHING
    assert not row.over


def test_without_then_free_only_stop_tokens_follow_a_triggered_grammar() -> None:
    row = made(lark("start: <call> /[0-9]/", triggers=("<call>",)))
    feed(row, (*b"abc", CALL, ord("1")))
    assert allowed(row) == {EOS}


@pytest.mark.parametrize("text", [b"<f=", b"a<f=", b"<<f=", b"<f<f="])
def test_a_trigger_is_found_in_bytes_wherever_it_starts(text: bytes) -> None:
    row = made(TEXT_TOOL)
    feed(row, text)
    assert allowed(row) == ids("0123456789")


def test_a_trigger_may_start_and_end_inside_of_tokens() -> None:
    row = made(TEXT_TOOL, grammars=PIECES)
    x_f, one, _, f_two = range(265, 269)
    feed(row, (ord("y"), x_f, one))
    assert allowed(row) == ids("0123456789>")
    feed(row, b">")
    assert allowed(row) is EVERYTHING
    feed(row, (ord("<"), f_two))
    assert allowed(row) == ids("0123456789>")


def test_a_token_that_goes_on_behind_a_trigger_otherwise_than_the_grammar_is_cut_there() -> None:
    row = made(TEXT_TOOL, grammars=PIECES)
    x_f, one, letter, _ = range(265, 269)
    feed(row, (x_f,))
    assert row.settle(letter) == ord("=")
    feed(row, b"=")
    assert allowed(row) == ids("0123456789")
    feed(row, b"5>")
    assert allowed(row) is EVERYTHING
    feed(row, (row.settle(x_f), row.settle(one)))
    assert allowed(row) == ids("0123456789>"), "one that fits is taken as it is"


def test_a_trigger_in_a_token_is_reached_by_shorter_tokens() -> None:
    grammars = Grammars(piece_tokenizer(("go<f=a", "go"), SIZE, ADDED))
    row = made(TEXT_TOOL, grammars=grammars)
    assert row.settle(265) == 266
    feed(row, (266,))
    assert allowed(row) is EVERYTHING
    for byte in b"<f=":
        assert row.settle(byte) == byte
        feed(row, (byte,))
    assert allowed(row) == ids("0123456789")


# Reasoning -----------------------------------------------------------------------------------------------------------

OPENED = Thinking((OPEN,), (CLOSE,), opened=True)
AHEAD = Thinking((OPEN, ord("!")), (CLOSE, ord("."), ord(".")), budget=3)


def test_a_grammar_begins_behind_the_reasoning_which_no_stop_token_ends() -> None:
    row = made(regex("ab"), thinking=OPENED)
    assert (allowed(row), row.held) == (EVERYTHING, (EOS,))
    feed(row, b"hm ab")
    assert (allowed(row), row.held) == (EVERYTHING, (EOS,))
    feed(row, (CLOSE,))
    assert (allowed(row), row.held) == (ids("a"), ())


def test_a_stop_token_that_closes_the_reasoning_is_not_held() -> None:
    row = made(regex("ab"), stops=(EOS, CLOSE), thinking=OPENED)
    assert row.held == (EOS,)


def test_reasoning_may_begin_first_or_the_grammar() -> None:
    row = made(regex("ab"), thinking=AHEAD)
    assert allowed(row) == ids("a") | {OPEN}
    feed(row, (OPEN,))
    assert allowed(row) == ids("!")
    feed(row, b"!xyz")
    for token in (CLOSE, ord("."), ord(".")):
        assert allowed(row) == {token}
        feed(row, (token,))
    assert allowed(row) == ids("a")
    other = made(regex("ab"), thinking=AHEAD)
    feed(other, b"a")
    assert allowed(other) == ids("b")


def test_a_grammar_that_begins_as_the_reasoning_does_may_go_on_alone() -> None:
    row = made(lark('start: <think> "ab"'), thinking=AHEAD)
    feed(row, (OPEN,))
    assert allowed(row) == ids("a!")
    feed(row, b"a")
    assert allowed(row) == ids("b")


@pytest.mark.parametrize(("thoughts", "forced"), [(b"xyz", (CLOSE, 46, 46)), ((CLOSE, 46, CLOSE), (46, 46))])
def test_a_budget_forces_the_rest_of_the_close_and_then_the_row_is_free(
    thoughts: bytes | tuple[int, ...], forced: tuple[int, ...]
) -> None:
    row = made(thinking=AHEAD)
    assert allowed(row) is EVERYTHING
    feed(row, (OPEN, ord("!")))
    for token in thoughts:
        assert allowed(row) is EVERYTHING
        feed(row, (token,))
    for token in forced:
        assert allowed(row) == {token}
        feed(row, (token,))
    assert row.over


REOPENS = Thinking((OPEN, ord("!")), (CLOSE,), budget=3, reopens=True)


@pytest.mark.parametrize("constraint", [None, regex("<f>[0-9]+", triggers=("<f>",))])
def test_blocks_of_reasoning_share_a_budget(constraint: Constraint | None) -> None:
    row = made(constraint, thinking=REOPENS)
    feed(row, (OPEN, *b"!xy", CLOSE, *b"text", OPEN, *b"?", OPEN, OPEN))
    assert allowed(row) is EVERYTHING
    feed(row, b"!")  # two tokens, and the close
    assert allowed(row) == {CLOSE}
    feed(row, (CLOSE, *b"more", OPEN, *b"!"))
    assert allowed(row) == {CLOSE}
    assert not row.over


def test_no_reasoning_reopens_within_a_grammar() -> None:
    row = made(regex("<f>[0-9]+", triggers=("<f>",)), thinking=REOPENS)
    feed(row, (OPEN, *b"!x", CLOSE, *b"so <f>"))
    assert allowed(row) == ids("0123456789")
    forced = made(regex("ab"), thinking=REOPENS)
    feed(forced, (OPEN, *b"!x", CLOSE))
    assert allowed(forced) == ids("a")


def test_a_budget_without_reasoning_is_over_with_the_first_token() -> None:
    row = made(thinking=AHEAD)
    feed(row, b"a")
    assert row.over


def test_reasoning_without_markers_is_over_at_once() -> None:
    assert made(thinking=Thinking((), (CLOSE,), budget=1)).over
    assert made(thinking=Thinking((OPEN,), (), opened=True, budget=1)).over


def test_no_budget_at_all_closes_at_once() -> None:
    row = made(thinking=Thinking((OPEN,), (CLOSE,), opened=True, budget=0))
    assert allowed(row) == {CLOSE}


def test_reasoning_leaves_room_for_the_answer() -> None:
    constraint = regex("abcd", close_at_limit=True)
    row = made(constraint, most=8, thinking=OPENED)
    for _ in range(3):
        assert allowed(row) is EVERYTHING
        feed(row, b"x")
    assert allowed(row) == {CLOSE}
    assert allowed(made(constraint, most=7, thinking=AHEAD)) == ids("a")
    assert allowed(made(constraint, most=9, thinking=AHEAD)) == {OPEN, ord("a")}
    assert allowed(made(constraint, most=3, thinking=OPENED)) is EVERYTHING, "it does not fit anyway"


# Forced tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "fields", "fed", "forced"),
    [
        (regex("abc[xy]d"), {}, b"", b"abc"),
        (regex("abc[xy]d"), {}, b"abcx", b"d"),
        (regex("abc[xy]d"), {}, b"abc", b""),
        (regex("abcdef"), {"most": 3}, b"a", b"bc"),
        (regex("abcdef"), {"stops": (ord("d"),)}, b"a", b"bc"),
        (lark("start: /ab/ <[260]> /c/"), {}, b"", b"ab"),
        (lark("start: /ab/ <think> /c/"), {}, b"", (*b"ab", OPEN, ord("c"))),
        (regex("ab(cd)?"), {}, b"ab", b""),
        (regex("ab(cd)?"), {"stops": ()}, b"ab", b""),
        (regex("ab"), {}, b"ab", b""),
        (regex("abc"), {"thinking": OPENED}, b"", b""),
        (regex("abc"), {"thinking": OPENED}, (ord("x"), CLOSE), b"abc"),
        (regex("abc"), {"thinking": AHEAD}, b"", b""),
        (regex("abc"), {"thinking": AHEAD}, b"a", b"bc"),
        (regex("abcd", close_at_limit=True), {"most": 4}, b"a", b""),
        (regex("abcd", close_at_limit=True), {"most": 400}, b"a", b"bcd"),
        (regex("<f=12[0-9]>", triggers=("<f=",)), {}, b"abc<f", b""),
        (regex("<f=12[0-9]>", triggers=("<f=",)), {}, b"abc<f=", b"12"),
    ],
)
def test_tokens_are_forced_inside_of_a_grammar_that_leaves_no_choice(
    constraint: Constraint, fields: dict[str, Any], fed: bytes | tuple[int, ...], forced: bytes | tuple[int, ...]
) -> None:
    row = made(constraint, **fields)
    feed(row, row_tokens(row, fed))
    assert row.forced() == list(forced)


def row_tokens(row: RowConstraint, tokens: bytes | tuple[int, ...]) -> tuple[int, ...]:
    """The tokens, each settled before it is taken."""
    return tuple(row.settle(token) for token in tokens)


# Tokens of several characters ----------------------------------------------------------------------------------------

MERGED = merged_tokenizer(
    ("na", "nam", "name", '":', '":"', '"name', "ag", "age", "tr", "tru", "true", "ue", "we", "wef", "ft", '"}', 'e"'),
    SIZE,
)
PERSON = schema(
    {
        "type": "object",
        "properties": {"name": {"enum": ["wart", "weft"]}, "age": {"type": "boolean"}, "names": {"const": "nam"}},
        "required": ["name", "age", "names"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_has_the_same_text_and_tokens_with_forced_tokens_and_without(seed: int) -> None:
    """Forced tokens are those that the mask would allow alone; what could be cut in other ways is not forced."""
    texts = []
    for forces in (False, True):
        row = made(PERSON, grammars=Grammars(MERGED))
        tokens: list[int] = []
        while not row.only_stops:
            some = sorted(allowed(row))
            tokens.append(random.Random(f"{seed} {tokens}").choice(some))
            row.accept(tokens[-1])
            for token in row.forced() if forces else ():
                assert allowed(row) == {token}
                row.accept(token)
                tokens.append(token)
        texts.append(tokens)
    assert texts[0] == texts[1]
    json.loads(MERGED.decode_bytes(texts[0]))


# Anew ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "thinking", "tokens"),
    [
        (schema({"type": "array", "items": {"type": "integer"}}), None, (*b"[12,3]", EOS)),
        (TOOL, None, (*b"so", CALL, *b"12", END, *b"and", CALL, *b"3")),
        (TEXT_TOOL, AHEAD, (OPEN, ord("!"), *b"abc", CLOSE, *b"..<f=1><f=2")),
        (regex("a+b", close_at_limit=True), OPENED, (*b"hm", CLOSE, *b"aaab", EOS)),
    ],
)
def test_a_row_that_is_made_anew_from_its_history_allows_the_same(
    constraint: Constraint, thinking: Thinking | None, tokens: tuple[int, ...]
) -> None:
    row = made(constraint, thinking=thinking, most=60)
    for i, token in enumerate(tokens):
        again = made(constraint, *tokens[:i], thinking=thinking, most=60)
        assert (allowed(again), again.held, again.over) == (allowed(row), row.held, row.over)
        feed(row, (token,))


def settled(row: RowConstraint) -> int:
    """The token that is taken where the bitmask leaves one."""
    (token,) = allowed(row)
    token = row.settle(token)
    row.accept(token)
    assert not row.failure
    return token


def test_the_name_of_a_special_token_in_a_text_is_written_with_ordinary_tokens() -> None:
    row = made(lark('start: "a<call>" <[262]>'))
    written = [settled(row) for _ in range(8)]
    assert bytes(written[:7]) == b"a<call>"
    assert written[7] == CLOSE, "a token that the grammar itself names"


def test_a_bitmask_has_the_ordinary_token_in_place_of_a_special_one() -> None:
    """So the token that is drawn is the one that is taken, and no later step is computed again."""
    row = made(lark('start: "<call>" <[262]>'))
    assert allowed(row) == {ord("<")}
    assert [settled(row) for _ in range(6)] == list(b"<call>")
    assert allowed(row) == {CLOSE}


def test_the_longest_ordinary_token_stands_for_a_special_one() -> None:
    grammars = Grammars(piece_tokenizer(("<c", "<call", "all"), SIZE, ADDED))
    row = made(lark('start: "<call>x"'), grammars=grammars)
    assert [settled(row) for _ in range(3)] == [266, ord(">"), ord("x")]


def test_the_name_of_an_excluded_end_token_is_written_with_ordinary_tokens() -> None:
    name = GRAMMARS.vocabulary.decode_str([EOS])
    row = made(schema({"const": name}), stops=(ord("!"),))
    assert bytes(settled(row) for _ in range(len(name) + 2)).decode() == f'"{name}"'


def test_a_special_token_that_neither_a_grammar_nor_its_text_has_ends_the_row() -> None:
    row = made(regex("[ab]"))
    assert row.settle(CALL) == CALL
    row.accept(CALL)
    assert "does not follow the grammar" in row.failure


def test_a_row_whose_grammar_can_not_go_on_is_the_requests_fault() -> None:
    failed = {"a": "token 5 does not follow the grammar", "b": "its logits are NaN"}
    step = Step(began=0.0, segments=[], rows={}, decodes=[], failed=failed, ungrammatical={"a"})
    assert {failure.id: failure.code for failure in step.failures()} == {
        "a": "invalid_grammar",
        "b": "engine_step_failed",
    }

"""Answers that must be complete within `max_tokens`, with tokens taken at random from what constraints allow."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.grammars import Grammars, byte_tokenizer, lark, piece_tokenizer, regex, schema
from treadle.core.messages import Constraint, Submit
from treadle.grammar.completions import WORK_A_STEP, Search, ending_of
from treadle.runner.sampling import closing
from treadle.runner.sampling.constraints import RowConstraint, row_constraint
from treadle.runner.sampling.sampler import SamplingRow
from treadle.runner.sampling.token_masks import TokenMasks

PIECES = (
    '""',
    '"}',
    '"]',
    '":',
    '","',
    "{}",
    "[]",
    "}}",
    "]}",
    "ab",
    "abc",
    "name",
    "true",
    "false",
    "null",
    "12",
    ", ",
)


@pytest.fixture(autouse=True)
def steps_by_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "STEP_S", math.inf)


VOCABULARIES = {"bytes": byte_tokenizer(263, ("<think>", "</think>")), "pieces": piece_tokenizer(PIECES, 300)}
STOP = 258


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "number", "const", "pattern"]
    kind = dice.choice([*kinds, *(["object", "array", "any"] * 3 if depth else [])])
    inner = [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))] if depth else []
    match kind:
        case "object":
            names = [f"{dice.choice('abcxyz')}{'n' * dice.randint(0, 9)}{i}" for i in range(len(inner))]
            required = [name for name in names if dice.random() < 0.6]
            fields = dict(zip(names, inner, strict=True))
            more = dice.random() < 0.2
            return {"type": "object", "properties": fields, "required": required, "additionalProperties": more}
        case "array":
            return {"type": "array", "items": inner[0], "minItems": dice.choice([0, 0, 1, 3])}
        case "any":
            return {"anyOf": inner}
        case "enum":
            return {"enum": ["short", "a much longer alternative", 7][: dice.randint(1, 3)]}
        case "const":
            return {"const": {"k": "v" * dice.randint(0, 12)}}
        case "pattern":
            return {"type": "string", "pattern": dice.choice(["^[a-z]{2,5}$", "^[0-9]+-[0-9]{3}$", "^(ab|abc)+x$"])}
        case "string":
            return {"type": "string", "minLength": dice.choice([0, 0, 0, 9])}
        case _:
            return {"type": kind}


def allowed(row: RowConstraint, masks: TokenMasks) -> list[int]:
    if row.limit is None:
        return []
    words = masks.fill([row])[0]
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def answer(row: RowConstraint, masks: TokenMasks, dice: random.Random, most: int) -> tuple[list[int], bool]:
    """Tokens at random; and whether the sequence stopped by itself."""
    tokens: list[int] = []
    while len(tokens) < most:
        some = allowed(row, masks) or list(range(97, 123))
        long = [token for token in some if token not in (STOP, 260)]
        token = row.settle(dice.choice(long if long and dice.random() < 0.9 else some))
        assert not row.limit or token in some, "what is taken was allowed"
        row.accept(token)
        assert not row.failure
        tokens.append(token)
        if row.ended or token == STOP:
            return tokens, True
    return tokens, False


def made(constraint: Constraint, name: str, most: int, **fields: Any) -> RowConstraint:
    grammars = Grammars(VOCABULARIES[name])
    request = Submit("r", (1,), most, stop_token_ids=(STOP,), constraint=constraint, **fields)
    row = row_constraint(request, (), 300, grammars)
    assert row is not None
    return row


def shortest(constraint: Constraint, name: str) -> int:
    grammars = Grammars(VOCABULARIES[name])
    found = ending_of(grammars.vocabulary, constraint.grammar, grammars.matcher(constraint)).first
    assert found is not None
    return len(found)


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("seed", range(20))
def test_an_answer_is_complete_whenever_a_completion_fits(seed: int, name: str) -> None:
    dice = random.Random(seed)
    constraint = schema(random_schema(dice), close_at_limit=True)
    least = shortest(constraint, name)
    masks = TokenMasks(VOCABULARIES[name].vocab_size)
    for most in (least, least + 1, least + 2, least + 5, least + 20, 2 * least + 60, least + 150):
        if most:
            tokens, stopped = answer(made(constraint, name, most), masks, dice, most)
            text = VOCABULARIES[name].decode_bytes([token for token in tokens if token != STOP])
            assert stopped, (constraint.grammar, most, text)
            json.loads(text)


CALL = lark('start: "<f>" args "</f>"\nargs: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[0-9]{1,5}/', close_at_limit=True)

RECURSIVE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("most", [25, 40, 160])
def test_a_recursive_answer_is_complete(most: int, name: str) -> None:
    for seed in range(5):
        row = made(schema(RECURSIVE, close_at_limit=True), name, most)
        tokens, stopped = answer(row, TokenMasks(VOCABULARIES[name].vocab_size), random.Random(seed), most)
        assert stopped
        json.loads(VOCABULARIES[name].decode_bytes([token for token in tokens if token != STOP]))


@pytest.mark.parametrize(
    "constraint",
    [
        lark('start: <think> /[^<]*/ </think> /[a-z]+/ "."', close_at_limit=True),
        lark('start: <think> /[^<]*/ <[262]> "end"', close_at_limit=True),
        regex("(ab|abc)+x[0-9]+-", close_at_limit=True),
        regex("([a-z]+ ){3}[A-Z]", close_at_limit=True),
    ],
    ids=["names", "numbers", "circles", "words"],
)
def test_grammars_of_other_kinds_are_completed(constraint: Constraint) -> None:
    least, masks = shortest(constraint, "bytes"), TokenMasks(263)
    for most in (least, least + 1, least + 7, least + 90):
        tokens, stopped = answer(made(constraint, "bytes", most), masks, random.Random(most), most)
        matcher = Grammars(VOCABULARIES["bytes"]).matcher(constraint)
        assert stopped
        assert matcher.consume_tokens([token for token in tokens if token != STOP])
        assert matcher.is_accepting()


def test_an_answer_that_does_not_fit_ends_by_its_length() -> None:
    tokens, stopped = answer(made(regex("a{9}", close_at_limit=True), "bytes", 5), TokenMasks(263), random.Random(), 5)
    assert (tokens, stopped) == ([97] * 5, False)


def test_a_completion_that_never_fitted_steers_nothing() -> None:
    """The row takes what is drawn, may force tokens, and is counted."""
    grammars, constraint = Grammars(VOCABULARIES["bytes"]), regex("x?[ab]{30}c{3}d", close_at_limit=True)
    request = Submit("r", (1,), 20, stop_token_ids=(STOP,), constraint=constraint)
    row = row_constraint(request, (), 300, grammars)
    assert row is not None
    masks, dice, taken = TokenMasks(263), random.Random(1), list[int]()
    while len(taken) < 20:
        some = allowed(row, masks)
        assert len(some) > 1
        taken.append(row.settle(dice.choice(some)))
        row.accept(taken[-1])
    assert set(taken[3:]) == {97, 98}
    assert (row.ended, grammars.statistics.not_closed) == (False, 1)


def test_an_extensible_answer_stops_where_nothing_else_would_fit() -> None:
    """Behind "a" the grammar is complete; "b" would need four tokens more."""
    row = made(regex("a(bcdef)?", close_at_limit=True), "bytes", 4)
    row.accept(row.settle(97))
    assert row.settle(98) == STOP
    assert row.settle(STOP) == STOP


# Searches in steps ----------------------------------------------------------------------------------------------------

TREE = schema(
    {
        "type": "object",
        "properties": {"o": {"type": "object", "properties": {"k": {"type": "string", "minLength": 40}}}},
        "additionalProperties": False,
    },
    close_at_limit=True,
)


def feed(row: RowConstraint, text: bytes) -> list[int]:
    """Draw the bytes of `text` until one is replaced. Return the tokens that are taken."""
    taken = []
    for drawn in text:
        taken.append(row.settle(drawn))
        row.accept(taken[-1])
        assert not row.failure
        if taken[-1] != drawn:
            break
    return taken


class Work:
    """Counts the work and the number of searches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searches = 0
        self.most = self.total = 0
        real = Search.run

        def run(search: Search, work: int, seconds: float = math.inf) -> list[int] | None:
            before, self.searches = search.work, self.searches + 1
            found = real(search, work, seconds)
            self.most = max(self.most, before - search.work)
            self.total += before - search.work
            return found

        monkeypatch.setattr(Search, "run", run)


def test_tokens_inside_a_text_need_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the known completion fits behind each of them."""
    row, work = made(schema({"type": "string"}, close_at_limit=True), "bytes", 30), Work(monkeypatch)
    assert feed(row, b'"' + b"x" * 28) == list(b'"' + b"x" * 28)
    assert work.searches <= 1
    assert allowed(row, TokenMasks(263)) == [ord('"')]


def test_nothing_is_searched_while_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    row = made(regex("(ab|c{9})+x", close_at_limit=True), "bytes", 1 << 22)
    made_searches = work.searches
    assert feed(row, b"ababccccccccc" * 20) == list(b"ababccccccccc" * 20)
    assert work.searches == made_searches


def test_a_token_whose_search_is_too_long_closes_the_answer_early(monkeypatch: pytest.MonkeyPatch) -> None:
    row, work = made(TREE, "bytes", 200), Work(monkeypatch)
    taken = feed(row, b'{"o":{"k":"')
    assert work.most <= WORK_A_STEP + 8
    assert bytes(taken) != b'{"o":{"k":"'
    tokens, stopped = answer(row, TokenMasks(263), random.Random(1), 200 - len(taken))
    assert stopped
    json.loads(bytes(taken) + bytes(token for token in tokens if token != STOP))


def test_a_long_search_goes_on_in_the_next_steps_where_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    row, work = made(TREE, "bytes", 1500), Work(monkeypatch)
    text = b'{"o":{"k":"' + b"x" * 30
    assert feed(row, text) == list(text)
    assert 3 < work.searches < len(text)
    assert work.most <= WORK_A_STEP + 8
    assert row._closing is not None
    assert row._closing._exact, "the search is over, and its completion was joined"


def test_forced_tokens_do_not_search_more_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"a_rather_long_name_of_a_property_{i}" for i in range(10)]
    fields = {name: {"type": "string", "minLength": 20} for name in names}
    args = json.dumps({"type": "object", "properties": fields, "required": names, "additionalProperties": False})
    constraint = lark(f'start: "<f>" args\nargs: %json {args}', triggers=("<f>",), close_at_limit=True)
    grammars, request = Grammars(VOCABULARIES["bytes"]), Submit("r", (1,), 1000, stop_token_ids=(STOP,))
    request = msgspec.structs.replace(request, constraint=constraint)
    constrained = row_constraint(request, (), 300, grammars)
    row, masks, work, forced = SamplingRow(request, (), 300, constrained), TokenMasks(263), Work(monkeypatch), 0
    drawn, tokens = list(b"<f>"), list[int]()
    while not row.ended and len(tokens) < 1000:
        assert constrained is not None
        work.total = 0
        some = allowed(constrained, masks)
        drawn = drawn or [next((token for token in some if token in list(b'",:}')), some[-1])]
        tokens.append(constrained.settle(drawn.pop(0)))
        assert not row.accept(tokens[-1])
        if row.limited:
            more, failure = row.force(1)
            assert not failure
            forced += len(more)
            tokens += more
        assert work.total <= WORK_A_STEP + 8
    assert row.ended
    assert forced > 10


LONG = regex('([^"x]{40}"){12}', close_at_limit=True)  # 480 places with one mask: each seems to go round in circles
CIRCLES = regex("(abcd|abc|abce)+x(1|2|3)z{90}", close_at_limit=True)


@pytest.mark.parametrize(("constraint", "drawn"), [(LONG, b"-"), (CIRCLES, b"abcd"), (TREE, b'{"o":{"k":"')])
def test_a_row_that_knows_no_completion_takes_that_of_a_search_of_many_steps(
    constraint: Constraint, drawn: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = made(constraint, "bytes", 600)
    work, masks, taken = unknown(row, monkeypatch), TokenMasks(263), list[int]()
    while not row.ended and len(taken) < 600:
        work.total = 0
        some = allowed(row, masks)
        taken.append(row.settle(next((token for token in drawn[len(taken) :] if token in some), some[0])))
        row.accept(taken[-1])
        assert work.total <= WORK_A_STEP + 8
    assert row.ended


def unknown(row: RowConstraint, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Let a row know a completion of its grammar that fits nowhere. Return the work that it does from now on."""
    return with_first(row, (255,), monkeypatch)


def with_first(row: RowConstraint, first: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> Work:
    assert row._closing is not None
    row._closing._ending = replace(row._closing._ending, first=first, growth=1 << 20)
    row._closing.restart(at_beginning=False)
    return Work(monkeypatch)


def take(row: RowConstraint, drawn: bytes) -> bytes:
    """Draw the bytes of `drawn`, and others as the grammar allows them. Return the tokens that are taken."""
    masks, taken = TokenMasks(263), list[int]()
    while not row.ended and row._left:
        some = allowed(row, masks)
        token = next((token for token in drawn[len(taken) : len(taken) + 1] if token in some), some[0])
        taken.append(row.settle(token))
        row.accept(taken[-1])
    return bytes(token for token in taken if token < 256)


TEXT = lark(
    'start: text\ntext[lazy]: UNTIL\nUNTIL: TEXT " and out"\nTEXT: /[a-z ]*/ & ~/.* and out.*/', close_at_limit=True
)


def test_a_text_is_closed_by_its_end_and_is_its_own_up_to_there() -> None:
    """No single token of the end changes what may come next, but the last one."""
    drawn = b"the quick brown fox jumps over the lazy dog" * 3
    for most in (8, 9, 50):
        assert take(made(TEXT, "bytes", most), drawn) == drawn[: most - 8] + b" and out"


def test_a_text_is_its_own_while_searches_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has time for one mask. The completion is that of an earlier state until the search is over."""
    real = Search.run
    monkeypatch.setattr(Search, "run", lambda search, work, seconds=math.inf: real(search, 1, seconds))
    long: dict[str, Any] = {"title": {"type": "string"}, "body": {"type": "string"}, "n": {"type": "integer"}}
    value = {
        "anyOf": [
            {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
            for fields in (long, {"a": {"type": "string"}})
        ]
    }
    drawn = b'{"title":"The fox","body":"' + b"the quick brown fox jumps over the lazy dog" * 6
    for most in (80, 200):
        taken = take(made(schema(value, close_at_limit=True), "bytes", most), drawn)
        assert taken == drawn[: most - len(b'","n":0}')] + b'","n":0}'


def test_a_text_that_nothing_can_close_is_its_own_to_its_limit() -> None:
    """Behind other texts the greedy terminal takes the beginning of the end for its own."""
    constraint = lark('start: "<a>" TEXT "</answer>"\nTEXT: /[^<]*(<[^\\/][^<]*)*/', close_at_limit=True)
    grammars, drawn = Grammars(VOCABULARIES["bytes"]), b"<a>" + b"hello " * 50
    row = row_constraint(Submit("r", (1,), 200, stop_token_ids=(STOP,), constraint=constraint), (), 300, grammars)
    assert row is not None
    assert take(row, drawn) == drawn[:200]
    assert grammars.statistics.not_closed == 1


def test_a_row_that_knows_no_completion_at_all_keeps_its_tokens_while_one_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = made(regex("[a-f]{60,}(XY){9}", close_at_limit=True), "bytes", 200)
    work, drawn = with_first(row, None, monkeypatch), b"abcdef" * 50
    assert take(row, drawn) == drawn[:182] + b"XY" * 9
    assert row.ended
    assert work.searches > 3
    assert work.most <= WORK_A_STEP + 8


def test_what_no_search_can_close_is_drawn_to_its_end_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, constraint = Grammars(VOCABULARIES["bytes"]), regex("[a-f]{400}", close_at_limit=True)
    request, drawn = Submit("r", (1,), 300, stop_token_ids=(STOP,), constraint=constraint), b"abcdef" * 50
    for first, most in ((None, 300), (None, 3)):
        row = row_constraint(msgspec.structs.replace(request, max_tokens=most), (), 300, grammars)
        assert row is not None
        with_first(row, first, monkeypatch)
        before = grammars.statistics.not_closed
        assert take(row, drawn) == drawn[:most]
        assert grammars.statistics.not_closed == before + 1


def test_a_search_whose_masks_are_dear_leaves_the_row_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has no time for a token of its way."""
    monkeypatch.setattr(closing, "STEP_S", 0.0)
    row = made(LONG, "bytes", 900)
    work = unknown(row, monkeypatch)
    assert feed(row, b"abcdefghi" * 4) == list(b"abcdefghi" * 4)
    assert work.searches == 36
    assert work.most <= 8


def test_a_row_for_which_nothing_fits_gives_up_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(VOCABULARIES["bytes"])
    constraint = regex("([ab]{3}c){75}[ab]d", close_at_limit=True)
    request = Submit("r", (1,), 300, stop_token_ids=(STOP,), constraint=constraint)
    row = row_constraint(request, (), 300, grammars)
    assert row is not None
    work, masks, gave_up = unknown(row, monkeypatch), TokenMasks(263), 0
    for _ in range(300):
        work.total = 0
        row.accept(row.settle(allowed(row, masks)[0]))
        assert work.total <= WORK_A_STEP + 8
        gave_up += bool(grammars.statistics.not_closed and work.total)
    assert not row.ended
    assert grammars.statistics.not_closed == 1
    assert gave_up <= 1, "nothing is searched any more"


@pytest.mark.parametrize("most", [60, 90, 400, 1400])
def test_a_call_begins_behind_its_trigger_and_is_complete(most: int) -> None:
    constraint = msgspec.structs.replace(TREE, grammar=CALL.grammar, triggers=("<f>",), then_free=True)
    for seed in range(6):
        row, masks, dice = made(constraint, "bytes", most), TokenMasks(263), random.Random(seed)
        before = feed(row, b"so <f>")
        tokens, _ = answer(row, masks, dice, most - len(before))
        text = bytes(before) + bytes(token for token in tokens if token < 256)
        assert text.count(b"<f>") <= text.count(b"</f>"), text


def test_a_token_that_is_not_taken_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    row, work = made(schema({"type": "string"}, close_at_limit=True), "bytes", 6), Work(monkeypatch)
    feed(row, b'"xx')
    assert row.settle(ord("y")) == ord("y")
    row.unsettle()
    before = work.searches
    assert feed(row, b"zz") == list(b"zz")
    assert work.searches == before, "the completion is still known"
    assert allowed(row, TokenMasks(263)) == [ord('"')]


def test_a_call_that_begins_too_late_is_cut() -> None:
    constraint = msgspec.structs.replace(CALL, triggers=("<f>",))
    row = made(constraint, "bytes", 12)
    assert feed(row, b"so then <f>[1") == list(b"so then <f>[1")


def test_a_row_whose_history_was_not_settled_closes_nevertheless() -> None:
    """Its tokens left no space for what the row knew, but a completion fits."""
    constraint = regex("a{3}|b{9}|c+d", close_at_limit=True)
    grammars = Grammars(VOCABULARIES["bytes"])
    request = Submit("r", (1,), 6, stop_token_ids=(STOP,), constraint=constraint)
    row = row_constraint(request, (98,), 300, grammars)
    assert row is not None
    assert not row.failure

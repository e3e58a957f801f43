"""Structured output on the vllm wire: what its fields ask for reaches the engine as a constraint, or is refused with
the place at fault."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from tests.fronts.rpc.worker import refused, until, worker
from tests.fronts.web.server import forever
from tests.support.aio import in_loop
from tests.support.bytes_text import bytes_text
from tests.support.tiny import CHATML
from treadle.core.messages import Constraint, Submit
from treadle.runner.sampling.constraints import Limit, RowConstraint

THINKING = bytes_text(added=("<think>", "</think>"), chat_template=CHATML + "{# <think> </think> #}")
OPEN, CLOSE = 261, 262
FILE = (THINKING.folder / "tokenizer.json").read_text()
VOCABULARY = LLTokenizer(FILE, eos_token=[258, 260])
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORCED_TOOLS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "anyOf": [
            {
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": {"type": "object"}},
                "required": ["name", "parameters"],
            }
            for name in ("weather", "time")
        ],
    },
}
"""A schema in the form in which the gateway forces a tool."""
TAG = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<think>"],
        "tags": [
            {"begin": "<think>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</think>"},
        ],
        "at_least_one": True,
    }
}


def takes(constraint: Constraint, answer: str) -> bool:
    """Whether the grammar takes the answer, as a whole."""
    matcher = LLMatcher(VOCABULARY, constraint.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = Tokenizer.from_str(FILE).encode(answer, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("asked", "kind", "taken", "not_taken"),
    [
        ({"json_schema": json.dumps(PERSON)}, "json_schema", '{"age": 3}', "{}"),
        ({"json_schema": '{"type":"object"}'}, "json_schema", '{"a": []}', "[]"),
        (
            {"json_schema": json.dumps(FORCED_TOOLS)},
            "json_schema",
            '[{"name": "time", "parameters": {}}]',
            '[{"name": "date", "parameters": {}}]',
        ),
        ({"json_object": True}, "json_object", '{"a": 1}', "3"),
        ({"regex": "[ab]+"}, "regex", "abba", "abc"),
        ({"grammar": 'root ::= "yes" | "no"'}, "lark", "yes", "maybe"),
        ({"grammar": 'start: "yes" | "no"'}, "lark", "no", "maybe"),
        ({"choice": {"choices": ["red", "green"]}}, "choice", "green", "blue"),
        ({"structural_tag": json.dumps(TAG)}, "structural_tag", '<think>{"age": 3}</think>', "<think>"),
    ],
)
@in_loop
async def test_each_constraint_reaches_the_engine(asked: dict[str, Any], kind: str, taken: str, not_taken: str) -> None:
    """E2, F7"""
    async with worker(text=THINKING) as w:
        await w.vllm.answer(n=2, max_tokens=3, **asked)
        first, second = (request.constraint for request in w.runner.seen)
        assert first is not None
        assert first == second
        assert (first.kind, first.close_at_limit) == (kind, False)
        assert takes(first, taken)
        assert not takes(first, not_taken)
        await until(w.idle)


@pytest.mark.parametrize("asked", [{}, {"json_object": False}])
@in_loop
async def test_without_a_constraint_nothing_is_built(asked: dict[str, Any]) -> None:
    async with worker(text=THINKING) as w:
        await w.vllm.answer(**asked)
        assert w.runner.seen[0].constraint is None
        assert w.texts.pool.runs == 0


@pytest.mark.parametrize(
    ("prompt", "from_first_token", "opened"),
    [
        ((*b"hi", OPEN), False, True),
        ((*b"hi", OPEN, 10), False, True),
        ((*b"hi", OPEN), True, False),
        ((*b"hi", OPEN, 10, CLOSE), False, False),
        (tuple(b"hi"), False, False),
    ],
)
@in_loop
async def test_a_grammar_begins_behind_reasoning_that_the_prompt_opened(
    prompt: tuple[int, ...], from_first_token: bool, opened: bool
) -> None:
    async with worker(text=THINKING) as w:
        await w.vllm.answer(prompt=prompt, regex="a+", grammar_from_first_token=from_first_token)
        thinking = w.runner.seen[0].thinking
        assert (thinking is not None) is opened
        if thinking is not None:
            assert (thinking.open_ids, thinking.close_ids) == ((OPEN,), (CLOSE,))
            assert (thinking.opened, thinking.budget) == (True, None)


# Channels (gpt-oss) ---------------------------------------------------------------------------------------------

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
HARMONY = bytes_text(
    context=4096, special=MARKS, chat_template=Path("tests/text/formats/templates/harmony.jinja").read_text("utf-8")
)
HARMONY_FILE = (HARMONY.folder / "tokenizer.json").read_text()
CHAT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
REASONED = "<|channel|>analysis<|message|>Hm.<|end|>"
JSON = {"type": "json_schema", "json_schema": PERSON}
FINAL_TAG = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<|channel|>analysis", "<|channel|>final"],
        "tags": [
            {"begin": "<|channel|>analysis<|message|>", "content": {"type": "any_text"}, "end": "<|end|>"},
            {"begin": "<|channel|>final<|constrain|>json<|message|>", "content": JSON, "end": ""},
        ],
        "at_least_one": True,
        "stop_after_first": False,
    }
}
"""What the gateway sends for `response_format`."""
CALL = "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>"
CALL_TAG = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<|start|>assistant<|channel|>commentary", "<|channel|>commentary"],
        "tags": [{"begin": begin, "content": JSON, "end": ""} for begin in (f"<|start|>assistant{CALL}", CALL)],
        "at_least_one": True,
        "stop_after_first": True,
    }
}
"""What it sends for a forced tool."""


def harmony_ids(text: str) -> tuple[int, ...]:
    return tuple(Tokenizer.from_str(HARMONY_FILE).encode(text, add_special_tokens=False).ids)


def ends_well(request: Submit, answer: str) -> bool:
    """Whether the engine's constraint takes an answer, token by token, and its end behind that."""
    assert request.constraint is not None
    tokenizer = LLTokenizer(HARMONY_FILE, eos_token=list(HARMONY.eos_token_ids))
    beginning = LLMatcher(tokenizer, request.constraint.grammar, log_level=0)
    row = RowConstraint(request, (), HARMONY.vocabulary, beginning, tokenizer)
    for token in (*harmony_ids(answer), HARMONY.eos_token_ids[0]):
        if row.limit is not None and token not in allowed(row.limit, request):
            return False
        row.accept(token)
    return not row.failure


def allowed(limit: Limit, request: Submit) -> set[int]:
    mask = int.from_bytes(limit.matcher.compute_bitmask(), "little") if limit.matcher is not None else 0
    found = {token for token in range(HARMONY.vocabulary) if mask >> token & 1}
    stops = {*request.stop_token_ids} if limit.matcher is not None and limit.matcher.is_accepting() else set()
    return (found | stops | {*limit.added}) - {*limit.excluded}


@pytest.mark.parametrize(
    ("asked", "answer", "good"),
    [
        ({"regex": "a+"}, f"{REASONED}<|start|>assistant<|channel|>final<|message|>aa", True),
        ({"regex": "a+"}, "<|channel|>final <|constrain|>json<|message|>aa", True),
        ({"regex": "a+"}, "<|channel|>final<|message|>b", False),
        ({"regex": "a+"}, "aa", False),
        ({"regex": "a+"}, "<|channel|>commentary<|message|>aa", False),
        ({"regex": "a+"}, "<|channel|>analysis<|message|>a<|channel|>final<|message|>aa", False),
        ({"json_schema": json.dumps(PERSON)}, "<|channel|>final<|message|>{}", False),
        ({"structural_tag": json.dumps(FINAL_TAG)}, "<|channel|>final<|constrain|>json<|message|>{}", False),
        (
            {"structural_tag": json.dumps(FINAL_TAG)},
            f'{REASONED}<|start|>assistant<|channel|>final<|constrain|>json<|message|>{{"age": 3}}',
            True,
        ),
        ({"structural_tag": json.dumps(CALL_TAG)}, f'{CALL}{{"age": 3}}', True),
        ({"structural_tag": json.dumps(CALL_TAG)}, f'{REASONED}<|start|>assistant{CALL}{{"age": 3}}', True),
        ({"structural_tag": json.dumps(CALL_TAG)}, f"{REASONED}<|start|>assistant{CALL}{{}}", False),
        ({"structural_tag": json.dumps(CALL_TAG)}, f"{REASONED}<|start|>assistant<|channel|>final<|message|>a", False),
    ],
)
@in_loop
async def test_with_channels_a_grammar_begins_behind_the_reasoning(
    asked: dict[str, Any], answer: str, good: bool
) -> None:
    async with worker(text=HARMONY) as w:
        await w.vllm.answer(prompt=harmony_ids(CHAT), max_tokens=300, **asked)
        assert ends_well(w.runner.seen[0], answer) is good


@pytest.mark.parametrize(
    ("prompt", "asked", "answer", "opened"),
    [
        (CHAT, {"regex": "a+"}, f"{REASONED}<|start|>assistant<|channel|>final<|message|>aa", None),
        (CHAT, {"regex": "a+", "grammar_from_first_token": True}, "aa", None),
        (f"{CHAT}<|channel|>final<|message|>", {"regex": "a+"}, "aa", None),
        (
            f"{CHAT}<|channel|>analysis<|message|>",
            {"regex": "a+"},
            "Hm.<|end|><|start|>assistant<|channel|>final<|message|>aa",
            None,
        ),
        (f"{CHAT}<|channel|>analysis<|message|>", {"structural_tag": json.dumps(CALL_TAG)}, "", True),
        (CHAT, {"structural_tag": json.dumps(CALL_TAG)}, "", False),
        (CHAT, {"structural_tag": json.dumps(FINAL_TAG)}, "", None),
        ("hi", {"regex": "a+"}, "aa", None),
    ],
)
@in_loop
async def test_where_a_grammar_begins_follows_from_the_end_of_the_prompt(
    prompt: str, asked: dict[str, Any], answer: str, opened: bool | None
) -> None:
    async with worker(text=HARMONY) as w:
        await w.vllm.answer(prompt=harmony_ids(prompt), max_tokens=300, **asked)
        (request,) = w.runner.seen
        assert request.constraint is not None
        assert request.constraint.triggers == ()
        assert not answer or ends_well(request, answer)
        assert (None if request.thinking is None else request.thinking.opened) is opened


@in_loop
async def test_a_text_prompt_is_constrained_too() -> None:
    async with worker(text=THINKING) as w:
        await w.vllm.answer(prompt="hello<think>", regex="a+")
        (request,) = w.runner.seen
        assert request.prompt == (*b"hello", OPEN)
        assert request.constraint is not None
        assert request.thinking is not None


@pytest.mark.parametrize(
    ("asked", "says_"),
    [
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": '{"properties": {"a": {"type": "integr"}}}'}, "json_schema.properties.a.type must be one of"),
        ({"json_schema": '{"$ref": "http://x/y"}'}, "json_schema.$ref"),
        ({"json_schema": '{"$ref": "#"}'}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"regex": "["}, "regex"),
        ({"regex": ""}, "regex must be text of at least one character"),
        ({"regex": "(((a{1000}){1000}){1000})"}, "regex repeats a part over"),
        ({"grammar": "start: missing"}, "grammar"),
        ({"grammar": "x" * 1_000_000}, "grammar is longer than"),
        ({"choice": {"choices": []}}, "choice must be a list of at least one string"),
        ({"choice": {}}, "choice must be a list of at least one string"),
        ({"choice": {"choices": ["a", ""]}}, "choice[1]"),
        ({"structural_tag": '{"format": {"type": "x"}}'}, "structural_tag.format.type is 'x'"),
    ],
)
@in_loop
async def test_a_constraint_that_cannot_be_served_is_refused_with_its_place(asked: dict[str, Any], says_: str) -> None:
    """F8: in a second, and nobody else notices."""
    async with worker(forever, text=THINKING) as w:
        healthy = w.vllm.generate("healthy", max_tokens=200)
        began = time.monotonic()
        error = await refused(w.vllm.generate(**asked))
        assert time.monotonic() - began < 20.0  # a tenth of one on a machine of its own
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(says_)
        tokens = [token async for message in healthy for token in message.chunk.token_ids]
        assert bytes(tokens) == b"x" * 200
        await until(w.idle)

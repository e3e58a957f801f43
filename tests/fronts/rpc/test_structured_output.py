"""Structured output on the vllm wire: what its fields ask for reaches the engine as a constraint, or is refused with
the place at fault."""

from __future__ import annotations

import json
import time
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
from treadle.core.messages import Constraint

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
        assert time.monotonic() - began < 1.0
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(says_)
        tokens = [token async for message in healthy for token in message.chunk.token_ids]
        assert bytes(tokens) == b"x" * 200
        await until(w.idle)

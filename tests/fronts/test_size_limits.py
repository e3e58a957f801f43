from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.bytes_text import bytes_text
from treadle.errors import InvalidRequest
from treadle.fronts.size_limits import LEAST_BODY_BYTES, MOST_BODY_BYTES, body_bytes
from treadle.fronts.strict_json import INLINE_BYTES, INLINE_VALUES, MAX_DEPTH, is_small, parse_json


def test_every_prompt_that_fits_the_context_fits_the_body() -> None:
    """Also one of the longest tokens, each byte of it escaped."""
    model = bytes_text()
    for context in (1000, 200_000, 1_000_000):
        longest = json.dumps({"prompt": "\x01" * (context * model.longest_token)})
        assert len(longest) <= body_bytes(model, context) or body_bytes(model, context) == MOST_BODY_BYTES
    assert body_bytes(model, 1) == LEAST_BODY_BYTES


@pytest.mark.parametrize(
    ("body", "small"),
    [
        (b'{"prompt":"' + b"x" * 1000 + b'"}', True),
        (b'{"prompt":"' + b"x" * INLINE_BYTES + b'"}', False),
        (b'{"prompt":[' + b"1," * INLINE_VALUES + b"1]}", False),
        (b'{"prompt":' + b"[" * (INLINE_VALUES + 1) + b"}", False),
    ],
)
def test_only_what_is_quickly_read_is_read_by_the_event_loop(body: bytes, small: bool) -> None:
    assert is_small(body) is small


@pytest.mark.parametrize(
    ("body", "what"), [(b"[" * 600_000, "arrays and objects"), (b"{" * 600_000, "arrays"), (b"," * 5_000_000, "values")]
)
def test_what_no_request_holds_is_counted_before_it_is_parsed(body: bytes, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        parse_json(body)


def nested(kind: str, depth: int) -> str:
    return "[" * depth + "]" * depth if kind == "[]" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("kind", ["[]", "{}"])
def test_a_body_is_nested_as_deep_as_can_be_written_again(kind: str) -> None:
    """The body's own object is one level."""
    parse_json(f'{{"x":{nested(kind, MAX_DEPTH - 1)}}}'.encode())
    for depth in (MAX_DEPTH, MAX_DEPTH + 400, 100_000):
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            parse_json(f'{{"y":[{{}}],"x":{nested(kind, depth)}}}'.encode())


def test_brackets_in_texts_and_side_by_side_are_not_nested() -> None:
    body: dict[str, Any] = {"a": "[{" * 5000, "b": [[{"c": []}]] * 5000, '"[': '\\"]"' * 1000}
    assert parse_json(json.dumps(body).encode()) == body

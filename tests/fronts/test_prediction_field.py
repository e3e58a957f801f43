"""OpenAI's `prediction`: its shapes, and refusals with the place."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.errors import InvalidRequest
from treadle.fronts.prediction_field import read_prediction


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("content", "expected"),
    [("def f():", "def f():"), ([text("a"), text("b")], "ab"), ("", ""), ([], ""), ([text("")], "")],
)
def test_a_prediction_is_text_or_parts_of_text(content: Any, expected: str) -> None:
    assert read_prediction({"type": "content", "content": content}) == expected


def test_null_is_no_prediction() -> None:
    assert read_prediction(None) is None


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ("text", "prediction", 'is a string: it must be an object, {"type": "content", "content": "..."}'),
        ([], "prediction", "is an array"),
        ({"content": "x"}, "prediction.type", "is missing: give 'content'"),
        ({"type": "tokens", "content": "x"}, "prediction.type", "'tokens': it must be one of content"),
        ({"type": 5, "content": "x"}, "prediction.type", "is a number"),
        ({"type": "content"}, "prediction.content", "is null: it must be a string or an array of text parts"),
        ({"type": "content", "content": 5}, "prediction.content", "is a number"),
        ({"type": "content", "content": "x", "weight": 2}, "prediction", "prediction.weight is unknown"),
        ({"type": "content", "content": ["x"]}, "prediction.content[0]", "is a string: it must be an object"),
        ({"type": "content", "content": [{"text": "x"}]}, "prediction.content[0].type", "is missing"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text", "is missing"),
        ({"type": "content", "content": [text(5)]}, "prediction.content[0].text", "is a number: it must be a string"),
        (
            {"type": "content", "content": [text("x"), {"type": "image_url", "text": "x"}]},
            "prediction.content[1].type",
            "'image_url': it must be one of text",
        ),
    ],
)
def test_another_shape_is_refused_with_its_place(value: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_prediction(value)
    assert caught.value.param == param
    assert says in caught.value.message

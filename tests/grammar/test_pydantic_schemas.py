"""Pydantic's schemas as grammars: what its types emit is accepted, and what a grammar writes validates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import AnyUrl, BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

from tests.support.grammar_walks import accepts, random_text
from treadle.errors import InvalidRequest
from treadle.grammar.build import build
from treadle.grammar.pydantic_schemas import schema_of


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, Field(min_length=1, max_length=20)]


class Tree(BaseModel):
    value: float
    children: list[Tree] = []


class Everything(BaseModel):
    identity: UUID
    color: Color
    level: Level
    day: date
    moment: datetime
    clock: time
    span: timedelta
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    tree: Tree | None
    pair: tuple[int, str]
    scores: dict[str, int]
    by_level: dict[Literal["a", "b"], bool]
    home: IPv4Address | IPv6Address
    site: AnyUrl
    code: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    anything: Any
    note: str | None = None


@dataclass
class Point:
    x: int
    y: int


class Options(TypedDict):
    verbose: bool


@pytest.mark.parametrize("model", [Everything, Cat, Tree, Point, Options, list[Cat], Cat | Dog, int, Color], ids=str)
def test_what_a_grammar_writes_is_valid_for_pydantic(model: Any) -> None:
    adapter = TypeAdapter(model)
    grammar = build("json_schema", schema_of(model), param="schema").grammar
    for seed in range(20):
        adapter.validate_json(random_text(grammar, seed))


def test_a_value_that_pydantic_writes_is_accepted() -> None:
    tree = Tree(value=1.5, children=[Tree(value=2, children=[Tree(value=-0.25)])])
    grammar = build("json_schema", schema_of(Tree), param="schema").grammar
    assert accepts(grammar, tree.model_dump_json())
    assert accepts(grammar, tree.model_dump_json(indent=4))
    assert not accepts(grammar, json.dumps({"children": []}))


def test_an_adapter_and_its_type_have_the_same_schema() -> None:
    assert schema_of(TypeAdapter(list[Cat])) == schema_of(list[Cat])
    assert schema_of(Cat) == Cat.model_json_schema()


@pytest.mark.parametrize("model", [object(), Callable[[], int]])
def test_a_type_without_a_schema_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequest, match="Pydantic has no JSON Schema"):
        schema_of(model)

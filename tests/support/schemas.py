"""Random JSON Schemas by seed, of the kinds that clients send: nested objects, arrays, enums, unions, references,
formats, patterns, limits, and names in many scripts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

NAMES = (
    *("id", "name", "kind", "price", "count", "tags", "address", "created_at", "is_active", "notes", "x-ref", "a b"),
    *("größe", "価格", "имя", "città", "δ", "emoji_🎉", 'quo"te', "back\\slash", "$ref_like", ""),
)
WORDS = ("red", "green", "blue", "small", "large", "north", "south", "ünïcode", "日本", "on/off", "it's", 'say "hi"')
FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "json-pointer"),
    *("password", "int32"),  # annotations
)
PATTERNS = (r"^[A-Z]{2,4}-[0-9]{1,6}$", r"^\+?[0-9 ]{6,14}$", r"^#[0-9a-f]{6}$", r"[aeiou]{2}", r"^(yes|no)$")
MAX_LEVELS = 3


def schemas(count: int, seed: int = 0) -> Iterator[Schema]:
    """Yield `count` schemas. The same seed yields the same ones, and each depends on its number alone."""
    for number in range(count):
        yield schema_of(seed * 1_000_003 + number)


def schema_of(seed: int) -> Schema:
    """Return one schema. Its root is an object, as in most requests; every value it allows is finite."""
    return _Generator(random.Random(seed)).root()


class _Generator:
    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._definitions: Schema = {}

    def root(self) -> Schema:
        for name in self._draws.sample(["Item", "Pöint", "Node"], self._draws.randint(0, 2)):
            self._definitions[name] = self._recursive(name) if self._draws.random() < 0.4 else self._object(2)
        root = self._object(0)
        if self._definitions:
            root["$defs"] = self._definitions
        if self._draws.random() < 0.2:
            root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return root

    def _any(self, level: int) -> Schema:
        kinds: list[Callable[[int], Schema]] = [self._string, self._string, self._number, self._enum, self._scalar]
        if level < MAX_LEVELS:
            kinds += [self._object, self._object, self._array, self._union, self._tagged, self._map, self._tuple]
        if self._definitions:
            kinds += [self._reference]
        schema = self._draws.choice(kinds)(level)
        if "$ref" not in schema and self._draws.random() < 0.3:
            schema = {"title": self._draws.choice(WORDS), "description": "Any text.", **schema}
        return schema

    def _scalar(self, level: int) -> Schema:
        return {"type": self._draws.choice(["boolean", "null", "integer", "number", "string"])}

    def _object(self, level: int) -> Schema:
        names = self._draws.sample(NAMES, self._draws.randint(1, 6 - level))
        schema: Schema = {"type": "object", "properties": {name: self._any(level + 1) for name in names}}
        required = [name for name in names if self._draws.random() < 0.7]
        if required:
            schema["required"] = self._draws.sample(required, len(required))
        if self._draws.random() < 0.6:
            schema["additionalProperties"] = False
        return schema

    def _recursive(self, name: str) -> Schema:
        again = {"$ref": f"#/$defs/{name}"}
        children = self._draws.choice([{"anyOf": [again, {"type": "null"}]}, {"type": "array", "items": again}])
        return {
            "type": "object",
            "properties": {"value": self._scalar(0), "next": children},
            "required": ["value"],
            "additionalProperties": False,
        }

    def _array(self, level: int) -> Schema:
        schema: Schema = {"type": "array", "items": self._any(level + 1)}
        if self._draws.random() < 0.5:
            schema["minItems"] = self._draws.randint(0, 2)
        if self._draws.random() < 0.7:
            schema["maxItems"] = schema.get("minItems", 0) + self._draws.randint(1, 4)
        return schema

    def _tuple(self, level: int) -> Schema:
        parts = [self._any(level + 1) for _ in range(self._draws.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _map(self, level: int) -> Schema:
        if self._draws.random() < 0.5:
            return {"type": "object", "additionalProperties": self._any(level + 1)}
        pattern = self._draws.choice([r"^[a-z]{1,8}$", r"^k_[0-9]{1,3}$"])
        return {"type": "object", "patternProperties": {pattern: self._any(level + 1)}, "additionalProperties": False}

    def _union(self, level: int) -> Schema:
        if self._draws.random() < 0.5:
            return {"anyOf": [self._any(level + 1), {"type": "null"}]}
        return {"anyOf": [self._any(level + 1) for _ in range(self._draws.randint(2, 3))]}

    def _tagged(self, level: int) -> Schema:
        branches = [self._object(level + 1) for _ in range(2)]
        for branch, tag in zip(branches, self._draws.sample(WORDS, 2), strict=True):
            branch["properties"] = {"type": {"const": tag}, **branch["properties"]}
            branch["required"] = ["type", *branch.get("required", ())]
        return {"oneOf": branches}

    def _reference(self, level: int) -> Schema:
        return {"$ref": f"#/$defs/{self._draws.choice(sorted(self._definitions))}"}

    def _enum(self, level: int) -> Schema:
        if self._draws.random() < 0.2:
            return {"const": self._draws.choice([1, True, None, "x", 2.5, "日本"])}
        values = self._draws.sample([*WORDS, 1, 2, -3, 0.5, True, None], self._draws.randint(1, 5))
        return {"enum": values}

    def _string(self, level: int) -> Schema:
        schema: Schema = {"type": self._draws.choice(["string", "string", ["string", "null"]])}
        match self._draws.randint(0, 3):
            case 0:
                schema["format"] = self._draws.choice(FORMATS)
            case 1:
                schema["pattern"] = self._draws.choice(PATTERNS)
            case 2:
                schema["minLength"] = self._draws.randint(0, 3)
                schema["maxLength"] = schema["minLength"] + self._draws.randint(0, 20)
        return schema

    def _number(self, level: int) -> Schema:
        kind = self._draws.choice(["integer", "number"])
        schema: Schema = {"type": kind}
        low = self._draws.randint(-1000, 1000) / (1 if kind == "integer" else 4)
        if self._draws.random() < 0.5:
            schema[self._draws.choice(["minimum", "exclusiveMinimum"])] = low
        if self._draws.random() < 0.5:
            schema[self._draws.choice(["maximum", "exclusiveMaximum"])] = low + self._draws.randint(100, 5000)
        if self._draws.random() < 0.2:
            schema["multipleOf"] = self._draws.choice([2, 5, 10] if kind == "integer" else [0.5, 0.25, 3])
        return schema

"""Keywords of JSON Schema, each with schemas that show how far a grammar enforces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LONGEST_HOST = ".".join(["a" * 63] * 3 + ["b" * 61])
"""A host name of 253 characters."""


@dataclass(frozen=True)
class Case:
    """A schema that is enforced: `valid` values are accepted, `invalid` ones are not. `omitted` values are valid, and
    the grammar leaves them out."""

    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...] = ()
    omitted: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A schema that is refused, at `place` below it."""

    schema: Any
    place: str


@dataclass(frozen=True)
class Ignored:
    """A schema that means the same without the keyword."""

    schema: dict[str, Any]


@dataclass(frozen=True)
class Keyword:
    """A keyword, a note on it for the documents, and its cases."""

    name: str
    note: str
    cases: tuple[Case | Refused | Ignored, ...]

    @property
    def state(self) -> str:
        if all(isinstance(case, Ignored) for case in self.cases):
            return "annotation"
        if all(isinstance(case, Refused) for case in self.cases):
            return "refused"
        whole = all(isinstance(case, Case) and not case.omitted for case in self.cases)
        return "enforced" if whole else "enforced in part"


def obj(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def defs(schema: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return {**schema, "$defs": definitions}


TEXT = {"type": "string"}
INT = {"type": "integer"}
NODE = obj({"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}, required=["next"])
CAT = obj({"kind": {"const": "cat"}, "lives": INT}, required=["kind"])
DOG = obj({"kind": {"const": "dog"}, "name": TEXT})

KEYWORDS = (
    Keyword(
        "type",
        "one type or a list of types",
        (
            Case({"type": "null"}, (None,), (0, "null")),
            Case({"type": "boolean"}, (True, False), (0, "true")),
            Case({"type": "integer"}, (0, -7, 9007199254740991), (1.5, "1")),
            Case({"type": "number"}, (0, -7, 1.25, 0.123456789), ("1",), (1e300, 0.12345678901)),
            Case({"type": "string"}, ("", "é", 'a"\\\n', "日本 🎉"), (None, 1)),
            Case({"type": "array"}, ([], [1, "a", [None]]), ({},)),
            Case({"type": "object"}, ({}, {"a": {"b": [1]}}), ([],)),
            Case({"type": ["string", "null"]}, ("a", None), (1,)),
            Case({"type": ["integer", "number"]}, (1, 1.5), ("a",)),
            Case({"type": ["object", "array", "boolean"]}, ({}, [], True), (1,)),
            Refused({"type": "int"}, ".type"),
            Refused({"type": []}, ".type"),
        ),
    ),
    Keyword(
        "true, false, {}",
        "any value; no value is refused where one is needed",
        (
            Case(True, (None, 1, "a", [1], {"a": [{}]})),
            Case({}, (None, True, 2.5, {"a": None})),
            Case(obj({"a": True, "b": False}), ({"a": 1}, {"a": [None]}, {}), ({"b": 1},)),
            Refused(False, ""),
            Refused(obj({"a": False}, required=["a"]), ""),
        ),
    ),
    Keyword(
        "enum",
        "values of any type; integers up to 2^53. Keywords beside it are applied to each value; below properties and "
        "items these can't be patterns and formats",
        (
            Case(
                {"enum": ["red", "grün", 1, None, True, 2.5]}, ("red", "grün", 1, None, True, 2.5), ("blue", 2, False)
            ),
            Case({"enum": [[1, 2], {"a": "b"}]}, ([1, 2], {"a": "b"}), ([1], {})),
            Case({"type": "string", "enum": ["a", 1]}, ("a",), (1,)),
            Case({"type": "integer", "enum": [1, 2, 2.5, True]}, (1, 2), (2.5, True)),
            Case({"enum": ["a", "abc"], "minLength": 2}, ("abc",), ("a",)),
            Case({"enum": [1, 2.5, 3, "a"], "multipleOf": 0.5, "exclusiveMinimum": 1}, (2.5, 3, "a"), (1,)),
            Case({"enum": [0, 0.75, True, 9.25], "multipleOf": 0.25, "maximum": 9}, (0, 0.75, True), (9.25,)),
            Case({"enum": ["a", "2024-02-29", 1], "format": "date"}, ("2024-02-29", 1), ("a",)),
            Case({"enum": ["ab", "b"], "pattern": "^a", "maxLength": 2}, ("ab",), ("b",)),
            Case({"enum": [[], [1], [1, "a"]], "minItems": 1, "items": INT}, ([1],), ([], [1, "a"])),
            Case({"enum": [["a"], [1, 2]], "prefixItems": [INT], "items": INT}, ([1, 2],), (["a"],)),
            Case({"enum": [{}, {"a": 1}, {"a": "x"}], "required": ["a"], "properties": {"a": INT}}, ({"a": 1},), ({},)),
            Case({"enum": [{}, {"a": 1}], "maxProperties": 0}, ({},), ({"a": 1},)),
            Case({"enum": [{"a": 1}, {"bb": 1}], "propertyNames": {"maxLength": 1}}, ({"a": 1},), ({"bb": 1},)),
            Case(
                defs(
                    {"enum": [{"a": [1]}, {"a": [None]}, {"b": 1}], "additionalProperties": {"$ref": "#/$defs/A"}},
                    A={"anyOf": [{"type": "array", "items": {"oneOf": [INT, {"minimum": 0}, TEXT]}}, {"not": False}]},
                ),
                ({"a": [1]}, {"a": [None]}, {"b": 1}),
            ),
            Case(
                {"enum": [{"a": 1}, {"a": 2}, {"a": -1}], "properties": {"a": {"oneOf": [INT, {"minimum": 2}]}}},
                ({"a": 1}, {"a": -1}),
                ({"a": 2},),
            ),
            Case(
                {"enum": [{"a": 1}, {"a": True}, {"a": [1.0]}], "additionalProperties": {"enum": [1.0, [1]]}},
                ({"a": 1}, {"a": [1]}),
                ({"a": True},),
            ),
            Case({"enum": [{"a": "x"}, {"a": "y"}], "properties": {"a": {"const": "x"}}}, ({"a": "x"},), ({"a": "y"},)),
            Case({"enum": [{"a": 1}, {"a": "y"}], "properties": {"a": {"allOf": [INT]}}}, ({"a": 1},), ({"a": "y"},)),
            Case({"enum": [{"a": 1}, {}], "properties": {"a": {"pattern": "^x"}}}, ({"a": 1}, {})),
            Refused({"enum": [1, 3], "multipleOf": 2}, ".enum"),
            Refused({"const": {"a": 1}, "required": ["b"]}, ".const"),
            Refused({"const": {"a": 1}, "properties": {"a": TEXT}}, ".const"),
            Refused({"enum": ["a"], "format": "regex"}, ".format"),
            Refused({"enum": [{"a": "x"}], "properties": {"a": {"pattern": "^x"}}}, ".properties.a.pattern"),
            Refused({"enum": [["x"]], "items": {"format": "date"}}, ".items.format"),
            Refused({"enum": [["x"]], "items": {"not": {}}}, ".items.not"),
            Refused({"enum": [["x"]], "items": {"$ref": "#/$defs/A"}}, ".items.$ref"),
            Refused(defs({"enum": [["x"]], "items": {"$ref": "#/$defs/A"}}, A={"$ref": "#/$defs/A"}), ".$defs.A"),
            Refused({"enum": [{"a": 1}], "patternProperties": {"^a": INT}}, ".patternProperties"),
            Refused({"enum": [{"a": 1}], "unevaluatedProperties": False}, ".unevaluatedProperties"),
            Refused({"enum": [[1]], "unevaluatedItems": False}, ".unevaluatedItems"),
            Refused({"enum": [2**60]}, ".enum"),
            Refused({"enum": []}, ".enum"),
            Refused({"type": "string", "enum": [1]}, ".enum"),
        ),
    ),
    Keyword(
        "const",
        "like an enum of one value",
        (
            Case({"const": "x"}, ("x",), ("y", None)),
            Case({"const": 0}, (0,), (False, 1)),
            Case({"const": {"a": [1, {"b": None}]}}, ({"a": [1, {"b": None}]},), ({"a": [1, {}]},)),
            Case({"const": 0.1, "enum": [0.1, 1]}, (0.1,), (1,)),
            Case({"const": 1, "enum": [1.0, 2]}, (1,), (2,)),
            Case({"const": 'a"b\\c\n'}, ('a"b\\c\n',), ("a",)),
        ),
    ),
    Keyword(
        "properties",
        "in the order of the schema. An object that lists properties takes no others, unless `additionalProperties` or "
        "`patternProperties` say so",
        (
            Case(
                obj({"a": INT, "b": TEXT}), ({}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}), ({"a": "x"},), ({"c": 1},)
            ),
            Case(obj({"a": INT, "b": TEXT}, required=["a", "b"]), ({"a": 1, "b": "x"},), (), ({"b": "x", "a": 1},)),
            Case(obj({"größe": INT, 'a"b': TEXT, "": TEXT}), ({"größe": 1, 'a"b': "x", "": ""},), ({"größe": "x"},)),
            Case({"properties": {"a": INT}, "required": ["a"]}, ({"a": 1},), ({}, {"a": "x"}), (5,)),
            Case(obj({}), ({},), (), ({"a": 1},)),
            Refused({"properties": []}, ".properties"),
            Refused(obj({"a": 5}), ".properties.a"),
            Refused(obj({"a b": {"not": {}}}), ".properties['a b'].not"),
        ),
    ),
    Keyword(
        "required",
        "",
        (
            Case(obj({"a": INT, "b": INT}, required=["b"]), ({"b": 1}, {"a": 1, "b": 2}), ({}, {"a": 1})),
            Case(obj({"a": INT}, required=["c"]), ({"a": 1, "c": 2}, {"c": "x"}), ({"a": 1}, {})),
            Case({"type": "object", "required": ["a"]}, ({"a": None}, {"a": 1, "z": 2}), ({}, {"z": 1})),
            Refused({"required": "a"}, ".required"),
        ),
    ),
    Keyword(
        "additionalProperties",
        "true, false or a schema. They follow the listed ones",
        (
            Case(obj({"a": INT}, additionalProperties=False), ({}, {"a": 1}), ({"b": 1},)),
            Case(obj({"a": INT}, additionalProperties=True), ({"a": 1, "b": "x"}, {"b": [1]}), ({"a": "x"},)),
            Case(
                obj({"a": INT}, additionalProperties={"type": "null"}), ({"a": 1, "b": None},), ({"b": 1}, {"a": None})
            ),
            Case({"type": "object", "additionalProperties": INT}, ({}, {"x": 1, "y": 2}), ({"x": "1"},)),
            Case(
                obj({"a": INT}, additionalProperties=INT, required=["z"]),
                ({"a": 1, "z": 2}, {"z": 2, "b": 1}),
                ({"a": 1}, {"z": "x"}),
            ),
        ),
    ),
    Keyword(
        "patternProperties",
        "patterns that exclude one another. Other names need `additionalProperties`",
        (
            Case(
                {"type": "object", "patternProperties": {"^n_": INT, "^s_": TEXT}},
                ({}, {"n_a": 1, "s_a": "x"}, {"s_a": "x", "n_b": 2}),
                ({"n_a": "x"},),
                ({"other": 1},),
            ),
            Case(
                obj({"n_a": {"const": 5}}, patternProperties={"^n_": INT}, additionalProperties=TEXT),
                ({"n_a": 5, "n_b": 1, "z": "x"},),
                ({"n_a": 1}, {"n_b": "x"}, {"z": 1}),
            ),
            Refused({"type": "object", "patternProperties": {"a": INT, "b": TEXT}}, ""),
        ),
    ),
    Keyword(
        "propertyNames",
        "an enum or a pattern, where `properties` and `patternProperties` are not given; or the type string alone",
        (
            Case(
                {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
                ({}, {"a": [1], "b": "x"}),
                ([], "a"),
            ),
            Case(
                obj({"a": INT}, propertyNames={"type": "string"}, additionalProperties=TEXT),
                ({"a": 1}, {"a": 1, "b": "x"}),
                ({"a": "x"}, {"b": 1}),
            ),
            Case(
                {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
                ({}, {"a": 1}, {"a": 1, "b": 2}),
                ({"c": 1}, {"a": "x"}),
            ),
            Case({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ({}, {"abc": [1]}), ({"A": 1}, {"": 1})),
            Case(
                {"type": "object", "propertyNames": {"enum": ["a", "bbb"], "maxLength": 2}},
                ({}, {"a": 1}),
                ({"bbb": 1},),
            ),
            Case({"type": "object", "propertyNames": {"enum": ["a"], "minLength": 2}}, ({},), ({"a": 1},)),
            Refused({"type": "object", "propertyNames": {"enum": ["a"], "pattern": "a"}}, ".propertyNames.pattern"),
            Refused({"type": "object", "propertyNames": {"pattern": "a", "const": "b"}}, ".propertyNames"),
            Refused({"type": "object", "propertyNames": {"pattern": "a", "type": "integer"}}, ".propertyNames"),
            Refused(obj({"a": INT}, propertyNames={"pattern": "^a"}), ".propertyNames"),
            Refused({"type": "object", "propertyNames": {"maxLength": 3}}, ".propertyNames"),
            Refused({"type": "object", "propertyNames": {"type": "string", "minLength": 1}}, ".propertyNames"),
            Refused({"type": "object", "propertyNames": {"type": "integer"}}, ".propertyNames"),
            Refused({"type": "object", "propertyNames": {"type": "string", "not": {"const": "a"}}}, ".propertyNames"),
        ),
    ),
    Keyword(
        "minProperties",
        "1, or one more than `required` lists where every listed property is required: other names may be the same "
        "twice",
        (
            Case({"type": "object", "minProperties": 1}, ({"a": 1}, {"a": 1, "b": 2}), ({},)),
            Case(
                obj({"a": INT}, required=["a"], minProperties=2, additionalProperties=INT),
                ({"a": 1, "b": 2},),
                ({"a": 1},),
            ),
            Refused({"type": "object", "minProperties": 2}, ".minProperties"),
            Case(obj({"a": INT, "b": INT}, minProperties=1), ({"a": 1}, {"b": 1}, {"a": 1, "b": 1}), ({},)),
            Case(obj({"a": INT, "b": INT}, required=["a"], minProperties=1), ({"a": 1},), ({},)),
            Refused(obj({"a": INT, "b": INT, "c": INT}, minProperties=2), ".minProperties"),
        ),
    ),
    Keyword(
        "maxProperties",
        "where every listed property is required, or as 0 or 1",
        (
            Case({"type": "object", "maxProperties": 1}, ({}, {"a": 1}), ({"a": 1, "b": 2},)),
            Case({"type": "object", "maxProperties": 3, "minProperties": 1}, ({"a": 1, "b": 2, "c": 3},), ({},)),
            Case(obj({"a": INT, "b": INT}, maxProperties=2), ({"a": 1, "b": 1},), ({"a": "x"},)),
            Case(obj({"a": INT, "b": INT}, maxProperties=1), ({}, {"a": 1}, {"b": 1}), ({"a": 1, "b": 1},)),
            Refused(obj({"a": INT, "b": INT, "c": INT}, maxProperties=2), ""),
        ),
    ),
    Keyword(
        "items",
        "a schema; a list of schemas, as in older drafts, counts as `prefixItems`",
        (
            Case({"type": "array", "items": INT}, ([], [1], [1, 2, 3]), (["a"], [1, "a"])),
            Case({"type": "array", "items": {"type": "array", "items": TEXT}}, ([], [[], ["a"]]), ([1], [[1]])),
            Case({"items": INT}, ([1],), (["a"],), ("text",)),
            Case({"type": "array", "items": False}, ([],), ([1],)),
            Case({"type": "array", "items": obj({"a": INT}, required=["a"])}, ([], [{"a": 1}]), ([{}],)),
        ),
    ),
    Keyword(
        "prefixItems",
        "items after them need `items`",
        (
            Case({"type": "array", "prefixItems": [INT, TEXT]}, ([], [1], [1, "a"]), (["a"],), ([1, "a", None],)),
            Case({"type": "array", "prefixItems": [INT], "items": TEXT}, ([1, "a", "b"],), ([1, 2],)),
            Case(
                {"type": "array", "prefixItems": [INT, TEXT], "items": False, "minItems": 2},
                ([1, "a"],),
                ([1], [1, "a", 2]),
            ),
            Case({"type": "array", "prefixItems": [INT], "minItems": 2}, ([1, None], [1, 2, 3]), ([1],)),
        ),
    ),
    Keyword(
        "minItems, maxItems",
        "",
        (
            Case({"type": "array", "minItems": 2}, ([1, 2], [1, 2, 3]), ([], [1])),
            Case({"type": "array", "maxItems": 2, "items": INT}, ([], [1, 2]), ([1, 2, 3],)),
            Case({"type": "array", "minItems": 1, "maxItems": 1, "items": TEXT}, (["a"],), ([], ["a", "b"])),
            Case({"type": "array", "maxItems": 0}, ([],), ([1],)),
            Case({"type": "array", "minItems": 2.0}, ([1, 2],), ([1],)),
            Refused({"type": "array", "minItems": -1}, ".minItems"),
            Refused({"type": "array", "minItems": 3, "maxItems": 2}, ""),
        ),
    ),
    Keyword(
        "minLength, maxLength",
        "in characters",
        (
            Case({"type": "string", "minLength": 2}, ("ab", "日本", 'é"'), ("", "a", "🎉")),
            Case({"type": "string", "maxLength": 2}, ("", "ab", "🎉🎉", "\n\n"), ("abc",)),
            Case({"type": "string", "minLength": 1, "maxLength": 1}, ("a", '"'), ("", "ab")),
            Case({"minLength": 2}, ("ab",), ("a",), (1, None)),
            Refused({"type": "string", "minLength": 3, "maxLength": 2}, ""),
        ),
    ),
    Keyword(
        "pattern",
        "regular expressions without back-references and most look-around. `\\d` and `\\w` are ASCII",
        (
            Case({"type": "string", "pattern": "^[a-z]+$"}, ("abc",), ("", "ABC", "a1")),
            Case({"type": "string", "pattern": "b"}, ("b", "abc"), ("", "ac")),
            Case({"type": "string", "pattern": "^\\d{3}-\\w+$"}, ("123-a_B",), ("12-a",)),
            Case({"type": "string", "pattern": '^"\\\\$'}, ('"\\',), ("a",)),
            Case({"type": "string", "pattern": "^[^@]+@[^@]+\\.[a-z]{2,}$"}, ("a@b.de",), ("a@b",)),
            Case({"type": "string", "pattern": "^a\\/b\\-c$"}, ("a/b-c",), ("ab",)),
            Case({"type": "string", "pattern": "^(?:ja|nein)$", "maxLength": 2}, ("ja",), ("nein",)),
            Case({"type": "string", "pattern": "^.{3}$"}, ("日本語",), ("日本",)),
            Case(
                {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ("1.5", "-3", ".5"), ("", "-", "+.")
            ),
            Refused({"type": "string", "pattern": "^(?!a).*$"}, ".pattern"),
            Refused({"type": "string", "pattern": "(a)\\1"}, ".pattern"),
            Refused({"type": "string", "pattern": "("}, ".pattern"),
            Refused({"type": "string", "pattern": "(a{1000}){1000}"}, ".pattern"),
            Refused({"type": "string", "pattern": 5}, ".pattern"),
        ),
    ),
    Keyword(
        "format",
        "`date`, `time`, `date-time`, `duration`, `email`, `hostname`, `ipv4`, `ipv6`, `uuid`, `uri`, `json-pointer` "
        "and `relative-json-pointer` are enforced. Other formats of the standard are refused, names outside of it are "
        "annotations",
        (
            Case({"type": "string", "format": "date"}, ("2024-02-29", "1999-12-31"), ("2023-02-29", "2024-13-01", "x")),
            Case({"type": "string", "format": "time"}, ("23:59:59Z", "00:00:00.5+02:00"), ("24:00:00Z", "12:00")),
            Case({"type": "string", "format": "date-time"}, ("2024-02-29T10:00:00Z",), ("2024-02-30T10:00:00Z", "x")),
            Case({"type": "string", "format": "duration"}, ("P1D", "PT5M", "P1Y2M3DT4H5M6S"), ("P", "1D")),
            Case({"type": "string", "format": "email"}, ("a.b+c@example.org",), ("a", "a b")),
            Case(
                {"type": "string", "format": "hostname"},
                ("example.org", "a-1.b.c.d", LONGEST_HOST),
                ("-a", "a b", f"{LONGEST_HOST}a"),
            ),
            Case({"type": "string", "format": "ipv4"}, ("192.168.0.1",), ("256.1.1.1", "1.2.3")),
            Case({"type": "string", "format": "ipv6"}, ("::1", "2001:db8::ff00:42:8329"), ("12345::", "1.2.3.4")),
            Case(
                {"type": "string", "format": "uuid"},
                ("2eb8aa08-aa98-11ea-b4aa-73b441d16380",),
                ("2eb8aa08-aa98-11ea-b4aa", "2eb8aa08aa9811eab4aa73b441d16380"),
            ),
            Case({"type": "string", "format": "uri"}, ("https://example.org/a?b=c#d", "mailto:a@b"), ("//a", "a b")),
            Case({"type": "string", "format": "json-pointer"}, ("", "/a/0/b~1c"), ("a", "/~2")),
            Case({"type": "string", "format": "date", "pattern": "^2024-"}, ("2024-01-01",), ("2023-01-01",)),
            Refused({"type": "string", "format": "uri-template"}, ".format"),
            Refused({"type": "string", "format": "idn-email"}, ".format"),
            Ignored({"type": "string", "format": "password"}),
            Ignored({"type": "integer", "format": "int32"}),
        ),
    ),
    Keyword(
        "minimum, maximum, exclusiveMinimum, exclusiveMaximum",
        "numbers lie between -2^63 and 2^63 and have at most nine digits after the point and no exponent",
        (
            Case({"type": "integer", "minimum": 3, "maximum": 12}, (3, 7, 12), (2, 13)),
            Case({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12}, (4, 11), (3, 12)),
            Case({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0.5}, (-0.5, 0, 0.25), (0.5, -0.6)),
            Case({"type": "number", "exclusiveMinimum": 0, "maximum": 0.1}, (0.1, 0.001, 1e-3), (0, -0.0, 0.2)),
            Case({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, (0.5, 0.9, 0.99), (0, 1)),
            Case({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, (1.25, 1.4), (1, 1.5)),
            Case({"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, (-1.25, -1.4), (-1, -1.5)),
            Case({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, (-0.5, -0.25), (0, -0.0)),
            Case({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.25}, (0.25,), (0,), (0.5,)),
            Case({"type": "number", "exclusiveMinimum": 123456789012.5}, (123456789013,), (123456789012.5,)),
            Case({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, (0.25, 0.5), (0, -0.0, 1)),
            Case({"type": "integer", "minimum": 1.5}, (2, 100), (1,)),
            Case({"minimum": 5}, (5, 5.5), (4,), ("text",)),
            Case({"type": "integer", "maximum": 2**63 - 1}, (2**53, 0), (2**63,)),
            Case({"type": ["integer", "null"], "minimum": 0}, (0, None), (-1,)),
            Refused({"type": "number", "minimum": 1e30}, ".minimum"),
            Refused({"type": "number", "minimum": "1"}, ".minimum"),
            Refused({"type": "integer", "minimum": 5, "maximum": 4}, ""),
        ),
    ),
    Keyword(
        "multipleOf",
        "a fraction is written with all its digits: 1.50 for a multiple of 0.25. Where schemas are intersected, only "
        "numbers with common multiples up to 65535, and other numbers may have fewer digits after the point",
        (
            Case({"type": "integer", "multipleOf": 5}, (0, 15, -10), (1, 7)),
            Case({"type": "number", "multipleOf": 0.25}, (0, 0.25, 1.75), (0.3,), (1.5,)),
            Case({"type": "number", "multipleOf": 0.5, "minimum": 1, "maximum": 2}, (1, 1.5, 2), (0.5, 2.5)),
            Case(
                {"allOf": [{"type": "number", "multipleOf": 100}], "minimum": 0, "maximum": 1000}, (0, 500), (50, 0.5)
            ),
            Case({"allOf": [{"type": "number", "multipleOf": 10}, {"type": "number"}]}, (10, -30), (5, 0.1)),
            Case({"allOf": [{"type": "integer", "multipleOf": 100}, {"minimum": 0}]}, (0, 300), (-100, 50)),
            Case(
                {"type": "number", "anyOf": [{"multipleOf": 5}, {"multipleOf": 7}, {"minimum": 99.5}]}, (10, 14), (3,)
            ),
            Case(
                defs({"$ref": "#/$defs/A", "type": "number"}, A={"minimum": 1.5, "multipleOf": 10}),
                (10, 20),
                (0, 15, 1.5),
            ),
            Case(
                obj({"ab": {"type": "number"}}, patternProperties={"^a": {"type": "number", "multipleOf": 10}}),
                ({"ab": 20}, {"ac": 20}),
                ({"ab": 5}, {"ac": 5}),
            ),
            Case(
                {"allOf": [obj({f"p{m}": {"type": "number", "multipleOf": m} for m in (7, 64, 81, 1000)}), {}]},
                ({"p7": 14, "p64": 64, "p81": -81, "p1000": 2000}, {}),
                ({"p7": 8}, {"p1000": 10}),
            ),
            Refused({"allOf": [{"type": "integer", "multipleOf": 100_000}, {"minimum": 0}]}, ".allOf[0].multipleOf"),
            Refused({"allOf": [{"multipleOf": 997}, {"minimum": 0}, {"multipleOf": 991}]}, ".allOf[2].multipleOf"),
            Refused({"allOf": [{"multipleOf": 2**index + 1} for index in range(9)]}, ".allOf[6].multipleOf"),
            Refused({"type": "number", "multipleOf": 2**33}, ".multipleOf"),
            Refused({"type": "number", "multipleOf": 0.07}, ".multipleOf"),
            Refused({"type": "number", "multipleOf": 0}, ".multipleOf"),
            Refused({"type": "number", "multipleOf": -1}, ".multipleOf"),
        ),
    ),
    Keyword(
        "anyOf",
        "",
        (
            Case({"anyOf": [INT, TEXT, False]}, (1, "a"), (None, [])),
            Case({"anyOf": [obj({"a": INT}, required=["a"]), {"type": "null"}]}, ({"a": 1}, None), ({}, 1)),
            Case({"anyOf": [{"minimum": 5}, {"type": "null"}]}, (6, None), (4,), ("text",)),
            Case(
                obj({"a": INT, "b": INT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
                ({"a": 1}, {"b": 1}, {"a": 1, "b": 2}),
                ({},),
            ),
            Case({"type": "string", "anyOf": [{"minLength": 3}, {"pattern": "^x"}]}, ("abc", "x"), ("y",)),
            Refused({"anyOf": []}, ".anyOf"),
            Refused({"anyOf": [INT, {"not": INT}]}, ".anyOf[1].not"),
        ),
    ),
    Keyword(
        "oneOf",
        "where no value can match two of its schemas: different types, different values, or objects that a listed "
        "value of one property tells apart",
        (
            Case({"oneOf": [INT, TEXT, {"type": "null"}]}, (1, "a", None), ([],)),
            Case({"oneOf": [{"const": 1, "title": "one"}, {"const": 2}]}, (1, 2), (3,)),
            Case(
                {"oneOf": [CAT, DOG]},
                ({"kind": "cat", "lives": 9}, {"kind": "dog", "name": "Rex"}),
                ({"kind": "cow"},),
                ({"name": "Rex"}, {}),
            ),
            Case(
                defs({"oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}]}, C=CAT, D=DOG),
                ({"kind": "cat"}, {"kind": "dog"}),
                (),
                ({},),
            ),
            Case({"oneOf": [CAT, {"type": "null"}]}, ({"kind": "cat"}, None), (1,)),
            Refused({"oneOf": [INT, {"type": "number"}]}, ""),
            Refused({"oneOf": [obj({"a": INT}), obj({"b": INT})]}, ""),
            Refused(obj({"x": {"oneOf": [TEXT, {"type": "string", "maxLength": 2}]}}), ".properties.x"),
        ),
    ),
    Keyword(
        "allOf",
        "the intersection. Its objects stay open: write `additionalProperties` where they end",
        (
            Case({"allOf": [TEXT, {"maxLength": 2}]}, ("ab",), ("abc", 1)),
            Case(
                {"allOf": [obj({"a": INT}, required=["a"]), obj({"b": TEXT}, required=["b"])]},
                ({"a": 1, "b": "x"},),
                ({"a": 1}, {"a": 1, "b": 2}),
            ),
            Case(
                defs({"allOf": [{"$ref": "#/$defs/B"}], "properties": {"c": INT}}, B=obj({"a": INT}, required=["a"])),
                ({"a": 1, "c": 2},),
                ({"c": 2},),
            ),
            Case({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 3}]}, (1, 3), (0, 4)),
            Case({"allOf": [obj({"a": INT})]}, ({"a": 1}, {}), ({"a": "x"},), ({"b": 1},)),
            Refused({"allOf": [INT, TEXT]}, ""),
        ),
    ),
    Keyword(
        "$ref, $defs, definitions, $anchor, $id",
        "within the schema, also recursive ones; a part whose every value would be infinitely deep is left out. "
        "Nothing is fetched",
        (
            Case(defs({"$ref": "#/$defs/A"}, A=INT), (1,), ("a",)),
            Case({"$ref": "#/definitions/A", "definitions": {"A": INT}}, (1,), ("a",)),
            Case(defs({"$ref": "#/$defs/N"}, N=NODE), ({"next": None}, {"next": {"next": None}}), ({}, {"next": 1})),
            Case(obj({"kids": {"type": "array", "items": {"$ref": "#"}}}), ({}, {"kids": [{}, {"kids": []}]}), ([],)),
            Case(defs({"$ref": "#/$defs/a~1b%20c"}, **{"a/b c": INT}), (1,), ("a",)),
            Case(defs({"$ref": "#here"}, A={"$anchor": "here", **INT}), (1,), ("a",)),
            Case(defs({"$ref": "item"}, A={"$id": "item", **INT}), (1,), ("a",)),
            Case({"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/A", "$defs": {"A": INT}}, (1,), ("a",)),
            Case(defs({"$ref": "#/$defs/A", "minimum": 3}, A=INT), (3,), (2,)),
            Case(obj({"a": INT, "b": {"$ref": "#/properties/a"}}), ({"a": 1, "b": 2},), ({"b": "x"},)),
            Refused({"$ref": "https://example.org/schema.json"}, ".$ref"),
            Refused(obj({"a": {"$ref": "other.json#/a"}}), ".properties.a.$ref"),
            Refused({"$ref": "#/$defs/missing"}, ".$ref"),
            Refused({"$ref": "#"}, ""),
            Refused(defs({"$ref": "#/$defs/A"}, A={"$ref": "#/$defs/B"}, B={"$ref": "#/$defs/A"}), ""),
            Refused(obj({"again": {"$ref": "#"}}, required=["again"]), ""),
            Refused(defs(obj({"a": {"$ref": "#/$defs/A"}}), A={"not": INT}), ".$defs.A.not"),
        ),
    ),
    Keyword(
        "additionalItems",
        "beside a list of `items`, as in older drafts",
        (
            Case({"type": "array", "items": [INT], "additionalItems": TEXT}, ([1, "a"],), ([1, 2],)),
            Case({"type": "array", "items": [INT], "additionalItems": False}, ([1], []), ([1, 2],)),
        ),
    ),
    Keyword(
        "unevaluatedProperties, unevaluatedItems",
        "in a schema without `allOf`, `anyOf`, `oneOf` and `$ref`",
        (
            Case(obj({"a": INT}, unevaluatedProperties=False), ({"a": 1}, {}), ({"b": 1},)),
            Case({"type": "array", "prefixItems": [INT], "unevaluatedItems": False}, ([1],), ([1, 2],)),
            Refused(
                {"allOf": [obj({"a": INT})], **obj({"b": INT}), "unevaluatedProperties": False},
                ".unevaluatedProperties",
            ),
        ),
    ),
    Keyword(
        "uniqueItems",
        "",
        (Refused({"type": "array", "uniqueItems": True}, ".uniqueItems"),),
    ),
    Keyword("contains, minContains, maxContains", "", (Refused({"type": "array", "contains": INT}, ".contains"),)),
    Keyword("not", "", (Refused({"not": TEXT}, ".not"), Refused({"type": "string", "not": {"const": "a"}}, ".not"))),
    Keyword("if, then, else", "", (Refused({"if": TEXT, "then": {"minLength": 1}}, ".if"),)),
    Keyword("dependentRequired", "", (Refused(obj({"a": INT}, dependentRequired={"a": ["b"]}), ".dependentRequired"),)),
    Keyword("dependentSchemas", "", (Refused(obj({"a": INT}, dependentSchemas={"a": TEXT}), ".dependentSchemas"),)),
    Keyword("dependencies", "", (Refused(obj({"a": INT}, dependencies={"a": ["b"]}), ".dependencies"),)),
    Keyword("$dynamicRef, $recursiveRef", "", (Refused({"$dynamicRef": "#a"}, ".$dynamicRef"),)),
    Keyword(
        "title, description, default, examples, deprecated, readOnly, writeOnly, $comment, $schema, nullable, "
        "discriminator, contentEncoding, contentMediaType, contentSchema, and unknown keywords",
        "no effect on the answer",
        tuple(
            Ignored({"type": "string", name: value})
            for name, value in (
                *(("title", "x"), ("description", "x"), ("default", "x"), ("examples", ["x"]), ("deprecated", True)),
                *(("readOnly", True), ("$comment", "x"), ("$schema", "http://json-schema.org/draft-07/schema#")),
                *(("nullable", True), ("contentEncoding", "base64"), ("x-order", 1), ("strict", True)),
                ("x-guidance", {"whitespace_flexible": False}),
            )
        ),
    ),
)

"""JSON schemas of tools, taken apart for grammars that write no JSON: references, and alternatives as plain schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from ...errors import InvalidRequest
from ...schema_pointers import MISSING, SchemaPointers

MAX_BRANCHES = 128
"""Most plain schemas that one schema is taken apart into."""

MAX_VISITS = 5000
"""Most schemas that are looked at to take one apart: references to references multiply."""

MAX_REFERENCES = 100
"""Most references that lead to one another where only the types of values are looked up."""

MAX_VISITS_OF_ROOT = 50_000
"""Most schemas that are looked at to take apart all those of one root."""

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_BY_KEYWORD = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), ("number",)),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), ("object",)),
    **dict.fromkeys(("minProperties", "maxProperties", "propertyNames"), ("object",)),
}
_CHECKED = {"enum", "type", "minLength", "maxLength", *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}
"""Keywords by which listed values are left out."""

_LEAST = ("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum")
_MOST = ("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum")
_ASSERTIONS = {"type", "enum", "const", *_BY_KEYWORD, "uniqueItems", "additionalItems", "unevaluatedItems"}
_ASSERTIONS |= {"unevaluatedProperties"}
"""Keywords that a grammar holds values to: those of branches. All others say nothing here, or were refused before."""

_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "id", "$anchor", "$comment", *_DEFINITIONS),
)
_MAPS = ("properties", "patternProperties")
_SHAPES: dict[str, type] = {"enum": list, "required": list, **dict.fromkeys(_MAPS, Mapping)}
_TEXTS = ("enum", "const", "default", "examples", "required")


class Unheld(InvalidRequest):
    """A tool's schema has a part that a format's grammar can't hold calls to. `parameter` is the one that has it; ""
    for all. The message goes on from the name of that place."""

    def __init__(self, reason: str, parameter: str = "") -> None:
        super().__init__(reason, param="tools")
        self.parameter = parameter


class SchemaRoot:
    """Root of a tool's schema, which the references in it lead into. With `exact` a schema that can be taken apart only
    to ones that allow more is none that can be held. `tool` is the name of the tool."""

    def __init__(self, root: Mapping[str, Any], *, exact: bool = False, tool: str = "") -> None:
        self._root = root
        self.tool = tool
        self._pointers = SchemaPointers(root)
        self._visits = 0
        self._most_visits = 0
        self._known_types: dict[str, list[str] | None] = {}
        self.exact = exact

    def objects(self) -> list[dict[str, Any]]:
        """Return the plain schemas of objects that the root allows. Raises Unheld."""
        found = self.branches({**self._root, "type": "object"})
        if self.exact and (fault := next(filter(None, map(unheld_names, found)), "")):
            raise Unheld(f"has {fault}, which calls in the model's format can't be held to")
        return found

    def own(self) -> dict[str, Any]:
        """Return the root's own keywords, without what other schemas add to it."""
        return _own(self._root)

    def branches(self, schema: Any) -> list[dict[str, Any]]:
        """Return plain schemas, without references and alternatives, of which a value has to match one. They have an
        `enum` of the values that other keywords allow, or a `type`: a tuple, empty for any type. Raises Unheld."""
        if schema is True or schema == {}:
            return [{"type": ()}]
        self._most_visits = min(self._visits + MAX_VISITS, MAX_VISITS_OF_ROOT)
        found = list(filter(None, map(_settled, self._conjunctions(schema, ()))))
        if not found:
            raise Unheld("allows no value")
        return found

    def types(self, schema: Any) -> tuple[str, ...]:
        """Return JSON types among which are those of all values that a schema allows, from a look at each part of it;
        () where it does not say, or refers to nothing."""
        try:
            return tuple(self._types(schema, ()) or ())
        except RecursionError:
            return ()

    def _types(self, schema: Any, above: tuple[str, ...]) -> list[str] | None:
        """Return the types; None for any. `above` are the references that led to the schema."""
        if not isinstance(schema, Mapping):
            return None
        own = _own(schema)
        found = list(own["type"]) if own.get("type") else None
        if found is None and own.get("enum"):
            found = list(dict.fromkeys(map(type_of, own["enum"])))
        found = [name for name in found if name in TYPES] if found else None
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in above and len(above) < MAX_REFERENCES:
            found = _both_types(found, self._types_of(reference, above))
        for part in _list(schema.get("allOf")):
            found = _both_types(found, self._types(part, above))
        for parts in filter(None, (_list(schema.get(key)) for key in ("anyOf", "oneOf"))):
            each = [self._types(part, above) for part in parts]
            if all(each):
                found = _both_types(found, list(dict.fromkeys(name for types in each if types for name in types)))
        return found or list(dict.fromkeys(name for key in own for name in _BY_KEYWORD.get(key, ()))) or None

    def _types_of(self, reference: str, above: tuple[str, ...]) -> list[str] | None:
        if reference not in self._known_types:
            self._known_types[reference] = None  # where it leads back to itself
            try:
                target = self.find(reference)
            except Unheld:
                return None
            self._known_types[reference] = self._types(target, (*above, reference))
        return self._known_types[reference]

    def find(self, reference: str) -> Any:
        """Return the schema that a reference leads to. Raises Unheld where it leads to nothing."""
        pointer = self._pointers.pointer(reference)
        node = MISSING if pointer is None else self._pointers.find(pointer)
        if node is MISSING:
            raise Unheld(f"refers to {reference[:100]!r}, which is not in it")
        return node

    def alone(self, schema: Any) -> dict[str, Any]:
        """Return a schema that stands by itself, with all that it refers to. Raises Unheld."""
        names: dict[str, str] = {}
        found = _moved(schema if isinstance(schema, Mapping) else {}, names)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(names):
            reference, name = list(names.items())[len(definitions)]
            definitions[name] = _moved(self.find(reference), names)
        return {**found, "$defs": definitions} if definitions else found

    def _conjunctions(self, schema: Any, above: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the merged schemas of all ways to match one. `above` are the references that led to it."""
        self._visits += 1
        if self._visits > self._most_visits:
            raise Unheld("has too many references and alternatives: use fewer")
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            return [{}]
        found = [_own(schema)]
        for parts, once in self._parts(schema, above):
            alternatives = [self._conjunctions(part, way) for part, way in parts]
            lists = [_joined(branches) for branches in alternatives]
            added = _joined(branch for branches in lists for branch in branches)
            if len(found) * len(added) > MAX_BRANCHES:
                raise Unheld(f"has over {MAX_BRANCHES} combinations of alternatives: use fewer")
            if once and self.exact and not _are_disjoint(lists):
                raise Unheld("has oneOf with schemas that the same value may match: use anyOf")
            found = [merged for one in found for other in added if (merged := _merged(one, other)) is not None]
        return found

    def _parts(self, schema: Mapping[str, Any], above: tuple[str, ...]) -> list[tuple[list[tuple[Any, Any]], bool]]:
        """Return the lists of schemas of which each has to be matched by one, exactly one where the flag is set."""
        found: list[tuple[list[tuple[Any, Any]], bool]] = []
        if isinstance(reference := schema.get("$ref"), str):
            target = self.find(reference)
            found.append(([] if reference in above else [(target, (*above, reference))], False))
        found += [([(part, above)], False) for part in _list(schema.get("allOf"))]
        for key in ("anyOf", "oneOf"):
            if parts := _list(schema.get(key)):
                found.append(([(part, above) for part in parts], key == "oneOf"))
        return found


def types_in(branches: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the JSON types of all values that plain schemas allow; () if they do not say."""
    found: dict[str, None] = {}
    for branch in branches:
        types = map(type_of, branch["enum"]) if "enum" in branch else branch.get("type", ())
        if not (names := dict.fromkeys(types)):
            return ()
        found |= names
    return tuple(found)


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def lengths(branch: Mapping[str, Any], of: str = "Length") -> tuple[int, int | None]:
    """Return the least and the greatest length that a plain schema allows."""
    most = branch.get(f"max{of}")
    return int(branch.get(f"min{of}", 0)), None if most is None else int(most)


def _both_types(one: list[str] | None, other: list[str] | None) -> list[str] | None:
    """Return the types of values that have one of each list; the first list where none has, None for any."""
    if one is None or other is None:
        return one or other
    return list(_both("type", one, other)) or one


def _own(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a schema itself that have the right shapes."""
    found = {key: value for key, value in schema.items() if key in _ASSERTIONS and _is_kept(key, value)}
    if "type" in found:
        found["type"] = (found["type"],) if isinstance(found["type"], str) else tuple(found["type"])
    if "const" in found:
        constant = [found.pop("const")]
        found["enum"] = _common(found.get("enum", constant), constant)
    for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(exclusive), bool) and schema[exclusive] and limit in found:  # as Draft 4 has it
            found[exclusive] = found.pop(limit)
    return found


def _is_kept(key: str, value: Any) -> bool:
    if key in ("type", "required") and isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    if key == "type":
        return isinstance(value, str)
    if key in _LEAST or key in _MOST:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return isinstance(value, _SHAPES.get(key, object))


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the plain schema of what matches two; None if nothing does. Raises Unheld."""
    found = dict(one)
    for key, value in other.items():
        found[key] = _both(key, found[key], value) if key in found and found[key] != value else value
    return None if found.get("type", True) == () or found.get("enum", True) == [] else found


def _both(key: str, one: Any, other: Any) -> Any:
    if key == "type":
        pairs = ((a, b) for a in one for b in other if a == b or {a, b} == {"integer", "number"})
        return tuple(dict.fromkeys("integer" if "integer" in pair else pair[0] for pair in pairs))
    if key == "enum":
        return _common(one, other)
    if key in _LEAST:
        return max(one, other)
    if key in _MOST:
        return min(one, other)
    if key == "required":
        return list(dict.fromkeys([*one, *other]))
    if key in _MAPS:
        shared = {name: {"allOf": [one[name], other[name]]} for name in one if name in other}
        return {**one, **other, **shared}
    if key in ("items", "additionalProperties", "propertyNames"):
        return {"allOf": [one, other]}
    if key in ("pattern", "format"):  # no text is held to them
        return one
    raise Unheld(f"has more than one {key} for the same value: give one")


def _settled(branch: dict[str, Any]) -> dict[str, Any] | None:
    """Return a merged schema with its types, and of its values those that it allows; None if there are none."""
    if "enum" in branch:
        values = [value for value in branch["enum"] if _fits(value, branch)]
        return {"enum": values} if values else None
    if any(least > most for least, most in (_limits(branch, of) for of in ("Length", "Items"))):
        return None
    about = [name for key in branch for name in _BY_KEYWORD.get(key, ())]
    types = branch.get("type") or tuple(dict.fromkeys(about))
    if "object" in types and _forbids(branch, branch):
        types = tuple(name for name in types if name != "object")
        return {**branch, "type": types} if types else None
    return {**branch, "type": types}


def _limits(branch: Mapping[str, Any], of: str) -> tuple[int, int]:
    least, most = lengths(branch, of)
    return least, least if most is None else most


def _fits(value: Any, branch: Mapping[str, Any]) -> bool:
    """Whether a value has a type and a size that a schema allows."""
    name, types = type_of(value), branch.get("type", TYPES)
    if name not in types and not (
        name in ("integer", "number") and ("number" in types or ("integer" in types and float(value).is_integer()))
    ):
        return False
    if name == "string":
        least, most = lengths(branch)
        return least <= len(value) and (most is None or len(value) <= most)
    return name not in ("integer", "number") or _in_bounds(value, branch)


def _in_bounds(value: float, branch: Mapping[str, Any]) -> bool:
    return (
        value >= branch.get("minimum", value)
        and value <= branch.get("maximum", value)
        and ("exclusiveMinimum" not in branch or value > branch["exclusiveMinimum"])
        and ("exclusiveMaximum" not in branch or value < branch["exclusiveMaximum"])
    )


def _joined(branches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return plain schemas with those that only list values as one, the first of them."""
    found: list[dict[str, Any]] = []
    values: dict[str, Any] = {}
    for branch in branches:
        if "enum" not in branch or not branch.keys() <= _CHECKED:
            found.append(branch)
            continue
        if not values:
            found.append({"enum": []})
            listed = found[-1]
        values |= {_key(value): value for value in branch["enum"] if _fits(value, branch)} | values
        listed["enum"] = list(values.values())
    return [branch for branch in found if branch.get("enum", True) != []]


def _are_disjoint(groups: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether no value matches schemas of two groups, by types, listed values, or properties that tell them apart."""
    listed = [_key(value) for branches in groups for branch in branches for value in branch.get("enum", ())]
    if len({*listed}) < len(listed):
        return False
    return all(
        _differ(one, other)
        for some, others in combinations(groups, 2)
        for one in some
        for other in others
        if not ("enum" in one and "enum" in other)
    )


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if "enum" in one and "enum" in other:
        return not _common(one["enum"], other["enum"])
    for values, rest in ((one, other), (other, one)):
        if "enum" in values and "type" in rest:
            return not any(_fits(value, rest) for value in values["enum"])
    if "type" in one and "type" in other and not _both("type", one["type"], other["type"]):
        return True
    return one.get("type") == other.get("type") == ("object",) and (
        _forbids(one, other) or _forbids(other, one) or _has_tag(one, other)
    )


def _forbids(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether an object's schema requires a property that another one allows no object to have."""
    names, closed = other.get("properties", {}), other.get("additionalProperties") is False
    return any(
        names[key] is False if key in names else closed and not other.get("patternProperties")
        for key in one.get("required", ())
    )


def _has_tag(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a property that one of two schemas of objects requires lists other values in both."""
    for name in dict.fromkeys((*one.get("required", ()), *other.get("required", ()))):
        tags = [schema.get("properties", {}).get(name) for schema in (one, other)]
        first, second = (_own(tag) if isinstance(tag, Mapping) else {} for tag in tags)
        if "enum" in first and "enum" in second and not _common(first["enum"], second["enum"]):
            return True
    return False


def unheld_names(branch: Mapping[str, Any]) -> str:
    """Return a keyword on the number or the names of properties that no list of properties fulfils; "" without one."""
    names, required = {*branch.get("properties", ()), *branch.get("required", ())}, {*branch.get("required", ())}
    if branch.get("minProperties", 0) > (len(required) if names else 1):
        return "minProperties"
    if names and "maxProperties" in branch and branch["maxProperties"] < len(names):
        return "maxProperties"
    return next((key for key in ("patternProperties", "propertyNames") if branch.get(key, True) not in (True, {})), "")


def _common(values: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    keys = set(map(_key, others))
    return [value for value in values if _key(value) in keys]


def _key(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _moved(schema: Any, names: dict[str, str]) -> Any:
    """Return a schema with its references as ones to `$defs`, by `names`, to which new ones are added."""
    if isinstance(schema, list | tuple):
        return [_moved(part, names) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key == "$ref" and isinstance(value, str):
            found[key] = f"#/$defs/{names.setdefault(value, f'r{len(names)}')}"
        elif key in _TEXTS:
            found[key] = value
        elif key in _MAPS and isinstance(value, Mapping):
            found[key] = {name: _moved(part, names) for name, part in value.items()}
        else:
            found[key] = _moved(value, names)
    return found

"""Rewriting of JSON Schemas for llguidance: each keyword is enforced as written, or refused by its place.

The result describes a part of what the schema allows, so every answer is valid:

- Objects that list properties take no others, unless `additionalProperties` or `patternProperties` say so.
- Numbers have bounded digits and no exponent.
- Schemas without a type get those that their keywords are about.

Schemas that are intersected with others (below allOf, or beside anyOf and $ref) keep their objects open: closing one
would forbid the properties of the other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidRequest, one_line
from . import assertions, keywords
from .instances import Instances
from .keywords import APPLICATORS, ASSERTIONS, OF_NUMBERS, VALUES
from .multiples import Multiples
from .numbers import LARGEST, STEP, bounded
from .patterns import check_pattern
from .places import Node, below, refusal
from .references import References
from .unions import are_disjoint, branch_tag

MAX_BYTES = 256 * 1024
MAX_SCHEMAS = 2000
MAX_VALUES = 50_000
MAX_DEPTH = 64
MAX_OPTIONAL = 500
"""Limits of one schema: its text, the schemas in it, all its JSON values, the levels of schemas, and the optional
properties of an object: the parser follows each of them in every token that may begin a name."""

WHITESPACE = r"( |\r?\n[ \t]{0,40})"
"""Whitespace between JSON tokens: one space, or one line break with the next line's indent."""

_OPEN = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
_LEAF = frozenset({"type", "pattern", "format", "minLength", "maxLength", *OF_NUMBERS})
ANY = "any"
_ANY_REF = {"$ref": f"#/$defs/{ANY}"}

Schema = dict[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema for llguidance with all its definitions, and the places that its parts came from."""

    schema: dict[str, Any]
    places: dict[int, str]

    def text(self) -> str:
        """Return the schema as JSON, with the options of llguidance in it."""
        return json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **self.schema})


def rewrite(schema: Any, *, param: str) -> Rewritten:
    """Rewrite a JSON Schema. Raises InvalidRequest, whose `param` is the place at fault below `param`."""
    measure(schema, param)
    rewriter = _Rewriter(schema, param, STEP)
    rewritten = rewriter.rewritten()
    step = rewriter.multiples.step()
    return rewritten if step == STEP else _Rewriter(schema, param, step).rewritten()


def measure(schema: Any, param: str) -> None:
    """Raise InvalidRequest for a schema that is too large or nested too deeply to be read."""
    keywords.of_schema(schema, param)
    level, depth, values = [schema], 0, 0
    while level:
        values += len(level)
        depth += 1
        if values > MAX_VALUES:
            raise refusal(param, f"has over {MAX_VALUES} values: use a smaller schema")
        if depth > 4 * MAX_DEPTH:
            raise refusal(param, f"is nested deeper than {4 * MAX_DEPTH} levels: flatten it")
        level = [child for node in level for child in _children(node)]
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (ValueError, TypeError) as error:
        raise refusal(param, f"can't be written as JSON: {one_line(error)}") from error
    if size > MAX_BYTES:
        raise refusal(param, f"is longer than {MAX_BYTES} bytes: use a smaller schema")


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


_Definition = tuple[str, bool, bool, bool, str]


class _Rewriter:
    """Rewriter of one schema. Numbers that may be intersected, and have no `multipleOf`, are multiples of `step`."""

    def __init__(self, root: Any, place: str, step: float) -> None:
        self.multiples = Multiples()
        self._definitions: dict[str, Any] = {}
        self._places: dict[int, str] = {}
        self._refs = References(root, place)
        self._instances = Instances(self._refs, assertions.modern)
        self._root = root
        self._root_place = place
        self._step = step
        self._names: dict[_Definition, str] = {}
        self._queue: deque[_Definition] = deque()
        self._leaves: dict[str, str] = {}
        self._schemas = 0

    def rewritten(self) -> Rewritten:
        """Rewrite the schema, the definitions that it refers to, and those that these refer to."""
        root = self.schema(self._root, Node(self._root_place))
        if isinstance(root, bool):
            raise refusal(self._root_place, "allows no value at all")
        while self._queue:
            pointer, merged, met, exact, tag = key = self._queue.popleft()
            node = Node(self._refs.place(pointer), merged, met, exact)
            self._definitions[self._names[key]] = self.schema(self._refs.schema(pointer), node, tag)
        whole = dict(root)
        if self._definitions:
            whole["$defs"] = self._definitions
        return Rewritten(whole, self._places)

    def schema(self, source: Any, at: Node, tag: str = "") -> Schema:
        """Rewrite one schema. Its objects require the property `tag`, where one is given."""
        source = keywords.of_schema(source, at.place)
        self._count(at)
        if source is False:
            return False
        if source is True:
            return self._any(at)
        keywords.check(source, at.place)
        out = self._composed(assertions.modern(source), at, tag)
        self._places[id(out)] = at.place
        if at.merged:
            return out
        parts = [self._shared(part, at) for part in _apart(out)]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _count(self, at: Node) -> None:
        self._schemas += 1
        if self._schemas > MAX_SCHEMAS:
            raise refusal(self._root_place, f"has over {MAX_SCHEMAS} schemas: use a smaller one")
        if at.levels > MAX_DEPTH:
            raise refusal(at.place, f"is below over {MAX_DEPTH} other schemas: flatten it")

    def _shared(self, out: dict[str, Any], at: Node) -> dict[str, Any]:
        """Define numbers and strings with limits once: llguidance compiles each occurrence anew."""
        if not out.keys() <= _LEAF or not out.keys() - {"type"}:
            return out
        name = self._leaves.setdefault(json.dumps(out), f"l{len(self._leaves)}")
        if name not in self._definitions:
            self._definitions[name] = out
            self._places[id(out)] = at.place
        return {"$ref": f"#/$defs/{name}"}

    def _any(self, at: Node) -> dict[str, Any]:
        if at.merged:
            return {}
        self._definitions[ANY] = _any_schema(self._step)
        return dict(_ANY_REF)

    def _composed(self, source: dict[str, Any], at: Node, tag: str) -> dict[str, Any]:
        """Rewrite assertions as one group, and applicators, in their order."""
        source = self._with_type_inside(source, at)
        applied = [key for key in APPLICATORS if key in source]
        asserts = any(key in ASSERTIONS or key in ("type", *VALUES) for key in source)
        if not applied and not asserts:
            return self._any(at)
        mixed = len(applied) + asserts > 1 or len(source.get("allOf", ())) > 1
        names = self._all_names(source, at) if mixed and not at.merged else None
        at = replace(at, merged=at.merged or mixed)
        out: dict[str, Any] = {}
        for key in source:
            if key in APPLICATORS:
                self._apply(out, key, source[key], at, tag)
            elif asserts and (key in ASSERTIONS or key in ("type", *VALUES)):
                _add(out, self._assertions(source, at, tag))
                asserts = False
        if names is not None:
            _add(out, self._closing(names, at))
        return out

    def _closing(self, names: dict[str, bool], at: Node) -> dict[str, Any]:
        """Return the keywords that close an intersection of objects to these properties, or, if they are none, bound
        the values of any property. `names` tells which ones have a schema of their own."""
        anything = self._any(replace(at, merged=False))
        if not names:
            return {"allOf": [{"additionalProperties": anything}]}
        properties = {name: described or anything for name, described in names.items()}
        return {"allOf": [{"properties": properties, "additionalProperties": False}]}

    def _with_type_inside(self, source: dict[str, Any], at: Node) -> dict[str, Any]:
        """Drop a type beside one $ref, anyOf or oneOf alone, where all schemas in there name it as well."""
        if len([key for key in source if key in ("type", *VALUES, *APPLICATORS, *ASSERTIONS)]) != 2:
            return source
        branches = [source] if "$ref" in source else source.get("anyOf", source.get("oneOf", []))
        targets = [self._target(branch, at) for branch in branches if isinstance(branch, dict)]
        inside = bool(targets) and all(target.get("type") == source.get("type", 0) for target in targets)
        return {key: value for key, value in source.items() if key != "type"} if inside else source

    def _all_names(self, source: dict[str, Any], at: Node) -> dict[str, bool] | None:
        """Return the properties that a schema and all those it is intersected with name; None if one of them says which
        other ones it takes, or none is an object. They can be closed together, not each by itself."""
        names: dict[str, bool] = {}
        types: set[str] = set()
        stack, seen = [source], set[str]()
        while stack:
            part = stack.pop()
            if not _is_plain(part) or any(key in part for key in _OPEN):
                return None
            names = (
                dict.fromkeys(part.get("required", ()), False) | names | dict.fromkeys(part.get("properties", ()), True)
            )
            types |= {*keywords.types_of(part)}
            if "$ref" in part and (pointer := self._refs.pointer(part["$ref"], below(at.place, "$ref"))) not in seen:
                seen.add(pointer)
                stack.append(self._refs.schema(pointer))
            stack += [branch for key in ("allOf", "anyOf", "oneOf") for branch in part.get(key, ())]
        return names if names or "object" in types else None

    # Applicators

    def _apply(self, out: dict[str, Any], key: str, value: Any, at: Node, tag: str) -> None:
        if key == "$ref":
            out["$ref"] = self._reference(value, at, tag)
        elif key == "oneOf":
            _add(out, self._one_of(value, at))
        else:
            schemas = [self.schema(branch, at.below(key, index)) for index, branch in enumerate(value)]
            _add(out, {key: schemas})

    def _reference(self, ref: str, at: Node, tag: str) -> str:
        key = (self._refs.pointer(ref, below(at.place, "$ref")), at.merged, at.met, at.exact, tag)
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._queue.append(key)
        return f"#/$defs/{self._names[key]}"

    def _one_of(self, branches: list[Any], at: Node) -> dict[str, Any]:
        """Rewrite oneOf to anyOf where no value can match two branches: because of their types, their values, or a
        property that tells them apart. Otherwise llguidance may still prove it."""
        targets = [self._target(branch, at.below("oneOf", index)) for index, branch in enumerate(branches)]
        tag = branch_tag(targets, self._target, at)
        if tag is None and not are_disjoint(targets):
            names = None if at.merged else self._all_names({"oneOf": branches}, at)
            inner = replace(at, merged=True, exact=True)
            schemas = [self.schema(branch, inner.below("oneOf", i)) for i, branch in enumerate(branches)]
            return {"oneOf": schemas} | ({} if names is None else self._closing(names, at))
        return {"anyOf": [self.schema(branch, at.below("oneOf", i), tag or "") for i, branch in enumerate(branches)]}

    def _target(self, source: Any, at: Node) -> dict[str, Any]:
        """Return the schema that a branch is, or only refers to."""
        seen: set[str] = set()
        while isinstance(source, dict) and isinstance(source.get("$ref"), str):
            if any(key in ASSERTIONS or key in APPLICATORS[:3] or key in VALUES for key in source):
                return {}
            pointer = self._refs.pointer(source["$ref"], below(at.place, "$ref"))
            if pointer in seen:
                return {}
            seen.add(pointer)
            source = self._refs.schema(pointer)
        return source if _is_plain(source) else {}

    # Assertions

    def _assertions(self, source: dict[str, Any], at: Node, tag: str) -> dict[str, Any]:
        if any(key in source for key in VALUES):
            return assertions.values(source, at, self._instances)
        types = keywords.types_of(source)
        out: dict[str, Any] = {}
        if float(source.get("multipleOf", 0.5)).is_integer():
            types = _without_fractions(keywords.TYPES if at.merged and "type" not in source else types)
            source = {**source, "type": list(types)}
        if "type" in source or not at.merged:
            out["type"] = types[0] if len(types) == 1 else [name for name in types if name != "integer"]
            if "integer" in types and "number" not in types and len(types) > 1:
                out["type"].append("integer")
        if "object" in types:
            out |= self._object(source, at, tag)
        if "array" in types:
            out |= self._array(source, at)
        if "string" in types:
            _add(out, assertions.string(source, at.place))
        if "integer" in types or "number" in types:
            out |= self._number(source, types, at)
        return out

    def _number(self, source: dict[str, Any], types: tuple[str, ...], at: Node) -> dict[str, Any]:
        if not at.merged and not at.met:
            return bounded(source, types, at.place)
        out = bounded(source, types, at.place, self._step)
        if "multipleOf" in source:
            self.multiples.add(source["multipleOf"], at.name, at.place)
        return out

    def _object(self, source: dict[str, Any], at: Node, tag: str) -> dict[str, Any]:
        source = self._with_property_names(assertions.without_unevaluated(source, "Properties", at), at)
        out: dict[str, Any] = {}
        if "properties" in source and "patternProperties" in source:  # a name may match both
            at = replace(at, met=True)
        for key in ("properties", "patternProperties"):
            if key in source:
                out[key] = {name: self.schema(part, at.below(key, name)) for name, part in source[key].items()}
        for pattern in source.get("patternProperties", ()):
            check_pattern(pattern, below(below(at.place, "patternProperties"), pattern))
        required = list(dict.fromkeys([*source.get("required", ()), *([tag] if tag else [])]))
        if len(out.get("properties", {}).keys() - set(required)) > MAX_OPTIONAL:
            place = below(at.place, "properties")
            raise refusal(place, f"has over {MAX_OPTIONAL} optional properties: list them in required, or give fewer")
        if required:
            out["required"] = required
        out |= self._additional(source, out, at)
        return out | assertions.counts(source, out, at.place)

    def _additional(self, source: dict[str, Any], out: dict[str, Any], at: Node) -> dict[str, Any]:
        if "additionalProperties" in source:
            return {
                "additionalProperties": self.schema(source["additionalProperties"], at.below("additionalProperties"))
            }
        if at.merged:
            return {}
        if "properties" not in out and "patternProperties" not in out:
            return {"additionalProperties": self._any(at)}
        if "patternProperties" not in out:
            missing = {name: self._any(at) for name in out.get("required", ()) if name not in out["properties"]}
            out["properties"] |= missing
        return {"additionalProperties": False}

    def _with_property_names(self, source: dict[str, Any], at: Node) -> dict[str, Any]:
        """Rewrite propertyNames to properties, or to patternProperties."""
        names = source.get("propertyNames", True)
        if names is True or names == {}:
            return source
        place = below(at.place, "propertyNames")
        target = self._target(names, at.below("propertyNames"))
        rest = {key: part for key, part in source.items() if key != "propertyNames"}
        if _is_any_text(target):
            return rest
        if "properties" in source or "patternProperties" in source:
            raise refusal(place, "is not supported beside properties: describe the names with patternProperties")
        value = source.get("additionalProperties", True)
        if all(isinstance(name, str) for name in target.get("enum", [0])):
            valid = self._instances.valid(target["enum"], target, at.below("propertyNames"))
            return rest | {"properties": dict.fromkeys(valid, value), "additionalProperties": False}
        others = {*ASSERTIONS, *APPLICATORS, *VALUES} - {"pattern"}
        of_type = "type" not in target or "string" in keywords.types_of({"type": target["type"]})
        if isinstance(target.get("pattern"), str) and of_type and not {*target} & others:
            return rest | {"patternProperties": {target["pattern"]: value}, "additionalProperties": False}
        raise refusal(place, "is only supported with enum or pattern alone")

    def _array(self, source: dict[str, Any], at: Node) -> dict[str, Any]:
        source = assertions.without_unevaluated(source, "Items", at)
        out: dict[str, Any] = {key: int(source[key]) for key in ("minItems", "maxItems") if key in source}
        if "prefixItems" in source:
            parts = enumerate(source["prefixItems"])
            out["prefixItems"] = [self.schema(part, at.below("prefixItems", index)) for index, part in parts]
        if "items" in source:
            out["items"] = self.schema(source["items"], at.below("items"))
        elif not at.merged:
            closed = 0 < len(source.get("prefixItems", ())) >= out.get("minItems", 0)
            out["items"] = False if closed else self._any(at)
        return out


def _any_schema(step: float) -> dict[str, Any]:
    return {
        "anyOf": [
            {"type": "null"},
            {"type": "boolean"},
            {"type": "number", "minimum": -LARGEST, "maximum": LARGEST, "multipleOf": step},
            {"type": "string"},
            {"type": "array", "items": _ANY_REF},
            {"type": "object", "additionalProperties": _ANY_REF},
        ]
    }


def _without_fractions(types: Iterable[str]) -> tuple[str, ...]:
    """Return types with integers in place of numbers. Whole multiples are written alike as both, and llguidance fails
    on those of numbers before a special token."""
    return tuple(dict.fromkeys("integer" if name == "number" else name for name in types))


def _apart(out: dict[str, Any]) -> list[dict[str, Any]]:
    """Separate numbers from the other types of a schema, so that they can be shared."""
    types = out.get("type")
    if not isinstance(types, list) or not {*types} & {"integer", "number"} or out.keys() & {*APPLICATORS}:
        return [out]
    numeric = "number" if "number" in types else "integer"
    others = [name for name in types if name not in ("integer", "number")]
    number = {key: out[key] for key in OF_NUMBERS if key in out}
    rest = {key: value for key, value in out.items() if key not in OF_NUMBERS}
    return [{**number, "type": numeric}, *([{**rest, "type": others}] if others else [])]


def _is_any_text(target: dict[str, Any]) -> bool:
    """Whether all texts are valid, so that names may be any: Zod writes such a schema for the names of its records."""
    of_type = "string" in keywords.types_of({"type": target.get("type", [])})
    return of_type and not {*target} & {*ASSERTIONS, *APPLICATORS, *VALUES}


def _is_plain(part: Any) -> bool:
    """Whether `part` is an object whose keywords have the right shapes."""
    if not isinstance(part, dict):
        return False
    try:
        keywords.check(part, "")
    except InvalidRequest:
        return False
    return True


def _add(out: dict[str, Any], part: dict[str, Any]) -> None:
    """Add keywords to a schema. Its lists of allOf, and those of the others that stand there already, become one."""
    for key, value in part.items():
        if key == "allOf":
            out[key] = out.get(key, []) + value
        elif key in out:
            out["allOf"] = [*out.get("allOf", []), {key: value}]
        else:
            out[key] = value

"""Keywords of arrays and objects: those that llguidance enforces exactly, and others rewritten in terms of them.

``uniqueItems`` is enforced if items always differ or come from a small set; ``contains`` becomes one alternative for
each position; ``propertyNames`` becomes ``patternProperties`` and ``properties``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, permutations
from math import comb, perm
from typing import Any

from mmserve.constraint.compile import derivatives
from mmserve.constraint.compile.derivatives import all_but, disjoint, is_everything, matches
from mmserve.constraint.compile.expression import BadPattern
from mmserve.constraint.compile.keywords import (
    ANNOTATIONS,
    Schema,
    distinct,
    finite,
    key,
    malformed_keywords,
    modern,
    type_of,
    types_of,
)
from mmserve.constraint.compile.negation import Scope, both, complement
from mmserve.constraint.compile.overlaps import separated
from mmserve.constraint.compile.pattern import searched
from mmserve.constraint.compile.scalars import anchored
from mmserve.constraint.findings import Notes, child
from mmserve.constraint.limits import MAX_REPEAT

#: Maximum number of arrays that ``uniqueItems`` is expanded to, and of values of an item.
_MOST_ARRAYS, _MOST_VALUES = 1_000, 1_000
_DEPTH = 8  # references and alternatives followed
#: Maximum number of positions for the item of ``contains``, in an array without a smaller ``maxItems``.
_MOST_PLACES = 8
_MOST_CASES = 64  # alternatives made of optional properties
_MOST_STATES = 200  # of two patterns together
_MOST_REFERENCES = 8  # followed from ``propertyNames``


def _longest(node: dict[str, Any]) -> int | None:
    """Maximum number of items of an array of ``node``; None if its array keywords do not bound it."""
    longest: int | None = node.get("maxItems")
    if node.get("items") is False:
        longest = min(len(node.get("prefixItems", ())), longest if longest is not None else 1 << 30)
    return longest


def items_differ(node: dict[str, Any], scope: Scope) -> bool:
    """Whether the items of an array of ``node`` always differ, because of the types or values at their positions."""
    first, longest = node.get("prefixItems", []), _longest(node)
    if longest is None or longest > max(len(first), 1):
        return False
    row = [each if isinstance(each, dict) else {} for each in first[:longest]]
    found = [(values_of(each, scope), types_of(modern(each, scope.draft, ""))) for each in row]
    for (values, kinds), (other_values, other_kinds) in combinations(found, 2):
        if values is not None and other_values is not None:
            if {key(value) for value in values} & {key(value) for value in other_values}:
                return False
        elif kinds & other_kinds:
            return False
    return True


def values_of(schema: Any, scope: Scope, depth: int = _DEPTH) -> list[Any] | None:
    """All values that ``schema`` allows, with references and alternatives expanded; None if there are many, or unknown.

    May return a superset, never fewer: ``oneOf`` counts as ``anyOf`` only if no two branches share a value.
    """
    if not isinstance(schema, dict) or not depth:
        return None
    body = {name: value for name, value in modern(schema, scope.draft, "").items() if name not in ANNOTATIONS}
    if any(malformed_keywords(body, "")):
        return None
    if body.keys() == {"$ref"}:
        return values_of(scope.resolve(body["$ref"]), scope, depth - 1)
    for keyword in ("anyOf", "oneOf"):
        if body.keys() == {keyword} or (body.keys() == {keyword, "type"}):
            branches = [values_of(each, scope, depth - 1) for each in body[keyword]]
            known = [values for values in branches if values is not None]
            if len(known) < len(branches):
                return None
            found = [value for values in known for value in values]
            if keyword == "oneOf" and len(distinct(found)) < len(found):
                return None
            allowed = types_of(body)
            return [value for value in distinct(found) if type_of(value) in allowed]
    if body.keys() <= {"enum", "const", "type"} and not {"enum", "const"} <= body.keys():
        return finite(body)
    return _integers(body)


def _integers(body: dict[str, Any]) -> list[Any] | None:
    """The integers within the bounds of ``body``; None if unbounded or too many."""
    if body.get("type") != "integer" or body.keys() != {"type", "minimum", "maximum"}:
        return None
    low, high = body["minimum"], body["maximum"]
    if not all(isinstance(bound, int) and not isinstance(bound, bool) for bound in (low, high)):
        return None
    return list(range(low, high + 1)) if high - low < _MOST_VALUES else None


def item_values(node: dict[str, Any], scope: Scope) -> list[Any] | None:
    """The possible values of each item of an array of ``node``; None if they are many, or differ between items."""
    if "prefixItems" in node or "contains" in node or "items" not in node:
        return None
    return values_of(node["items"], scope)


def all_arrays(node: dict[str, Any], values: list[Any]) -> list[list[Any]] | None:
    """All arrays with distinct items from ``values`` that ``node`` allows; None if there are too many."""
    low, high = node.get("minItems", 0), min(node.get("maxItems", len(values)), len(values))
    count = 0
    for length in range(low, high + 1):
        count += perm(len(values), length)
        if count > _MOST_ARRAYS:
            return None
    return [list(chosen) for length in range(low, high + 1) for chosen in permutations(values, length)]


def contains_cases(node: Schema, scope: Scope, pointer: str, notes: Notes) -> list[Schema]:
    """``contains`` of ``node``, with its bounds, as alternatives for arrays; empty if it has no effect."""
    least, most = node.get("minContains", 1), node.get("maxContains")
    if "contains" not in node or (not least and most is None):
        return []
    if least > 1 or most not in (None, 0) or (least and most == 0):
        notes.cannot(pointer, "contains", "only one item at least, or none at all, can be enforced")
        return []
    if most == 0:
        other = complement(node["contains"], scope, child(pointer, "contains"))
        if other is None:
            notes.cannot(pointer, "maxContains", "only types, constants, bounds and required properties can be negated")
            return []
        return [{"items": other}]
    longest = node.get("maxItems")
    if longest is None or longest > _MOST_PLACES:
        notes.warn(pointer, "contains", f"is satisfied by one of the first {_MOST_PLACES} items")
        longest = _MOST_PLACES
    places = range(max(longest, 1))
    row = "prefixItems" if scope.draft >= 2020 else "items"
    anything: dict[str, Any] = {}  # draft 4 has no schema true
    return [{row: [*[anything] * place, node["contains"]], "minItems": place + 1} for place in places]


def property_names(node: Schema, pointer: str, notes: Notes, resolve: Callable[[str], Any]) -> Schema:
    """``node`` with ``propertyNames`` as ``patternProperties`` and ``properties``."""
    if "propertyNames" not in node:
        return node
    node = dict(node)
    names = _names(node.pop("propertyNames"), resolve)
    if names is True or names == {}:
        return node
    if names is False:
        return {**node, "maxProperties": 0}
    allowed = names.get("enum", [names["const"]] if "const" in names else None)
    if names.keys() in ({"enum"}, {"const"}) and isinstance(allowed, list):
        made = _only(node, [name for name in allowed if isinstance(name, str)])
        if made is not None:
            return made
    pattern = _pattern_of(names)
    if pattern is not None and (made := _matching(node, pattern)) is not None:
        return made
    if pattern is not None and _are_separable([pattern, *node.get("patternProperties", ())]):
        only = {"patternProperties": {pattern: {}}, "additionalProperties": False}
        return {**node, "allOf": [*node.get("allOf", ()), only]}
    notes.cannot(pointer, "propertyNames", "only a pattern, a length, or an enum of names, can be enforced")
    return node


def _names(names: Any, resolve: Callable[[str], Any]) -> Any:
    """``propertyNames`` without annotations and ``type: string``, with references resolved."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(names, dict):
            return names
        string = names.get("type") == "string" or (isinstance(names.get("type"), list) and "string" in names["type"])
        names = {
            name: value for name, value in names.items() if name not in ANNOTATIONS | ({"type"} if string else set())
        }
        if names.keys() != {"$ref"}:
            return names
        names = resolve(names["$ref"])
    return {"$ref": ""}


def _pattern_of(names: Schema) -> str | None:
    """An expression that is found in exactly the names that obey ``names``; None if there is none."""
    if any(malformed_keywords(names, "")):
        return None
    if names.keys() == {"pattern"}:
        pattern: str = names["pattern"]
        return pattern
    if names.keys() <= {"minLength", "maxLength"} and max(names.values()) <= MAX_REPEAT:
        return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    if names.keys() == {"not"} and isinstance(other := names["not"], dict) and other.keys() <= {"enum", "pattern"}:
        if any(malformed_keywords(other, "")) or len(other) != 1:
            return None
        if "pattern" in other:
            return _without(other["pattern"])
        return all_but(value for value in other["enum"] if isinstance(value, str))
    return None


def _without(pattern: str) -> str | None:
    """A pattern that is found in exactly the strings where ``pattern`` is not; None if there is none."""
    try:
        return derivatives.complement(searched(pattern))
    except BadPattern:
        return None


def _among(patterns: Iterable[str], pattern: str) -> bool:
    """True only if every string that contains ``pattern`` is matched by one of ``patterns``."""
    try:
        if is_everything(searched(pattern)):
            return True
        other = _without(pattern)
        return other is not None and all(disjoint(searched(each), searched(other), _MOST_STATES) for each in patterns)
    except BadPattern:
        return False


def _are_separable(patterns: Iterable[str]) -> bool:
    try:
        separated({searched(pattern): [] for pattern in patterns})
    except BadPattern:
        return False
    return True


def _matching(node: Schema, pattern: str) -> Schema | None:
    """``node`` restricted to names in which ``pattern`` is found; None if no keywords express that."""
    rest, properties = node.get("additionalProperties", True), node.get("properties", {})
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict) and patterns and not properties and all(_among([pattern], each) for each in patterns):
        return {**node, "patternProperties": {pattern: both(*patterns.values())}, "additionalProperties": False}
    try:
        expression = searched(pattern)
        kept = {name: matches(expression, name) and schema for name, schema in properties.items()}
    except BadPattern:
        return None
    made = {**node, **({"properties": kept} if kept else {}), "additionalProperties": False}
    if isinstance(patterns, dict) and _among(patterns, pattern):
        return made if rest is False or any(_among([pattern], each) for each in patterns) else None
    if patterns or not (rest is True or rest is False or not properties):
        return None  # its own schema and that of the pattern would both apply
    return made if rest is False else {**made, "patternProperties": {pattern: rest}}


def _only(node: Schema, names: list[str]) -> Schema | None:
    """``node`` restricted to the ``names``; None if its patterns cannot be parsed."""
    rest = node.get("additionalProperties", True)
    properties, patterns = node.get("properties", {}), node.get("patternProperties") or {}
    kept = {name: schema for name, schema in properties.items() if name in names}
    forbidden = {name: False for name in (*properties, *node.get("required", ())) if name not in names}
    try:
        under = {name: [each for p, each in patterns.items() if matches(searched(p), name)] for name in names}
    except (BadPattern, TypeError):
        return None
    if any(under[name] for name in kept):
        return None  # several keywords' schemas would apply
    added = {name: both(*under[name]) if under[name] else rest for name in names if name not in kept}
    made = {keyword: value for keyword, value in node.items() if keyword != "patternProperties"}
    return {**made, "properties": {**kept, **added, **forbidden}, "additionalProperties": False}


def pattern_keys(patterns: dict[str, Any], pointer: str, notes: Notes) -> dict[str, list[Any]] | None:
    """The schemas of ``patternProperties`` by expressions that match whole names, if possible without overlap; None if
    a pattern is not supported."""
    found: dict[str, list[Any]] = {}
    for pattern, schema in patterns.items():
        try:
            found.setdefault(searched(pattern), []).append(schema)
        except BadPattern as error:
            notes.cannot(pointer, "patternProperties", f"{pattern[:60]!r}: {error}")
            return None
    try:
        return {anchored(expression): schemas for expression, schemas in separated(found).items()}
    except BadPattern as error:
        notes.cannot(pointer, "patternProperties", str(error))
        return None


def property_counts(node: Schema, pointer: str, notes: Notes) -> tuple[Schema, list[Schema]]:
    """``minProperties`` and ``maxProperties`` of ``node``, as far as llguidance can enforce them, and schemas for the
    rest.

    llguidance counts members with repeated names, so it is never given a minimum of more than one unnamed member.
    """
    required = list(dict.fromkeys(node.get("required", ())))
    least, most = node.get("minProperties", 0), node.get("maxProperties")
    if most is not None:
        most = min(most, MAX_REPEAT)
    if least <= len(required):
        least = 0
    properties = [name for name, schema in node.get("properties", {}).items() if schema is not False]
    optional = [name for name in properties if name not in required]
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if closed and most is not None and most >= len({*required, *properties}):
        most = None
    if not least and most is None:
        return {}, []
    if closed:
        return {}, _cases(required, optional, least, most, pointer, notes)
    if least == len(required) + 1 and most is None and 0 < len(optional) < _MOST_CASES:
        other = {"properties": dict.fromkeys(optional, False), "required": required, "minProperties": least}
        return {}, [{"anyOf": [*({"required": [name]} for name in optional), other]}]
    if optional or least > len(required) + 1:
        keyword = "minProperties" if least else "maxProperties"
        notes.cannot(pointer, keyword, "can be enforced only where all properties are named, or none is optional")
        return {}, []
    part: Schema = {"minProperties": least} if least else {}
    return {**part, **({"maxProperties": most} if most is not None else {})}, []


def _cases(
    required: list[str], optional: list[str], least: int, most: int | None, pointer: str, notes: Notes
) -> list[Schema]:
    """Schemas that require at least ``least`` members and at most ``most``, as alternatives of optional names."""
    cases, wanted = list[Schema](), [("minProperties", least - len(required))] if least else []
    if most is not None:
        wanted.append(("maxProperties", len(optional) - (most - len(required))))
    for keyword, count in wanted:
        count = max(count, 0)
        if comb(len(optional), count) > _MOST_CASES:
            notes.cannot(pointer, keyword, f"makes more than {_MOST_CASES} cases of the optional properties")
            continue
        absent = keyword == "maxProperties"
        parts = [{"properties": dict.fromkeys(some, False)} if absent else {"required": list(some)}
                 for some in combinations(optional, count)]  # fmt: skip
        cases.append({"anyOf": [{"type": "object", **part} for part in parts] or [{"not": {}}]})
    return cases

"""The complement of a schema, if it can be written without ``not``.

Used for ``not``, the negative side of ``if``, and the exclusiveness of ``oneOf``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmserve.constraint.compile.derivatives import all_but
from mmserve.constraint.compile.derivatives import complement as without
from mmserve.constraint.compile.expression import BadPattern
from mmserve.constraint.compile.keywords import (
    ALL,
    ANNOTATIONS,
    distinct,
    finite,
    is_number,
    malformed_keywords,
    modern,
    names_of,
    type_of,
)
from mmserve.constraint.compile.pattern import searched
from mmserve.constraint.limits import MAX_INTEGER, MAX_REPEAT

_MOST_EXCLUDED = 200  # strings an automaton excludes at once
_LONGEST_EXCLUDED = 48  # characters of such a string: each nests a group
_DEPTH = 8  # references looked through


class Negation(NamedTuple):
    """``schema`` accepts nothing that the negated one accepts; if ``exact``, it accepts everything else."""

    schema: Any
    exact: bool


UNKNOWN = Negation(False, False)


@dataclass(frozen=True)
class Scope:
    """The context of negations in a document: its draft, and the resolver of its references."""

    draft: int
    resolve: Callable[[str], Any]


def complement(node: Any, scope: Scope, pointer: str, within: frozenset[str] = ALL) -> Any | None:
    """A schema valid for exactly the values that ``node`` is not valid for, or None where none is known.

    Only values of the types ``within`` (of ``types_of``) count; the result for others is arbitrary. ``pointer`` is that
    of ``node``, for refusals of malformed keywords.
    """
    found = negation(node, scope, pointer, within)
    return found.schema if found.exact else None


def negation(node: Any, scope: Scope, pointer: str, within: frozenset[str] = ALL, depth: int = _DEPTH) -> Negation:
    """The known part of the complement of ``node``, as alternatives."""
    if isinstance(node, bool):
        return Negation(not node, True)
    node = modern(node, scope.draft, pointer)
    if depth == 0 or any(malformed_keywords(node, pointer)):
        return UNKNOWN
    constraining = [(keyword, value) for keyword, value in node.items() if keyword not in ANNOTATIONS]
    parts = (_of_keyword(keyword, value, scope, pointer, within, depth) for keyword, value in constraining)
    return _joined(either, parts)


def either(*schemas: Any) -> Any:
    """``anyOf`` of ``schemas``, simplified if possible; false for none."""
    return _of_several("anyOf", schemas, True)


def both(*schemas: Any) -> Any:
    """``allOf`` of ``schemas``, simplified if possible; true for none."""
    return _of_several("allOf", schemas, False)


def _of_several(keyword: str, schemas: Sequence[Any], decides: bool) -> Any:
    if any(schema is decides for schema in schemas):
        return decides
    kept = [schema for schema in schemas if not isinstance(schema, bool)]
    return {keyword: kept} if len(kept) > 1 else kept[0] if kept else not decides


def _joined(join: Callable[..., Any], parts: Iterable[Negation]) -> Negation:
    found = list(parts)
    return Negation(join(*(part.schema for part in found)), all(part.exact for part in found))


def _of_keyword(keyword: str, value: Any, scope: Scope, pointer: str, within: frozenset[str], depth: int) -> Negation:
    def of(part: Any) -> Negation:
        return negation(part, scope, pointer, within, depth - 1)

    match keyword:
        case "type":
            return _other_types(value if isinstance(value, list) else [value], within)
        case "const":
            return _known(_other_values([value]))
        case "enum":
            return _known(_other_values(distinct(value)))
        case "required":
            return Negation(
                either(*({"type": "object", "properties": {name: False}} for name in dict.fromkeys(value))), True
            )
        case "properties":
            parts = (_other_property(name, schema, scope, pointer, depth) for name, schema in value.items())
            return _joined(either, parts)
        case "not":
            return Negation(value, True)
        case "allOf":
            return _joined(either, map(of, value))
        case "anyOf":
            return _joined(both, map(of, value))
        case "pattern":
            return _known(_other_text(value))
        case "propertyNames":
            return _known(_other_name(value, scope, pointer, depth))
        case "oneOf":
            return Negation(_joined(both, map(of, value)).schema, False)  # two of them may hold
        case "$ref":
            return of(scope.resolve(value))
    return _known(_of_bound(keyword, value))


def _known(schema: Any | None) -> Negation:
    return UNKNOWN if schema is None else Negation(schema, True)


def _other_property(name: str, schema: Any, scope: Scope, pointer: str, depth: int) -> Negation:
    """Objects in which the property ``name`` has a value that ``schema`` rejects."""
    other, exact = negation(schema, scope, pointer, ALL, depth - 1)
    if other is False:
        return Negation(False, exact)
    return Negation({"type": "object", "required": [name], "properties": {name: other}}, exact)


def _other_text(pattern: str) -> Any | None:
    """Strings in which ``pattern`` is not found."""
    try:
        other = without(searched(pattern))
    except BadPattern:
        return None
    return None if other is None else {"type": "string", "pattern": other}


def _other_name(names: Any, scope: Scope, pointer: str, depth: int) -> Any | None:
    """Objects with a member whose name is not one of ``names``, if those are all but a few."""
    other = negation(names, scope, pointer, frozenset({"string"}), depth - 1)
    barred = [] if other.schema is False else _all_values(other.schema, scope, pointer)
    if not other.exact or barred is None:
        return None
    return either(*({"type": "object", "required": [name]} for name in barred if isinstance(name, str)))


def _all_values(schema: Any, scope: Scope, pointer: str) -> list[Any] | None:
    """The values under ``schema``, if it has only ``type`` and either ``enum`` or ``const``."""
    body = modern(schema, scope.draft, pointer) if isinstance(schema, dict) else {}
    if any(malformed_keywords(body, pointer)) or body.keys() - ANNOTATIONS - {"type"} not in (
        set(),
        {"enum"},
        {"const"},
    ):
        return None
    return finite(body)


_OPPOSITE = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_SIZED = {"Length": "string", "Items": "array", "Properties": "object"}


def _of_bound(keyword: str, value: Any) -> Any | None:
    if is_number(value) and abs(value) > (MAX_INTEGER if "imum" in keyword else MAX_REPEAT - 1):
        return None  # numbers are not exact beyond such a bound, and no answer is that long
    if keyword in _OPPOSITE and is_number(value):
        return {"type": "number", _OPPOSITE[keyword]: value}
    side, kind = keyword[:3], _SIZED.get(keyword[3:])
    if side == "min" and kind:
        return {"type": kind, f"max{keyword[3:]}": value - 1} if value > 0 else False
    if side == "max" and kind and kind != "object":
        return {"type": kind, f"min{keyword[3:]}": value + 1}
    return None


def _other_types(given: list[str], within: frozenset[str]) -> Negation:
    fractions = (
        "integer" in given and "number" not in given and "number" in within
    )  # no keyword selects fractions alone
    rest = within - set(given) - ({"integer"} if "number" in given else {"number"} if fractions else set())
    return Negation({"type": names_of(rest)} if rest else False, not fractions)


def _other_values(values: list[Any]) -> Any | None:
    """Everything but ``values``; None if one is an array or object."""
    kinds = {type_of(value) for value in values}
    if kinds & {"array", "object"}:
        return None
    untouched = ALL - kinds - ({"number", "integer"} if kinds & {"number", "integer"} else set())
    parts: list[Any] = [{"type": names_of(untouched)}]
    flags = [value for value in (True, False) if not any(given is value for given in values)]
    if "boolean" in kinds and flags:
        parts.append({"enum": flags})
    numbers = sorted(value for value in values if is_number(value))
    if numbers:
        below = [{"exclusiveMaximum": number} for number in numbers]
        above = [{"exclusiveMinimum": number} for number in numbers]
        parts += [{"type": "number", **low, **high} for low, high in zip([{}, *above], [*below, {}], strict=True)]
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) > _MOST_EXCLUDED or any(len(text) > _LONGEST_EXCLUDED for text in strings):
        return None
    if strings:
        parts.append({"type": "string", "pattern": all_but(strings)})
    return either(*parts)

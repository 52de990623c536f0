"""The properties or items of a value that a schema evaluates (JSON Schema 2020-12, core 11), depending on which
subschemas hold.

Branches of ``anyOf`` and ``oneOf``, conditions and dependent schemas evaluate only if they hold. More of them holding
means that more is evaluated, so a way lists subschemas that hold, and leaves others open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import unquote

from mmserve.constraint.compile.keywords import Schema, malformed_keywords, modern, types_of
from mmserve.constraint.compile.negation import Scope, complement
from mmserve.constraint.compile.one_of import Effort, exclude, typed
from mmserve.constraint.findings import child

_DEPTH = 8  # schemas and references followed
_MOST_WAYS = 64
_MOST_BRANCHES = 40
_MOST_READ = 1_000  # schemas, each as often as it is referred to


@dataclass(frozen=True)
class Condition:
    """A schema that holds, and its pointer; ``made_for``: the keyword for which it was generated, if it is not in the
    document."""

    pointer: str
    schema: Any = field(compare=False)
    made_for: str = ""


class Token(NamedTuple):
    """The evaluated members or items: a name of ``properties``, a pattern, an index of ``prefixItems``, the items of
    ``contains``, or everything."""

    kind: str
    what: str | int = ""


EVERY = Token("every")


@dataclass(frozen=True)
class Way:
    """If all ``conditions`` hold, ``tokens`` are evaluated."""

    conditions: tuple[Condition, ...] = ()
    tokens: frozenset[Token] = frozenset()

    def joined(self, other: Way) -> Way:
        """The way with the conditions and tokens of both."""
        return Way(tuple(dict.fromkeys((*self.conditions, *other.conditions))), self.tokens | other.tokens)

    def without(self, known: frozenset[Token]) -> Way:
        """This way without tokens that are always evaluated (``known``)."""
        return Way(self.conditions, self.tokens - known)

    def subsumes(self, other: Way) -> bool:
        """Whether this way has no conditions beyond those of ``other``, and evaluates at least as much."""
        enough = EVERY in self.tokens or self.tokens >= other.tokens
        return enough and set(self.conditions) <= set(other.conditions)


class Unknown(Exception):
    """The reason why the evaluated members or items of a schema are unknown."""


@dataclass(frozen=True)
class Evaluation:
    """The ways through a schema. ``implied``: applicators that hold in every way."""

    ways: tuple[Way, ...]
    implied: frozenset[str]
    found: dict[Token, Any]  # all tokens in document order, those of ``contains`` with its schema

    def of(self, way: Way, kind: str) -> list[Token]:
        """The tokens of one kind that ``way`` evaluates, in document order."""
        return [each for each in self.found if each.kind == kind and each in way.tokens]


def evaluation(node: Schema, pointer: str, keyword: str, scope: Scope, effort: Effort) -> Evaluation:
    """The ways through ``node``, which has well-formed keywords and lacks ``keyword`` (``unevaluatedProperties`` or
    ``unevaluatedItems``). Raises ``Unknown``, and ``Refused`` if a schema in it is malformed."""
    reader = _Reader(keyword, scope, effort)
    ways, implied = reader.of(node, pointer, _DEPTH)
    return Evaluation(tuple(ways), frozenset(implied), reader.found)


class _Options(NamedTuple):
    """Ways through the subschemas of a keyword. ``chosen``: one of them always holds; ``enough``: any of them implies
    the keyword."""

    ways: list[Way]
    chosen: bool
    enough: bool


class _Reader:
    def __init__(self, keyword: str, scope: Scope, effort: Effort) -> None:
        self._keyword, self._scope, self._effort = keyword, scope, effort
        self._kind = frozenset({"object" if keyword == "unevaluatedProperties" else "array"})
        self._left = _MOST_READ
        self.found: dict[Token, Any] = {}

    def of(self, body: Schema, pointer: str, depth: int) -> tuple[list[Way], set[str]]:
        """The ways through ``body``, and the applicators that they imply."""
        if body.keys() & {"$dynamicRef", "$recursiveRef"}:
            raise Unknown("what dynamic references evaluate is not followed")
        found, implied = [Way((), self._own(body, pointer))], set[str]()
        for part, at in self._always(body, pointer):
            found = _all(found, self._ways(part, at, depth - 1))
        for keyword in ("anyOf", "oneOf", "if", "dependentSchemas"):
            known = frozenset.intersection(*(way.tokens for way in found))
            if keyword not in body or EVERY in known:
                continue
            for options in self._choices(keyword, body, pointer, known, depth - 1):
                if options.chosen and all(way.tokens for way in options.ways):
                    found = _all(found, options.ways)
                    implied |= {keyword} if options.enough else set()
                else:
                    found = _all(found, [Way(), *options.ways])
        return found, implied

    def _ways(self, schema: Any, pointer: str, depth: int) -> list[Way]:
        if isinstance(schema, bool):
            return [Way()]
        body = modern(schema, self._scope.draft, pointer)
        self._left -= 1
        if depth == 0 or self._left < 0 or any(malformed_keywords(body, pointer)):
            raise Unknown(f"only {_DEPTH} schemas within schemas, and {_MOST_READ} in all, are followed")
        return self.of(body, pointer, depth)[0]

    def _own(self, body: Schema, pointer: str) -> frozenset[Token]:
        """The tokens that the keywords of ``body`` itself evaluate."""
        own: dict[Token, Any] = {}
        if self._keyword == "unevaluatedProperties":
            if body.keys() & {"additionalProperties", "unevaluatedProperties"}:
                return frozenset({EVERY})
            own |= {Token("name", name): None for name in body.get("properties", ())}
            own |= {Token("pattern", pattern): None for pattern in body.get("patternProperties", ())}
        else:
            if body.keys() & {"items", "unevaluatedItems"}:
                return frozenset({EVERY})
            own |= {Token("place", place): None for place in range(len(body.get("prefixItems", ())))}
            if "contains" in body and self._scope.draft >= 2020:
                own[Token("matching", child(pointer, "contains"))] = body["contains"]
        self.found |= own
        return frozenset(own)

    def _always(self, body: Schema, pointer: str) -> Iterator[tuple[Any, str]]:
        """Subschemas that hold whenever ``body`` does, with their pointers."""
        for i, part in enumerate(body.get("allOf", ())):
            yield part, child(pointer, "allOf", i)
        if "$ref" in body:
            yield self._scope.resolve(body["$ref"]), unquote(body["$ref"].removeprefix("#"))

    def _choices(
        self, keyword: str, body: Schema, pointer: str, known: frozenset[Token], depth: int
    ) -> Iterator[_Options]:
        at = child(pointer, keyword)

        def through(schema: Any, place: str, *others: Condition) -> list[Way]:
            begun = Way(others if schema is True else (*others, Condition(place, schema)))
            return [begun.joined(way).without(known) for way in self._ways(schema, place, depth)]

        match keyword:
            case "anyOf" | "oneOf":
                branches = {child(at, i): branch for i, branch in enumerate(body[keyword])}
                disjoint = self._disjoint_pairs(branches, types_of(body) if keyword == "oneOf" else self._kind)
                options = {place: through(branch, place) for place, branch in branches.items()}
                if keyword == "anyOf":
                    yield _Options(_some(options, disjoint), True, True)
                else:
                    pairs = len(branches) * (len(branches) - 1) // 2
                    yield _Options([way for ways in options.values() for way in ways], True, len(disjoint) == pairs)
            case "if":
                held, others = through(body["if"], at), body.keys() & {"then", "else"}
                if not others:
                    yield _Options(held, False, False)
                    return
                other = complement(body["if"], self._scope, at, types_of(body))
                if other is None:
                    raise Unknown("the condition in 'if' cannot be negated")
                then = through(body.get("then", True), child(pointer, "then"))
                absent = through(body.get("else", True), child(pointer, "else"), Condition(at, other, "not"))
                yield _Options([*_all(held, then), *absent], True, True)
            case "dependentSchemas":
                for name, schema in body[keyword].items():
                    there = Condition(child(at, name), {"type": "object", "required": [name]}, "required")
                    yield _Options(through(schema, child(at, name), there), False, False)

    def _disjoint_pairs(self, branches: dict[str, Any], within: frozenset[str]) -> set[frozenset[str]]:
        """The pairs of ``branches`` that are disjoint for values of the types ``within``."""
        if len(branches) > _MOST_BRANCHES:
            raise Unknown(f"at most {_MOST_BRANCHES} alternatives are followed")
        of = {place: typed(branch, self._scope, within) for place, branch in branches.items()}
        pairs = combinations(of.items(), 2)
        return {frozenset({a, b}) for (a, one), (b, other) in pairs if exclude(one, other, self._scope, self._effort)}


def _all(first: Iterable[Way], second: list[Way]) -> list[Way]:
    """The combinations of one way of each."""
    return _fewest([one.joined(other) for one in first for other in second])


def _some(options: dict[str, list[Way]], disjoint: set[frozenset[str]]) -> list[Way]:
    """Ways through one or several of ``options``; pairs in ``disjoint`` never hold together."""
    found = list[Way]()
    for place, ways in options.items():
        compatible = [
            w for w in found if not any(frozenset({each.pointer, place}) in disjoint for each in w.conditions)
        ]
        found = _fewest([*found, *ways, *(one.joined(other) for one in compatible for other in ways)])
    return found


def _fewest(ways: list[Way]) -> list[Way]:
    """``ways`` without those that another way covers. Raises ``Unknown`` if there are too many."""
    found = list[Way]()
    for way in sorted(dict.fromkeys(ways), key=lambda each: len(each.conditions)):
        if not any(each.subsumes(way) for each in found):
            found.append(way)
    if len(found) > _MOST_WAYS:
        raise Unknown(f"more than {_MOST_WAYS} combinations of schemas may hold")
    return found

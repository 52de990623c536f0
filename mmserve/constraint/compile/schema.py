"""Converts a user's JSON schema to one that llguidance enforces exactly, and lists what had to be left out.

The result uses few keywords, each in a form that was found to be sound: types, bounds, anchored patterns, ordered
properties, ``anyOf``, ``allOf`` and references to its own definitions. All of the user's schema passes through here, so
neither llguidance's ``x-guidance`` options nor keywords that it ignores can widen a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mmserve.constraint.compile import containers, one_of, scalars, unordered
from mmserve.constraint.compile.decimals import with_short_decimals
from mmserve.constraint.compile.finite import with_finite_numbers, without_endless
from mmserve.constraint.compile.keywords import (
    ALL,
    IN_PLACE,
    KNOWN,
    TYPES,
    Schema,
    dialect,
    finite,
    malformed_keywords,
    modern,
    names_of,
    objects_within,
    types_of,
    writable,
)
from mmserve.constraint.compile.negation import Scope, both, complement, either
from mmserve.constraint.compile.one_of import Effort
from mmserve.constraint.compile.references import References, located, obscure
from mmserve.constraint.compile.unevaluated import Cases, without_unevaluated
from mmserve.constraint.findings import Finding, Notes, Refused, child
from mmserve.constraint.limits import MAX_REPEAT, MAX_SCHEMAS

_Makers = tuple[Callable[["_Rewriter", Schema, str], Iterator[Any]], ...]
_WHOLE = frozenset({"anyOf", "allOf", "$ref", "enum", "const", "type"})  # constrain values of every type


@dataclass(frozen=True)
class Rewritten:
    """``schema`` for llguidance; ``loose``: parts that it does not enforce, ``warnings``: parts without effect."""

    schema: Any
    loose: tuple[Finding, ...]
    warnings: tuple[Finding, ...]


def rewrite(
    root: Any, *, strict: bool = True, exponents: bool = False, unjoined: bool = False, distinct: bool = False
) -> Rewritten:
    """The schema that accepts what ``root`` (of ``read_schema``) does, or, with findings in ``loose``, a superset.

    Raises ``Refused`` for a schema that is malformed, refers outside of itself, or has no finite value. If not
    ``strict``, a subschema that would be refused becomes its type, with the reason in ``loose``; ``root`` must be valid
    under its meta-schema. ``exponents``: whether numbers without bounds may have exponents, and so be of any size.
    ``unjoined``: whether schemas should preferably not be joined with others. ``distinct``: whether arrays may have the
    keyword ``unordered.DISTINCT``, which is not a keyword of llguidance's schemas.
    """
    try:
        writer = _Rewriter(root, strict=strict, exponents=exponents, unjoined=unjoined, distinct=distinct)
    except Refused as refusal:
        if strict:
            raise
        return Rewritten(_type_alone(root), refusal.findings, ())
    return writer.all()


def _type_alone(node: Any) -> Any:
    """The schema of the values of the type of ``node``; true if it has none, or a ``$ref``, next to which some drafts
    ignore it."""
    if not isinstance(node, dict) or "type" not in node or "$ref" in node:
        return True
    given = node["type"] if isinstance(node["type"], list) else [node["type"]]
    return {"type": node["type"]} if given and all(name in TYPES for name in given) else True


class _Rewriter:
    def __init__(self, root: Any, *, strict: bool, exponents: bool, unjoined: bool, distinct: bool) -> None:
        self._root, self._draft = located(root), dialect(root)
        self._references = References(self._root, obscure(root))
        self._strict, self._exponents, self._unjoined, self._distinct = strict, exponents, unjoined, distinct
        self._notes = Notes()
        self._effort = Effort()
        self._count = 0
        self._steps: set[float] = set()  # all multipleOf so far
        # whether several schemas may apply to the same value
        self._joins = any(each.keys() & IN_PLACE for each in objects_within(self._root))

    def all(self) -> Rewritten:
        schema = self._schema(self._root, "")
        definitions: dict[str, Any] = {}
        while missing := [(to, name) for to, name in self._references.named() if name not in definitions]:
            for target, name in missing:
                definitions[name] = self._schema(self._references.at(target), target)
        schema = without_endless(schema, definitions)
        unjoined = self._unjoined or (self._distinct and unordered.distinct_within(schema))
        if not self._exponents:
            schema = with_finite_numbers(schema, self._notes, unjoined=unjoined)
        schema = with_short_decimals(schema)
        return Rewritten(schema, tuple(self._notes.loose), tuple(self._notes.warnings))

    def _schema(self, node: Any, pointer: str) -> Any:
        """``node`` for llguidance; if it would be refused and is not required to be enforced, its type alone."""
        try:
            return self._of(node, pointer)
        except Refused as refusal:
            if self._strict:
                raise
            self._notes.loose += [finding for finding in refusal.findings if finding not in self._notes.loose]
            return _type_alone(node)

    def _of(self, node: Any, pointer: str) -> Any:
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise Refused.at(pointer, "schema", f"becomes more than {MAX_SCHEMAS} subschemas: its cases multiply")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise Refused.at(pointer, "schema", "must be an object, true or false")
        node = modern(node, self._draft, pointer)
        if wrong := list(malformed_keywords(node, pointer)):
            raise Refused(*wrong)
        self._warn_of_unknown(node, pointer)
        node, cases = without_unevaluated(node, pointer, self._notes, self._scope(pointer), self._effort)
        node = containers.property_names(node, pointer, self._notes, self._scope(pointer).resolve)
        own = [part for make in self._OWN for part in make(self, node, pointer)]
        applied = [part for make in self._APPLIED for part in make(self, node, pointer)]
        applied += [self._one_case_of(each, child(pointer, each.keyword)) for each in cases]
        kinds = types_of({"type": node["type"]}) if "type" in node else ALL
        return _joined(kinds if "type" in node else None, own, applied)

    def _warn_of_unknown(self, node: Schema, pointer: str) -> None:
        for keyword in node:
            if keyword not in KNOWN:
                self._notes.warn(pointer, keyword, "is no known keyword and has no effect")
        if len(set(node.get("required", ()))) < len(node.get("required", ())):
            self._notes.warn(pointer, "required", "repeats names; each counts once")
        if self._draft == 4 and pointer and isinstance(node.get("id"), str):
            raise Refused.at(
                child(pointer, "id"), "id", "must be in a schema that a keyword has: put it into definitions"
            )
        if "$id" in node and pointer:
            raise Refused.at(
                child(pointer, "$id"), "$id", "must not begin another dialect than the root's $schema names"
            )
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in node:
                self._notes.cannot(pointer, keyword, "more than one schema may answer it, or none; use $ref")

    # Each method yields the meaning of some keywords of a node as schemas that all hold.

    def _constants(self, node: Schema, pointer: str) -> Iterator[Any]:
        for keyword in {"enum", "const"} & set(node):
            values = finite({k: v for k, v in node.items() if k in (keyword, "type")}) or []
            written = [value for value in values if writable(value)]
            if values and not written:
                raise Refused.at(child(pointer, keyword), keyword, "only control characters that no grammar can write")
            if len(written) < len(values):
                self._notes.warn(pointer, keyword, "has values with control characters, which will not come")
            yield {"enum": written} if written else False

    def _scalars(self, node: Schema, pointer: str) -> Iterator[Any]:
        yield from scalars.string_parts(node, pointer, self._notes)
        part = scalars.number_part(node, pointer, self._notes, exponents=self._exponents)
        if "multipleOf" in part:
            self._steps.add(part["multipleOf"])
            if self._joins and scalars.overflows(self._steps):
                self._notes.cannot(pointer, "multipleOf", "the common multiple with others may be too large to count")
                del part["multipleOf"]
        yield part

    def _arrays(self, node: Schema, pointer: str) -> Iterator[Any]:
        part: Schema = {name: min(node[name], MAX_REPEAT) for name in ("minItems", "maxItems") if name in node}
        if "prefixItems" in node:
            at = child(pointer, "prefixItems")
            part["prefixItems"] = [self._schema(item, child(at, i)) for i, item in enumerate(node["prefixItems"])]
        if "items" in node:
            part["items"] = self._schema(node["items"], child(pointer, "items"))
        if rows := containers.contains_cases(node, self._scope(pointer), pointer, self._notes):
            yield self._if_type("array", node, either(*(self._schema(row, child(pointer, "contains")) for row in rows)))
        if node.get("uniqueItems"):
            yield from self._unique(node, part, pointer)
        yield part

    def _unique(self, node: Schema, part: Schema, pointer: str) -> Iterator[Any]:
        """``uniqueItems``: no effect, all possible arrays, or ``part`` with distinct items."""
        scope = self._scope(pointer)
        if containers.items_differ(node, scope):
            return
        values = containers.item_values(node, scope)
        every = None if values is None else containers.all_arrays(node, values)
        if every is not None:
            yield self._if_type("array", node, {"enum": every} if every else False)
        elif self._distinct and values is not None and len(values) <= unordered.MOST and all(map(writable, values)):
            part |= {"items": {"enum": values}, unordered.DISTINCT: True}
            part["maxItems"] = min(part.get("maxItems", len(values)), len(values))
        else:
            why = f"can be enforced only where items have few values: at most {unordered.MOST}, or 1000 arrays of them"
            self._notes.cannot(pointer, "uniqueItems", why)

    def _objects(self, node: Schema, pointer: str) -> Iterator[Any]:
        part: Schema = {}
        if "properties" in node:
            at = child(pointer, "properties")
            part["properties"] = {k: self._schema(v, child(at, k)) for k, v in node["properties"].items()}
        if "patternProperties" in node:
            part.update(self._patterns(node["patternProperties"], pointer))
        if "additionalProperties" in node and ("patternProperties" in part or not node.get("patternProperties")):
            rest = self._schema(node["additionalProperties"], child(pointer, "additionalProperties"))
            part["additionalProperties"] = rest
        if node.get("required"):
            part["required"] = list(dict.fromkeys(node["required"]))
        counts, cases = containers.property_counts(node, pointer, self._notes)
        yield part | counts
        for case in cases:
            yield self._if_type("object", node, self._schema(case, pointer))

    def _patterns(self, patterns: Schema, pointer: str) -> Schema:
        found = containers.pattern_keys(patterns, pointer, self._notes)
        if found is None:
            return {}
        at = child(pointer, "patternProperties")
        return {"patternProperties": {key: self._schema(both(*each), at) for key, each in found.items()}}

    def _applicators(self, node: Schema, pointer: str) -> Iterator[Any]:
        if "$ref" in node:
            yield {"$ref": f"#/$defs/{self._references.name(node['$ref'], pointer)}"}
        for keyword, join in (("allOf", both), ("anyOf", either)):
            if keyword in node:
                yield join(*(self._schema(part, child(pointer, keyword, i)) for i, part in enumerate(node[keyword])))
        if "oneOf" in node:
            yield self._one_of(node, child(pointer, "oneOf"), pointer)
        if "not" in node:
            other = complement(node["not"], self._scope(pointer), child(pointer, "not"), types_of(node))
            if other is None:
                self._notes.cannot(
                    pointer, "not", "only types, constants, bounds and required properties can be negated"
                )
            else:
                yield self._schema(other, child(pointer, "not"))

    def _conditionals(self, node: Schema, pointer: str) -> Iterator[Any]:
        if "if" in node and ("then" in node or "else" in node):
            yield self._condition(node, pointer)
        for name, names in node.get("dependentRequired", {}).items():
            at = child(pointer, "dependentRequired", name)
            yield self._implied(name, {"required": names}, at, node)
        for name, schema in node.get("dependentSchemas", {}).items():
            yield self._implied(name, schema, child(pointer, "dependentSchemas", name), node)

    _OWN: _Makers = (_constants, _scalars, _arrays, _objects)
    _APPLIED: _Makers = (_applicators, _conditionals)

    def _condition(self, node: Schema, pointer: str) -> Any:
        held, at = node["if"], child(pointer, "if")
        other = complement(held, self._scope(at), at, types_of(node))
        if other is None:
            self._notes.cannot(pointer, "if", "only types, constants, bounds and required properties can be conditions")
            return True
        then = both(self._schema(held, at), self._schema(node.get("then", True), child(pointer, "then")))
        otherwise = both(self._schema(other, at), self._schema(node.get("else", True), child(pointer, "else")))
        return either(then, otherwise)

    def _implied(self, name: str, schema: Any, pointer: str, node: Schema) -> Any:
        there = both({"type": "object", "required": [name]}, self._schema(schema, pointer))
        absent = {"type": "object", "properties": {name: False}}
        return self._if_type("object", node, either(absent, there))

    def _one_case_of(self, cases: Cases, at: str) -> Any:
        rest, found = self._schema(cases.rest, at), []
        for case in cases.cases:
            held = [self._schema(each.schema, each.pointer) for each in case.conditions]
            closed = self._schema(case.closed, at)
            if isinstance(closed, dict) and cases.instead in closed:
                others = (self._schema(each.schema, each.pointer) for each in case.matching)
                closed = {**closed, cases.instead: either(rest, *others)}
            found.append(both(*held, closed))
        return either(*found)

    def _one_of(self, node: Schema, at: str, pointer: str) -> Any:
        branches = node["oneOf"]
        schemas = [self._schema(branch, child(at, i)) for i, branch in enumerate(branches)]
        found = one_of.separate(branches, self._scope(at), at, self._effort, types_of(node))
        if isinstance(found, one_of.Overlapping):
            i, j = found
            self._notes.cannot(pointer, "oneOf", f"branches {i} and {j} may both hold; give them different constants")
            return either(*schemas)
        if not found.exact:
            self._notes.warn(pointer, "oneOf", "has branches that overlap: of those, not every valid answer comes")
        pairs = zip(schemas, found.parts, strict=True)
        return either(*(both(schema, *(self._schema(part, at) for part in parts)) for schema, parts in pairs))

    def _scope(self, pointer: str) -> Scope:
        return Scope(self._draft, lambda reference: self._references.schema(reference, pointer))

    def _if_type(self, kind: str, node: Schema, schema: Any) -> Any:
        """``schema`` for values of type ``kind`` only, kept separate from sibling keywords."""
        others = types_of({"type": node["type"]}) - {kind} if "type" in node else ALL - {kind}
        if others:
            return either(schema, {"type": names_of(others)})
        return {"allOf": [schema]} if isinstance(schema, dict) and schema else schema


def _joined(kinds: frozenset[str] | None, own: list[Any], applied: list[Any]) -> Any:
    """One schema of its ``own`` keywords and those that are ``applied`` to the same value.

    Applied schemas stay in ``allOf``: the meaning of ``items`` and ``additionalProperties`` depends on sibling
    keywords.
    """
    if any(part is False for part in (*own, *applied)) or kinds == frozenset():
        return False
    body: Schema = {}
    rest: list[Any] = [part for part in applied if part is not True]
    for part in own:
        if part is True or part == {}:
            continue
        if not set(part) & (_WHOLE | set(body)):
            body.update(part)
        else:
            rest.append(part)
    if kinds is not None:
        named = names_of(kinds)
        body["type"] = named[0] if len(named) == 1 else named
        rest = [part if set(part) & _WHOLE else {**part, "type": body["type"]} for part in rest]
    if not rest:
        return body or True
    return both(*([body] if body else []), *rest)

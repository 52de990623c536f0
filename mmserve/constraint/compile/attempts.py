"""Grammars for one JSON schema, in the order in which they are tried: exact ones, then increasingly wide ones.

Wider ones are for schemas that the grammar engine cannot compile; each accepts a superset of the previous one. Every
keyword that ``compile.schema`` writes is a restriction, so any subschema may be replaced by a wider one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import jsonschema_rs

from mmserve.constraint.compile import unordered
from mmserve.constraint.compile.document import canonical, read
from mmserve.constraint.compile.keywords import with_children
from mmserve.constraint.compile.lengths import longest_document, shortest_document
from mmserve.constraint.compile.overlaps import separated_within
from mmserve.constraint.compile.schema import Rewritten, rewrite
from mmserve.constraint.findings import Finding, Refused
from mmserve.core.constraint import ConstraintMode, JsonSchema, SchemaOption

_DEPTHS = (8, 5, 3, 2, 1)


def widened(schema: Any) -> Iterator[tuple[Any, str]]:
    """Supersets of ``schema``, the narrowest first, each with a description of its omissions; any JSON is last."""
    single = _everywhere(schema, _first_of_all)
    yield single, "where several schemas apply together, only the first is enforced"
    plain = _everywhere(single, _without_text)
    yield plain, "nor are patterns, formats and lengths of strings"
    for depth in _DEPTHS:
        yield _cut(plain, depth), f"nor is anything more than {depth} levels deep"
    yield True, "any JSON is taken"


def _everywhere(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """``schema`` with ``change`` applied to it and to all its subschemas."""
    if not isinstance(schema, dict):
        return schema
    return with_children(change(schema), lambda inner: _everywhere(inner, change))


def _first_of_all(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with only its own keywords; if it has none, its first ``anyOf``, reference or part of ``allOf``."""
    own = {name: value for name, value in schema.items() if name not in ("allOf", "anyOf", "$ref", "$defs")}
    kept = {name: schema[name] for name in ("$defs",) if name in schema}
    if own:
        return own | kept
    for keyword in ("anyOf", "$ref"):
        if keyword in schema:
            return {keyword: schema[keyword]} | kept
    parts = [part for part in schema.get("allOf", ()) if isinstance(part, dict)]
    return (_first_of_all(max(parts, key=_specificity)) if parts else {}) | kept


def _specificity(schema: dict[str, Any]) -> int:
    """How much a schema constrains a value's structure; of several schemas the most specific is kept."""
    if schema.keys() & {"properties", "items", "enum", "prefixItems"}:
        return 2
    return int(bool(schema.keys() & {"$ref", "allOf", "anyOf", "type"}))


def _without_text(schema: dict[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in schema.items() if name not in ("pattern", "minLength", "maxLength")}
    if "patternProperties" in made:
        del made["patternProperties"]
        made.pop("additionalProperties", None)  # it would apply to other names than before
    return made


def _cut(schema: Any, depth: int) -> Any:
    """``schema`` truncated to a depth; references are not followed below it."""
    if not isinstance(schema, dict):
        return schema
    if depth == 0:
        return True
    kept = schema if depth > 1 else {name: value for name, value in schema.items() if name != unordered.DISTINCT}
    return with_children(kept, lambda inner: _cut(inner, depth - 1))  # distinct items need their values


#: White space in documents: one space after a comma or a colon, or none; unbounded white space would allow endless
#: answers. ``\\u`` escapes are excluded: with them, llguidance allows a property twice, the second time with an escaped
#: name.
JSON_LAYOUT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}


#: White space between any two tokens of a document, enough for a few levels of indentation.
_WHITE_SPACE = "[ \\t\\n\\r]{0,32}"


@dataclass(frozen=True)
class Layout:
    """The layout of documents: white space, exponents, and the order of members."""

    white_space: bool = False
    exponents: bool = False
    any_order: bool = False

    @classmethod
    def of(cls, options: Iterable[SchemaOption]) -> Layout:
        """The layout requested by ``options``."""
        asked = (SchemaOption.WHITE_SPACE, SchemaOption.EXPONENTS, SchemaOption.ANY_ORDER)
        return cls(*(option in options for option in asked))

    @property
    def engine(self) -> dict[str, Any]:
        """The layout as llguidance's ``x-guidance`` options."""
        if not self.white_space:
            return JSON_LAYOUT
        escapes = JSON_LAYOUT["json_allowed_escapes"]
        return {"whitespace_pattern": _WHITE_SPACE, "json_allowed_escapes": escapes}


_DONE = {
    ConstraintMode.VALIDATE: "is checked when the answer is complete",
    ConstraintMode.LENIENT: "is not enforced",
}


#: Keywords that cannot be enforced directly, but maybe in the canonical form. Keywords that implementations interpret
#: differently, such as references and patterns, are left out, because the canonical form would choose one
#: interpretation.
_CANONICALIZED = frozenset({"not", "oneOf", "if", "contains", "maxContains", "uniqueItems", "propertyNames"})
_CANONICALIZED |= {"minProperties", "maxProperties", "minimum", "maximum", "multipleOf"}


@dataclass(frozen=True)
class Sketch:
    """A shortest sentence as a list of words; None for a word whose text must be searched.

    ``gap``: a shortest text that is skipped between words; None if nothing is skipped.
    """

    words: tuple[str | None, ...]
    gap: str | None = None


@dataclass(frozen=True)
class Grammar:
    """``text``: the grammar for llguidance's ``LLMatcher``, with ``limits.PARSER_LIMITS``.

    ``exact`` is False if the grammar is wider than the constraint: in the mode ``validate``, finished answers are then
    validated; in ``lenient`` they are not. ``longest`` and ``shortest``: bounds of a sentence in bytes; None =
    unbounded. ``sketch``: a sentence of a context-free grammar. ``warnings`` are for the client.
    """

    text: str
    exact: bool
    warnings: tuple[str, ...]
    longest: int | None = None
    shortest: int = 0
    sketch: Sketch | None = None


def attempts(kind: JsonSchema, mode: ConstraintMode) -> Iterator[Grammar]:
    """Grammars of ``kind`` to be compiled until one succeeds; raises ``Refused`` with the first reason.

    In the mode ``strict`` all are exact. In the others, wider ones follow, the last of which always succeeds.
    """
    root, warnings = read(kind)
    for grammar in _attempts(root, mode, Layout.of(kind.options)):
        yield replace(grammar, warnings=(*warnings, *grammar.warnings))


def _attempts(root: Any, mode: ConstraintMode, layout: Layout) -> Iterator[Grammar]:
    strict = mode is ConstraintMode.STRICT
    refusal: Refused | None = None
    plain: Rewritten | None = None
    try:
        plain = _rewritten(root, layout)
        if plain.loose:
            refusal = Refused(*plain.loose)
    except Refused as refused:
        refusal = refused
    if plain is not None and not plain.loose:
        yield from _grammars(layout, plain.schema, _lines(plain.warnings))
        if (disjoint := separated_within(plain.schema)) is not None:
            yield from _grammars(layout, disjoint, _lines(plain.warnings))
    other = (
        _canonical(root, layout) if plain is not None and {f.keyword for f in plain.loose} <= _CANONICALIZED else None
    )
    if other is not None:
        yield from _grammars(layout, other.schema, _lines(other.warnings, " of the canonical form"))
    if strict:
        if refusal is not None:
            raise refusal
        return
    yield from _wider(root, mode, refusal, layout)


def widest(kind: JsonSchema, mode: ConstraintMode, failed: int) -> Iterator[Grammar]:
    """Grammars of ``kind`` after compiling others ended ``failed`` processes; only for modes that allow wider ones."""
    if failed == 1:
        yield from list(_wider(read(kind)[0], mode, None, Layout.of(kind.options)))[1:]
    else:
        yield _grammar(Layout(), True, [f": the schema cannot be compiled; all of it {_DONE[mode]}"], exact=False)


def _canonical(root: Any, layout: Layout) -> Rewritten | None:
    """The canonical form of ``root`` rewritten, if all of it can be enforced."""
    form = canonical(root)
    if form is None:
        return None
    try:
        found = _rewritten(form, layout)
    except Refused:
        return None
    return None if found.loose else found


def _wider(root: Any, mode: ConstraintMode, refusal: Refused | None, layout: Layout) -> Iterator[Grammar]:
    if refusal is not None and not well_formed(root):
        raise refusal
    done = _DONE[mode]
    loose = _rewritten(root, layout, strict=False)
    warnings = [f"{f.pointer}: {f.keyword} {done}: {f.reason}" for f in loose.loose] + _lines(loose.warnings)
    yield from _grammars(layout, loose.schema, warnings, exact=False)
    if (disjoint := separated_within(loose.schema)) is not None:
        yield from _grammars(layout, disjoint, warnings, exact=False)
    left: list[str] = []
    for schema, without in widened(loose.schema):
        left.append(without)
        warning = f": the schema is more than the grammar engine can take; the rest {done}: {', '.join(left)}"
        yield from _grammars(layout, schema, [warning, *warnings], exact=False)


def well_formed(root: Any) -> bool:
    """Whether a schema is valid under its meta-schema."""
    try:
        return jsonschema_rs.meta.is_valid(root)
    except (ValueError, jsonschema_rs.ReferencingError):
        return True  # unknown dialect


def _lines(findings: Iterable[Finding], where: str = "") -> list[str]:
    return [f"{f.pointer}{where}: {f.keyword} {f.reason}" for f in findings]


def _rewritten(root: Any, layout: Layout, *, strict: bool = True) -> Rewritten:
    """``root`` for llguidance, with arrays of distinct items if they can be written. Raises ``Refused``."""
    asked = {"strict": strict, "exponents": layout.exponents, "unjoined": layout.any_order}
    found = rewrite(root, distinct=True, **asked)
    try:
        if unordered.distinct_within(found.schema):
            unordered.written(found.schema, layout.engine, any_order=layout.any_order)
    except unordered.Inexpressible:
        return rewrite(root, **asked)
    return found


def _grammars(layout: Layout, schema: Any, warnings: list[str], *, exact: bool = True) -> Iterator[Grammar]:
    """The grammar of ``schema``; for members in any order, also a second one with members in the schema's order."""
    yield _grammar(layout, schema, warnings, exact=exact)
    if layout.any_order:
        note = ": members come in the order of the schema: the grammar engine takes no other"
        yield _grammar(replace(layout, any_order=False), schema, [*warnings, note], exact=exact)


def _grammar(layout: Layout, schema: Any, warnings: list[str], *, exact: bool = True) -> Grammar:
    documents = {**({} if schema is True else schema), "x-guidance": layout.engine}
    part: dict[str, Any] = {"json_schema": documents}
    if layout.any_order or unordered.distinct_within(schema):
        text, kept = unordered.written(schema, layout.engine, any_order=layout.any_order)
        warnings = [*warnings, *(f": members of objects {why} come in the order of the schema" for why in kept)]
        part = {"lark_grammar": text, "documents": documents}  # read by ``prefix_equivalence``
    most = inf if layout.white_space else longest_document(schema)
    return Grammar(
        json.dumps({"grammars": [part]}, ensure_ascii=False),
        exact,
        tuple(warnings),
        None if most == inf else int(most),
        shortest_document(schema),
    )

"""A constraint as the text of a grammar that llguidance compiles: everything but compiling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from typing import Any

from mmserve.constraint import exclusive, longest, shortest
from mmserve.constraint.cfg import checked_lark
from mmserve.constraint.document import read_schema
from mmserve.constraint.findings import Refused, child
from mmserve.constraint.gbnf import to_lark
from mmserve.constraint.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES
from mmserve.constraint.pattern import BadPattern, literal, whole
from mmserve.constraint.schema import rewrite
from mmserve.core.constraint import Choice, ConstraintMode, ConstraintSpec, Gbnf, JsonSchema, Lark, Regex, Template

#: How documents are spaced: one space after a comma or a colon, or none. White space without end would let an answer
#: go on forever. Escapes leave \\u out: with it, llguidance lets a named property come again under an escaped name.
JSON_LAYOUT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}


@dataclass(frozen=True)
class Grammar:
    """``text`` is what llguidance's ``LLMatcher`` takes, under ``limits.PARSER_LIMITS``.

    ``exact`` is False where finished answers must still be checked against the constraint itself: only in the modes
    ``validate`` (the engine must check) and ``lenient`` (nobody does). ``warnings`` are for the client. ``longest``:
    no sentence has more bytes; None where no bound is known. ``shortest``: none has fewer.
    """

    text: str
    exact: bool
    warnings: tuple[str, ...]
    longest: int | None = None
    shortest: int = 0


def grammar_of(spec: ConstraintSpec) -> Grammar:
    """The grammar of ``spec``. Raises ``Refused``.

    Time and memory grow with the constraint; run it where that harms nobody (``mmserve.constraint.worker``). Nothing is
    remembered of a constraint: the time that one takes would tell a tenant what another has asked for.
    """
    try:
        return _of(spec)
    finally:
        exclusive.forget()


def _of(spec: ConstraintSpec) -> Grammar:
    match spec.kind:
        case JsonSchema(text):
            return _of_schema(text, spec.mode)
        case Regex(pattern):
            expression = _read("regex", pattern)
            most, least = _bytes(longest.of_pattern(pattern)), shortest.of_pattern(pattern)
            return Grammar(_of_expression(expression), True, (), most, least)
        case Choice(options):
            expression = _alternatives(options)
            sizes = [len(option.encode()) for option in options]
            return Grammar(_of_expression(expression), True, (), max(sizes), min(sizes))
        case Lark(text):
            return Grammar(checked_lark(text), exact=True, warnings=())
        case Gbnf(text):
            return Grammar(to_lark(text), exact=True, warnings=())
        case Template():
            raise Refused.at("", "template", "is no grammar: each of its holes has one")


def kind_of(spec: ConstraintSpec) -> str:
    """The name that the API has for the kind of ``spec``."""
    names: dict[type, str] = {JsonSchema: "json_schema", Regex: "regex", Choice: "choice", Lark: "lark", Gbnf: "gbnf"}
    return names.get(type(spec.kind), "template")


def _of_schema(text: str, mode: ConstraintMode) -> Grammar:
    rewritten = rewrite(read_schema(text))
    if rewritten.loose and mode is ConstraintMode.STRICT:
        raise Refused(*rewritten.loose)
    done = "is checked when the answer is complete" if mode is ConstraintMode.VALIDATE else "is not enforced"
    warnings = [f"{f.pointer}: {f.keyword} {done}: {f.reason}" for f in rewritten.loose]
    warnings += [f"{f.pointer}: {f.keyword} {f.reason}" for f in rewritten.warnings]
    schema = {} if rewritten.schema is True else rewritten.schema
    grammar = {"grammars": [{"json_schema": {**schema, "x-guidance": JSON_LAYOUT}}]}
    most = _bytes(longest.of_schema(rewritten.schema))
    least = shortest.of_schema(rewritten.schema)
    return Grammar(json.dumps(grammar, ensure_ascii=False), not rewritten.loose, tuple(warnings), most, least)


def _bytes(bound: float) -> int | None:
    return None if bound == inf else int(bound)


def _of_expression(expression: str) -> str:
    """A grammar of one regular expression; ``/`` is written out in ``expression``, so that it ends nothing."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: TEXT\nTEXT: /{expression}/\n"}]})


def _read(keyword: str, pattern: str) -> str:
    try:
        return whole(pattern)
    except BadPattern as error:
        raise Refused.at("", keyword, str(error)) from error


def _alternatives(options: tuple[str, ...]) -> str:
    if not options:
        raise Refused.at("", "choice", "must have at least one option")
    if len(options) > MAX_CHOICES or sum(map(len, options)) > MAX_GRAMMAR_BYTES:
        raise Refused.at("", "choice", f"must have at most {MAX_CHOICES} options of {MAX_GRAMMAR_BYTES} bytes together")
    for index, option in enumerate(options):
        if not option:
            raise Refused.at(child("", "options", index), "choice", "must not be empty")
        if any("\ud800" <= char <= "\udfff" for char in option):
            raise Refused.at(child("", "options", index), "choice", "holds half of a surrogate pair")
    return "(?:" + "|".join(literal(option) for option in dict.fromkeys(options)) + ")"

"""A constraint as the text of a grammar that llguidance compiles: everything but compiling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf

from mmserve.constraint.compile import exclusive, longest, shortest
from mmserve.constraint.compile.attempts import JSON_LAYOUT, Grammar, attempts, widest
from mmserve.constraint.compile.cfg import Read, Sketch, gbnf, lark, sketch_of
from mmserve.constraint.compile.document import read_schema
from mmserve.constraint.compile.pattern import BadPattern, Item, literal, matched, text_of
from mmserve.constraint.compile.schema import rewrite
from mmserve.constraint.compile.syntax import Json
from mmserve.constraint.findings import Finding, Refused, child
from mmserve.constraint.limits import MAX_CHOICE_BYTES, MAX_CHOICES
from mmserve.core.constraint import Choice, ConstraintMode, ConstraintSpec, Gbnf, JsonSchema, Lark, Regex, Template


def grammar_of(spec: ConstraintSpec) -> Grammar:
    """The grammar of ``spec``. Raises ``Refused``.

    Time and memory grow with the constraint; run it where that harms nobody (``compile.worker``). Nothing is
    remembered of a constraint: the time that one takes would tell a tenant what another has asked for.
    """
    return next(grammars_of(spec))


def grammars_of(spec: ConstraintSpec, failed: int = 0) -> Iterator[Grammar]:
    """Grammars of ``spec``, to be compiled until one is taken; several only of a JSON schema. Raises as ``grammar_of``.

    ``failed``: the processes that compiling others of it has ended; only a JSON schema that may be widened has more.
    """
    try:
        if not isinstance(spec.kind, JsonSchema):
            yield _of(spec)
        elif failed:
            yield from widest(spec.kind, spec.mode, failed)
        else:
            yield from attempts(spec.kind, spec.mode)
    finally:
        exclusive.forget()


def _of(spec: ConstraintSpec) -> Grammar:
    """The first grammar of ``spec``."""
    match spec.kind:
        case Regex(pattern):
            expression = _read("regex", pattern)
            most, least = _bytes(longest.of_expression(expression)), shortest.of_expression(expression)
            return Grammar(_of_expression(text_of(expression)), True, (), most, least, sketch_of(expression))
        case Choice(options):
            text = _of_expression(_alternatives(options))
            sizes = [len(option.encode()) for option in options]
            sketch = Sketch((min(options, key=lambda option: len(option.encode())),))
            return Grammar(text, True, (), max(sizes), min(sizes), sketch)
        case Lark(text):
            return _of_grammar(lark(text, lambda schema: _inline(schema, spec.mode)))
        case Gbnf(text):
            return _of_grammar(gbnf(text))
        case JsonSchema():
            return next(attempts(spec.kind, spec.mode))
        case Template():
            raise Refused.at("", "template", "is no grammar: each of its holes has one")


def kind_of(spec: ConstraintSpec) -> str:
    """The name that the API has for the kind of ``spec``."""
    names: dict[type, str] = {JsonSchema: "json_schema", Regex: "regex", Choice: "choice", Lark: "lark", Gbnf: "gbnf"}
    return names.get(type(spec.kind), "template")


def _of_grammar(read: Read) -> Grammar:
    if read.expression is None:
        return Grammar(read.text, True, read.warnings, shortest=read.least, sketch=read.sketch)
    most = _bytes(longest.of_expression(read.expression))
    return Grammar(_of_expression(text_of(read.expression)), True, read.warnings, most, read.least, read.sketch)


def _inline(text: str, mode: ConstraintMode) -> tuple[Json, tuple[Finding, ...]]:
    """A schema within a grammar: as it is only a part of the answer, nothing of it can be checked afterwards."""
    rewritten = rewrite(read_schema(text))
    if rewritten.loose and mode is not ConstraintMode.LENIENT:
        raise Refused(*rewritten.loose)
    schema = {} if rewritten.schema is True else rewritten.schema
    laid_out = json.dumps({**schema, "x-guidance": JSON_LAYOUT}, ensure_ascii=False)
    return Json(laid_out, shortest.of_schema(rewritten.schema)), (*rewritten.loose, *rewritten.warnings)


def _bytes(bound: float) -> int | None:
    return None if bound == inf else int(bound)


def _of_expression(expression: str) -> str:
    """A grammar of one regular expression; ``/`` is written out in ``expression``, so that it ends nothing."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: TEXT\nTEXT: /{expression}/\n"}]})


def _read(keyword: str, pattern: str) -> Item:
    try:
        return matched(pattern)
    except BadPattern as error:
        raise Refused.at("", keyword, str(error)) from error


def _alternatives(options: tuple[str, ...]) -> str:
    if not options:
        raise Refused.at("", "choice", "must have at least one option")
    size = sum(len(option.encode(errors="replace")) for option in options)
    if len(options) > MAX_CHOICES or size > MAX_CHOICE_BYTES:
        raise Refused.at("", "choice", f"must have at most {MAX_CHOICES} options of {MAX_CHOICE_BYTES} bytes together")
    for index, option in enumerate(options):
        if not option:
            raise Refused.at(child("", "options", index), "choice", "must not be empty")
        if any("\ud800" <= char <= "\udfff" for char in option):
            raise Refused.at(child("", "options", index), "choice", "holds half of a surrogate pair")
    return "(?:" + "|".join(literal(option) for option in dict.fromkeys(options)) + ")"

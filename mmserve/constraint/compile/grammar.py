"""A constraint as the text of a grammar that llguidance compiles. Lark and GBNF grammars of users are read, checked,
and searched for their shortest sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.compile import one_of
from mmserve.constraint.compile.attempts import JSON_LAYOUT, Grammar, attempts, widest
from mmserve.constraint.compile.derivation import Derivations, Sketch, derivations, least_of, shortest_of
from mmserve.constraint.compile.document import read_schema
from mmserve.constraint.compile.expression import BadPattern, Item, literal, text_of
from mmserve.constraint.compile.gbnf import read_gbnf
from mmserve.constraint.compile.lark import Schemas, read_lark
from mmserve.constraint.compile.lengths import longest_match, shortest_document, shortest_match
from mmserve.constraint.compile.pattern import matched
from mmserve.constraint.compile.schema import rewrite
from mmserve.constraint.compile.syntax import Json, Syntax, refs_of, regular, written
from mmserve.constraint.compile.terminals import settled
from mmserve.constraint.compile.wire import BYTES
from mmserve.constraint.findings import Finding, Refused, child
from mmserve.constraint.limits import (
    LARGE_BYTES,
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    PARSER_LIMITS,
)
from mmserve.core.constraint import Choice, ConstraintMode, ConstraintSpec, Gbnf, JsonSchema, Lark, Regex, Template


def grammar_of(spec: ConstraintSpec) -> Grammar:
    """The grammar of ``spec``. Raises ``Refused``.

    Time and memory grow with the constraint; run it in a child process (``compile.worker``). Nothing is cached between
    constraints: the time of one would leak to a tenant what another has asked for.
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
        one_of.forget()


def _of(spec: ConstraintSpec) -> Grammar:
    """The first grammar of ``spec``."""
    match spec.kind:
        case Regex(pattern):
            expression = _regex_item("regex", pattern)
            most, least = _bytes(longest_match(expression)), shortest_match(expression)
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
    most = _bytes(longest_match(read.expression))
    return Grammar(_of_expression(text_of(read.expression)), True, read.warnings, most, read.least, read.sketch)


def _inline(text: str, mode: ConstraintMode) -> tuple[Json, tuple[Finding, ...]]:
    """A schema within a grammar: as it is only a part of the answer, nothing of it can be checked afterwards."""
    rewritten = rewrite(read_schema(text))
    if rewritten.loose and mode is not ConstraintMode.LENIENT:
        raise Refused(*rewritten.loose)
    schema = {} if rewritten.schema is True else rewritten.schema
    laid_out = json.dumps({**schema, "x-guidance": JSON_LAYOUT}, ensure_ascii=False)
    return Json(laid_out, shortest_document(rewritten.schema)), (*rewritten.loose, *rewritten.warnings)


def _bytes(bound: float) -> int | None:
    return None if bound == inf else int(bound)


def _of_expression(expression: str) -> str:
    """A grammar of one regular expression; ``/`` is written out in ``expression``, so that it ends nothing."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: TEXT\nTEXT: /{expression}/\n"}]})


def _regex_item(keyword: str, pattern: str) -> Item:
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


#: Words and bytes of a shortest sentence, above which it is not written out.
_PIECES, _BYTES = 4_000, 32_768


@dataclass(frozen=True)
class Read:
    """A context-free grammar. ``expression`` is all of it, where it is regular; else ``text`` is for llguidance."""

    text: str
    expression: Item | None
    least: int  # bytes
    sketch: Sketch | None
    warnings: tuple[str, ...]


def lark(text: str, schemas: Schemas) -> Read:
    """The Lark grammar ``text``. Raises ``Refused``; whether llguidance compiles it is not looked at."""
    _check(text, "lark")
    return _read(_nested("lark", lambda: read_lark(text, schemas)), "lark")


def gbnf(text: str) -> Read:
    """The GBNF grammar ``text``; the same."""
    _check(text, "gbnf")
    return _read(_nested("gbnf", lambda: read_gbnf(text)), "gbnf")


def _check(text: str, kind: str) -> None:
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise Refused.at("", kind, f"must be at most {MAX_GRAMMAR_BYTES} bytes")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise Refused.at("", kind, "holds half of a surrogate pair")


def _nested(kind: str, read: Callable[[], Syntax]) -> Syntax:
    try:
        return read()
    except RecursionError as error:
        raise Refused.at("", kind, "is nested too deep") from error


def _read(syntax: Syntax, kind: str) -> Read:
    _names(syntax, kind)
    syntax = settled(syntax, kind)
    known = derivations(syntax)
    if known.least is None:
        raise Refused(*_endless(known, kind))
    words = regular(syntax)
    expression = words.get(syntax.start)
    sketch = _sketch(known)
    text = "" if expression is not None else _text_of(syntax, words, sketch)
    return Read(text, expression, known.least, sketch, syntax.warnings)


def _text_of(syntax: Syntax, words: dict[str, Item], sketch: Sketch | None) -> str:
    """The text of ``syntax`` under which the engine takes ``sketch``, if there is one."""
    text = written(syntax, words)
    sentence = None if sketch is None or syntax.skipped or None in sketch.words else "".join(map(str, sketch.words))
    if sentence is None or len(text) > LARGE_BYTES or takes(text, sentence):
        return text
    finely = written(syntax, words, finely=True)
    return finely if takes(finely, sentence) else text


def _names(syntax: Syntax, kind: str) -> None:
    """Refuse names that are not defined, and terminals that refer to rules or to themselves."""
    for name, definition in syntax.names.items():
        for ref in refs_of(definition.node):
            where = f"line {ref.line}, {name!r}"
            if ref.name not in syntax.names:
                raise Refused.at(f"/{ref.line}", kind, f"{where}: {ref.name!r} is not defined")
            if name in syntax.terminals and ref.name in syntax.rules:
                raise Refused.at(f"/{ref.line}", kind, f"{where}: a terminal cannot refer to the rule {ref.name!r}")
    for node in syntax.skipped:
        for ref in refs_of(node):
            if ref.name not in syntax.terminals:
                why = f"line {ref.line}: '%ignore' must refer to a terminal, and {ref.name!r} is none"
                raise Refused.at(f"/{ref.line}", kind, why)
    for name in syntax.terminals:
        if name in _below(syntax, name):
            line = syntax.terminals[name].line
            raise Refused.at(f"/{line}", kind, f"line {line}, {name!r}: a terminal cannot refer to itself")


def _below(syntax: Syntax, name: str) -> set[str]:
    """Names that ``name`` refers to, directly or not."""
    found, queue = set[str](), [name]
    while queue:
        for ref in refs_of(syntax.names[queue.pop()].node):
            if ref.name not in found:
                found.add(ref.name)
                queue.append(ref.name)
    return found


def _endless(known: Derivations, kind: str) -> Iterator[Finding]:
    for name in known.endless():
        line = known.syntax.names[name].line
        yield Finding(f"/{line}", kind, f"line {line}, {name!r}: has no sentence: every way through it is without end")


def sketch_of(expression: Item) -> Sketch | None:
    """A shortest text that ``expression`` matches; None where it matches none."""
    least = least_of(expression)
    return None if least is None or least > _BYTES else Sketch((shortest_of(expression),))


def _sketch(known: Derivations) -> Sketch | None:
    pieces = known.pieces(_PIECES) if (known.least or 0) <= _BYTES else None
    if pieces is None:
        return None
    gaps = [text for node in known.syntax.skipped if isinstance(text := known.text(node), str) and text]
    gap = min(gaps, key=lambda text: (len(text), text != " "), default=None)
    return Sketch(tuple(piece if isinstance(piece, str) else None for piece in pieces), gap)


def takes(text: str, sentence: str) -> bool:
    """Whether ``sentence`` is one of the grammar ``text``."""
    matcher = LLMatcher(_bytewise(), text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    tokens = list(sentence.encode())
    return not matcher.is_error() and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@cache
def _bytewise() -> Any:
    return BYTES.trie()

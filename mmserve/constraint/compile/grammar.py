"""A constraint as the text of a grammar that llguidance compiles. Lark and GBNF grammars of users are read, checked,
and searched for their shortest sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import inf

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mmserve.constraint.compile import one_of
from mmserve.constraint.compile.attempts import JSON_LAYOUT, Grammar, attempts, widest
from mmserve.constraint.compile.derivation import Derivations, Sketch, derivations, least_of, shortest_of
from mmserve.constraint.compile.document import has_surrogate, read_schema
from mmserve.constraint.compile.expression import BadPattern, Group, Item, literal_of, text_of
from mmserve.constraint.compile.gbnf import GbnfReader
from mmserve.constraint.compile.lark import LarkReader, Reader
from mmserve.constraint.compile.lengths import longest_match, shortest_document
from mmserve.constraint.compile.pattern import matched
from mmserve.constraint.compile.schema import rewrite
from mmserve.constraint.compile.syntax import Json, Syntax, refs_of, regular, written
from mmserve.constraint.compile.terminals import settled
from mmserve.constraint.findings import Finding, Refused, child
from mmserve.constraint.limits import (
    LARGE_BYTES,
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    PARSER_LIMITS,
)
from mmserve.core.constraint import Choice, ConstraintMode, ConstraintSpec, Gbnf, JsonSchema, Lark, Regex


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
    """The grammar of ``spec``, which is no JSON schema."""
    match spec.kind:
        case Regex(pattern):
            try:
                expression = matched(pattern)
            except BadPattern as error:
                raise Refused.at("", "regex", str(error)) from error
            least = least_of(expression)
            sketch = None if least is None or least > _BYTES else Sketch((shortest_of(expression),))
            return _of_expression(expression, least or 0, sketch)
        case Choice(options):
            expression = Group(tuple(literal_of(option).branches[0] for option in _checked(options)))
            shortest = min(options, key=lambda option: len(option.encode()))
            return _of_expression(expression, len(shortest.encode()), Sketch((shortest,)))
        case Lark(text):
            return _of_text(text, "lark", lambda text: LarkReader(text, lambda schema: _inline(schema, spec.mode)))
        case Gbnf(text):
            return _of_text(text, "gbnf", GbnfReader)
    raise Refused.at("", "template", "is no grammar: each of its holes has one")


def kind_of(spec: ConstraintSpec) -> str:
    """The name that the API has for the kind of ``spec``."""
    names: dict[type, str] = {JsonSchema: "json_schema", Regex: "regex", Choice: "choice", Lark: "lark", Gbnf: "gbnf"}
    return names.get(type(spec.kind), "template")


def _inline(text: str, mode: ConstraintMode) -> tuple[Json, tuple[Finding, ...]]:
    """A schema within a grammar: as it is only a part of the answer, nothing of it can be checked afterwards."""
    rewritten = rewrite(read_schema(text))
    if rewritten.loose and mode is not ConstraintMode.LENIENT:
        raise Refused(*rewritten.loose)
    schema = {} if rewritten.schema is True else rewritten.schema
    laid_out = json.dumps({**schema, "x-guidance": JSON_LAYOUT}, ensure_ascii=False)
    return Json(laid_out, shortest_document(rewritten.schema)), (*rewritten.loose, *rewritten.warnings)


def _of_expression(expression: Item, least: int, sketch: Sketch | None, warnings: tuple[str, ...] = ()) -> Grammar:
    """A grammar of one regular expression; ``/`` is written out in its text, so that it ends nothing."""
    most = longest_match(expression)
    text = json.dumps({"grammars": [{"lark_grammar": f"start: TEXT\nTEXT: /{text_of(expression)}/\n"}]})
    return Grammar(text, True, warnings, None if most == inf else int(most), least, sketch)


def _checked(options: tuple[str, ...]) -> Iterable[str]:
    """The different ones of ``options``. Raises ``Refused``."""
    if not options:
        raise Refused.at("", "choice", "must have at least one option")
    size = sum(len(option.encode(errors="replace")) for option in options)
    if len(options) > MAX_CHOICES or size > MAX_CHOICE_BYTES:
        raise Refused.at("", "choice", f"must have at most {MAX_CHOICES} options of {MAX_CHOICE_BYTES} bytes together")
    for index, option in enumerate(options):
        if not option or has_surrogate(option):
            reason = "holds half of a surrogate pair" if option else "must not be empty"
            raise Refused.at(child("", "options", index), "choice", reason)
    return dict.fromkeys(options)


#: Words and bytes of a shortest sentence, above which it is not written out.
_PIECES, _BYTES = 4_000, 32_768


def _of_text(text: str, kind: str, reader: Callable[[str], Reader]) -> Grammar:
    """The context-free grammar ``text``. Raises ``Refused``; whether llguidance compiles it is not looked at."""
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise Refused.at("", kind, f"must be at most {MAX_GRAMMAR_BYTES} bytes")
    if has_surrogate(text):
        raise Refused.at("", kind, "holds half of a surrogate pair")
    try:
        syntax = reader(text).grammar()
    except RecursionError as error:
        raise Refused.at("", kind, "is nested too deep") from error
    _check_names(syntax, kind)
    syntax = settled(syntax, kind)
    known = derivations(syntax)
    if known.least is None:
        raise Refused(*_endless(known, kind))
    words, sketch = regular(syntax), _sketch(known)
    if syntax.start in words:
        return _of_expression(words[syntax.start], known.least, sketch, syntax.warnings)
    return Grammar(_text_of(syntax, words, sketch), True, syntax.warnings, None, known.least, sketch)


def _text_of(syntax: Syntax, words: dict[str, Item], sketch: Sketch | None) -> str:
    """The text of ``syntax`` under which the engine takes ``sketch``, if there is one."""
    text = written(syntax, words)
    sentence = None if sketch is None or syntax.skipped or None in sketch.words else "".join(map(str, sketch.words))
    if sentence is None or len(text) > LARGE_BYTES or takes(text, sentence):
        return text
    finely = written(syntax, words, finely=True)
    return finely if takes(finely, sentence) else text


def _check_names(syntax: Syntax, kind: str) -> None:
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
    for name, definition in syntax.terminals.items():
        if name in syntax.reached(definition.node):
            line = definition.line
            raise Refused.at(f"/{line}", kind, f"line {line}, {name!r}: a terminal cannot refer to itself")


def _endless(known: Derivations, kind: str) -> Iterator[Finding]:
    for name in known.endless():
        line = known.syntax.names[name].line
        yield Finding(f"/{line}", kind, f"line {line}, {name!r}: has no sentence: every way through it is without end")


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
def _bytewise() -> LLTokenizer:
    return LLTokenizer("byte")

"""A constraint as the text of a grammar that llguidance compiles.

Lark and GBNF grammars of users are parsed, checked, and searched for their shortest sentence (``derivations.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import inf
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mmserve.constraint.compile import one_of
from mmserve.constraint.compile.attempts import JSON_LAYOUT, Grammar, Sketch, attempts, well_formed, widest
from mmserve.constraint.compile.derivations import Derivations, derivations
from mmserve.constraint.compile.document import has_surrogate, read_schema
from mmserve.constraint.compile.expression import (
    BadPattern,
    Item,
    least_of,
    literal,
    longest_match,
    shortest_of,
    text_of,
)
from mmserve.constraint.compile.finite import least_fixpoint
from mmserve.constraint.compile.gbnf import GbnfReader
from mmserve.constraint.compile.lark import LarkReader
from mmserve.constraint.compile.lengths import shortest_document
from mmserve.constraint.compile.pattern import matched
from mmserve.constraint.compile.reader import Reader
from mmserve.constraint.compile.schema import rewrite
from mmserve.constraint.compile.syntax import (
    Json,
    Syntax,
    refs_of,
    regular,
    written,
)
from mmserve.constraint.compile.terminals import without_lazy_repetitions
from mmserve.constraint.findings import Finding, Refused, child
from mmserve.constraint.limits import LARGE_BYTES, MAX_CHOICE_BYTES, MAX_CHOICES, MAX_GRAMMAR_BYTES, PARSER_LIMITS
from mmserve.core.constraint import CallsOrJson, Choice, ConstraintMode, ConstraintSpec, Gbnf, JsonSchema, Lark, Regex


def grammar_of(spec: ConstraintSpec) -> Grammar:
    """The grammar of ``spec``. Raises ``Refused``.

    Time and memory grow with the constraint: run it in a child process (``search.worker``). Nothing is cached between
    constraints, because timing would leak a tenant's constraints to others.
    """
    return next(grammars_of(spec))


def grammars_of(spec: ConstraintSpec, failed: int = 0) -> Iterator[Grammar]:
    """Grammars of ``spec``, to be compiled until one succeeds; several only for a JSON schema. Raises as
    ``grammar_of``.

    ``failed``: number of processes that compiling others of these ended; only widenable JSON schemas have more
    grammars.
    """
    try:
        match spec.kind:
            case JsonSchema():
                yield from _documents(spec.kind, spec.mode, failed)
            case CallsOrJson(calls, openings, strict=strict):
                found = _of(ConstraintSpec(Lark(calls, strict), ConstraintMode.LENIENT))
                for document in _documents(spec.kind.document, spec.mode, failed):
                    yield _either(found, openings, document)
            case _:
                yield _of(spec)
    finally:
        one_of.clear_caches()


def _documents(kind: JsonSchema, mode: ConstraintMode, failed: int) -> Iterator[Grammar]:
    return widest(kind, mode, failed) if failed else attempts(kind, mode)


def _either(calls: Grammar, openings: Iterable[str], document: Grammar) -> Grammar:
    """The union of both grammars; ``openings``: prefixes of calls, with which no document may begin."""
    if (alike := first_begun(document.text, [each for each in openings if each.startswith("{")])) is not None:
        raise Refused.at("", "json_schema", f"has documents that begin as a call of a tool does, {alike!r}")
    grammars: list[Any] = [{"lark_grammar": "start: @calls | @document\n"}]
    for name, each in (("calls", calls), ("document", document)):
        grammars.append({"name": name, **json.loads(each.text)["grammars"][0]})
    shorter = min((document, calls), key=lambda each: each.shortest)
    text = json.dumps({"grammars": grammars}, ensure_ascii=False)
    return Grammar(text, document.exact, (*calls.warnings, *document.warnings), None, shorter.shortest, shorter.sketch)


def _of(spec: ConstraintSpec) -> Grammar:
    """The grammar of ``spec``, which is no JSON schema."""
    match spec.kind:
        case Regex(pattern):
            try:
                expression = matched(pattern)
            except BadPattern as error:
                raise Refused.at("", "regex", str(error)) from error
            least = least_of(expression)
            sketch = Sketch((shortest_of(expression),)) if least <= _BYTES else None
            return _of_expression(expression, 0 if least == inf else int(least), sketch)
        case Choice(options):
            sizes = {option: len(option.encode()) for option in _checked(options)}
            shortest = min(sizes, key=sizes.__getitem__)
            text = f"(?:{'|'.join(map(literal, sizes))})"
            return Grammar(_of_word(text), True, (), max(sizes.values()), sizes[shortest], Sketch((shortest,)))
        case Lark(text, strict):

            def inline(schema: str, line: int) -> tuple[Json, tuple[Finding, ...]]:
                return _inline(schema, strict=spec.mode is not ConstraintMode.LENIENT or line in strict)

            return _of_text(text, "lark", lambda text: LarkReader(text, inline))
        case Gbnf(text):
            return _of_text(text, "gbnf", GbnfReader)
    raise Refused.at("", "template", "is no grammar: each of its holes has one")


def kind_of(spec: ConstraintSpec) -> str:
    """The name that the API has for the kind of ``spec``."""
    names: dict[type, str] = {
        JsonSchema: "json_schema",
        CallsOrJson: "json_schema",
        Regex: "regex",
        Choice: "choice",
        Lark: "lark",
        Gbnf: "gbnf",
    }
    return names.get(type(spec.kind), "template")


def _inline(text: str, *, strict: bool) -> tuple[Json, tuple[Finding, ...]]:
    """A schema within a grammar; ``strict``: whether it is refused if a part of it cannot be enforced, as it is if it
    is malformed. It is only a part of the answer, so nothing of it can be validated afterwards."""
    root = read_schema(text)
    rewritten = rewrite(root, strict=strict or not well_formed(root))
    if rewritten.loose and strict:
        raise Refused(*rewritten.loose)
    schema = {} if rewritten.schema is True else rewritten.schema
    laid_out = json.dumps({**schema, "x-guidance": JSON_LAYOUT}, ensure_ascii=False)
    return Json(laid_out, shortest_document(rewritten.schema)), (*rewritten.loose, *rewritten.warnings)


def _of_expression(expression: Item, least: int, sketch: Sketch | None, warnings: tuple[str, ...] = ()) -> Grammar:
    """A grammar of one regular expression."""
    most = longest_match(expression)
    return Grammar(_of_word(text_of(expression)), True, warnings, None if most == inf else int(most), least, sketch)


def _of_word(text: str) -> str:
    """A grammar of one expression; ``/`` must be escaped in ``text``."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: TEXT\nTEXT: /{text}/\n"}]})


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


#: Maximum words and bytes of a shortest sentence that is written out.
_PIECES, _BYTES = 4_000, 32_768


def _of_text(text: str, kind: str, reader: Callable[[str], Reader]) -> Grammar:
    """The context-free grammar ``text``. Raises ``Refused``; does not check whether llguidance compiles it."""
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise Refused.at("", kind, f"must be at most {MAX_GRAMMAR_BYTES} bytes")
    if has_surrogate(text):
        raise Refused.at("", kind, "holds half of a surrogate pair")
    try:
        syntax = reader(text).grammar()
    except RecursionError as error:
        raise Refused.at("", kind, "is nested too deep") from error
    _check_names(syntax, kind)
    syntax = without_lazy_repetitions(syntax, kind)
    known = derivations(syntax)
    if known.least is None:
        lines = {name: syntax.names[name].line for name in known.endless()}
        why = "has no sentence: every way through it is without end"
        raise Refused(*(Finding(f"/{line}", kind, f"line {line}, {name!r}: {why}") for name, line in lines.items()))
    words, sketch = regular(syntax), _sketch(known)
    if syntax.start in words:
        return _of_expression(words[syntax.start], known.least, sketch, syntax.warnings)
    return Grammar(_text_of(syntax, words, sketch), True, syntax.warnings, None, known.least, sketch)


def _text_of(syntax: Syntax, words: dict[str, Item], sketch: Sketch | None) -> str:
    """The text of ``syntax`` for which the engine accepts ``sketch``, if there is one."""
    text = written(syntax, words)
    sentence = None if sketch is None or syntax.skipped or None in sketch.words else "".join(map(str, sketch.words))
    if sentence is None or len(text) > LARGE_BYTES or accepts(text, sentence):
        return text
    finely = written(syntax, words, finely=True)
    return finely if accepts(finely, sentence) else text


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
    refs = {name: {ref.name for ref in refs_of(each.node)} for name, each in syntax.terminals.items()}
    ending = least_fixpoint(refs, lambda name, found: refs[name] <= found)
    for name, definition in syntax.terminals.items():
        if name not in ending and name in syntax.reached(definition.node):
            line = definition.line
            raise Refused.at(f"/{line}", kind, f"line {line}, {name!r}: a terminal cannot refer to itself")


def _sketch(known: Derivations) -> Sketch | None:
    pieces = known.pieces(_PIECES) if (known.least or 0) <= _BYTES else None
    gaps = filter(None, map(known.text, known.syntax.skipped))
    gap = min(gaps, key=lambda text: (len(text), text != " "), default=None)
    return None if pieces is None else Sketch(tuple(pieces), gap)


def accepts(text: str, sentence: str) -> bool:
    """Whether ``sentence`` is one of the grammar ``text``."""
    matcher = LLMatcher(_bytewise(), text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    tokens = list(sentence.encode())
    return not matcher.is_error() and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def first_begun(text: str, beginnings: Iterable[str]) -> str | None:
    """The first of ``beginnings`` that is a prefix of a sentence of the grammar ``text``; None if none is."""
    matcher = None
    for each in beginnings:
        matcher = matcher or LLMatcher(_bytewise(), text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        tokens, at = list(each.encode()), matcher.deep_copy()
        if not at.is_error() and at.try_consume_tokens(tokens) == len(tokens):
            return each
    return None


@cache
def _bytewise() -> LLTokenizer:
    return LLTokenizer("byte")

"""Context-free grammars of users: read, checked, and what is known of their sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mmserve.constraint.derivation import Derivations, derivations, least_of, shortest_of
from mmserve.constraint.findings import Finding, Refused
from mmserve.constraint.gbnf import read_gbnf
from mmserve.constraint.lark import Schemas, read_lark
from mmserve.constraint.lazy import settled
from mmserve.constraint.limits import LARGE_BYTES, MAX_GRAMMAR_BYTES
from mmserve.constraint.pattern import Item
from mmserve.constraint.proving import takes
from mmserve.constraint.syntax import Syntax, refs_of
from mmserve.constraint.written import regular, written

#: Words and bytes of a shortest sentence, above which it is not written out.
_PIECES, _BYTES = 4_000, 32_768


@dataclass(frozen=True)
class Sketch:
    """A shortest sentence, word by word; None where a word's text has to be looked for.

    ``gap``: a shortest text of what may stand between words; None where nothing may.
    """

    words: tuple[str | None, ...]
    gap: str | None = None


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
    text = "" if expression is not None else _spoken(syntax, words, sketch)
    return Read(text, expression, known.least, sketch, syntax.warnings)


def _spoken(syntax: Syntax, words: dict[str, Item], sketch: Sketch | None) -> str:
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

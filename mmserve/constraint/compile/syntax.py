"""Context-free grammars as data, parsed from Lark and GBNF texts, and written as text for llguidance.

llguidance's lexer splits a text into the longest possible lexemes before parsing: a lexeme that consumes the beginning
of the next one leads to a dead end. So everything regular becomes one lexeme if nothing may be skipped within it, and a
grammar that is regular as a whole becomes one expression. Where that is not enough, every character becomes a lexeme:
then no longest match is needed, but masks take longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mmserve.constraint.compile.expression import Chars, Group, Item, Repeat, class_text, single, size_of, text_of


@dataclass(frozen=True)
class Literal:
    """This text; the empty text if it is empty."""

    text: str


@dataclass(frozen=True)
class Matching:
    """A text that fully matches an expression without anchors."""

    item: Item


@dataclass(frozen=True)
class Ref:
    """A reference to the rule or terminal ``name``; ``line``: its line."""

    name: str
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Row:
    """A sequence of parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """Alternatives; at least one."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Times:
    """``part`` from ``low`` to ``high`` times; None = unbounded."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Both:
    """The intersection of ``parts``; only in terminals."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Not:
    """The complement of ``part``; only in terminals."""

    part: Node


@dataclass(frozen=True)
class Json:
    """A document under a JSON schema: ``text`` is the schema for the grammar engine, ``least`` its minimum length in
    bytes."""

    text: str
    least: int


Node = Literal | Matching | Ref | Row | Either | Times | Both | Not | Json

EMPTY = Literal("")


@dataclass(frozen=True)
class Definition:
    """A rule or a terminal, and the line on which it is defined."""

    node: Node
    line: int


@dataclass(frozen=True)
class Syntax:
    """A grammar. ``terminals`` are single lexemes: nothing is skipped within them.

    ``skipped``: text that is ignored between lexemes.
    """

    start: str
    rules: dict[str, Definition]
    terminals: dict[str, Definition] = field(default_factory=dict)
    skipped: tuple[Node, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, Definition]:
        """All definitions."""
        return {**self.rules, **self.terminals}

    def reached(self, *roots: Node, closed: Collection[str] = ()) -> dict[str, None]:
        """The names that ``roots`` refer to, directly or through names that are not ``closed``."""
        names, found, queue = self.names, dict[str, None](), [ref.name for root in roots for ref in refs_of(root)]
        while queue:
            name = queue.pop()
            if name not in found:
                found[name] = None
                queue += [] if name in closed else [ref.name for ref in refs_of(names[name].node)]
        return found


def parts_of(node: Node) -> tuple[Node, ...]:
    """The nodes directly in ``node``."""
    match node:
        case Row(parts) | Both(parts) | Either(parts):
            return parts
        case Times(part, _, _) | Not(part):
            return (part,)
    return ()


def rebuilt(node: Node, change: Callable[[Node], Node]) -> Node:
    """``node`` with ``change`` applied to its direct children."""
    match node:
        case Row(parts) | Both(parts) | Either(parts):
            return replace(node, parts=tuple(map(change, parts)))
        case Times(part, _, _) | Not(part):
            return replace(node, part=change(part))
    return node


def refs_of(node: Node) -> Iterator[Ref]:
    """All references within ``node``."""
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, Ref):
            yield node
        stack += parts_of(node)


def item_of(node: Node, known: dict[str, Any]) -> Item:
    """``node`` as one expression. ``known``: expressions of the names that it refers to. Raises ``ValueError`` if a
    part has no expression."""
    match node:
        case Literal(text):
            return Group((tuple(Chars(single(ord(char))) for char in text),))
        case Matching(item):
            return item
        case Ref(name):
            if name not in known:
                raise ValueError(name)
            return known[name]
        case Row(parts):
            return Group((tuple(item_of(part, known) for part in parts),))
        case Either(parts):
            return Group(tuple((item_of(part, known),) for part in parts))
        case Times(part, low, high):
            return Repeat(item_of(part, known), low, high)
    raise ValueError(type(node).__name__)


#: Maximum length of an expression with repetitions expanded, and maximum nesting depth, up to which a regular rule
#: becomes one lexeme. Chains of rules count as nesting.
_WORD, _NESTED = 4_000, 100


def regular(syntax: Syntax) -> dict[str, Item]:
    """Rules and terminals as expressions, if they are regular, short enough, and nothing is skipped in them."""
    names = syntax.terminals if syntax.skipped else syntax.names
    found, sizes, depths = dict[str, Item](), dict[str, int](), dict[str, int]()
    for name in _inner_first(names):
        node = names[name].node
        with suppress(ValueError):
            size, depth = _size(node, sizes), _depth(node, depths)
            if size <= _WORD and depth <= _NESTED:
                found[name], sizes[name], depths[name] = item_of(node, found), size, depth
    return found


def _depth(node: Node, depths: dict[str, int]) -> int:
    """The nesting depth of ``node``, including the names that it refers to."""
    if isinstance(node, Ref):
        return depths.get(node.name, 0)
    return 1 + max((_depth(part, depths) for part in parts_of(node)), default=0)


def _size(node: Node, sizes: dict[str, int]) -> int:
    """Length of ``node`` as an expression with repetitions expanded. Raises ``ValueError`` if it is not regular."""
    match node:
        case Literal(text):
            return len(text)
        case Matching(item):
            return size_of(item)
        case Ref(name) if name in sizes:
            return sizes[name]
        case Row(parts) | Either(parts):
            return sum(_size(part, sizes) for part in parts)
        case Times(part, low, high):
            return _size(part, sizes) * max(1, low if high is None else high)
    raise ValueError(type(node).__name__)


def _inner_first(names: dict[str, Definition]) -> list[str]:
    """All names in dependency order; recursive names come in any order."""
    order, seen = list[str](), set[str]()
    for root in names:
        stack = [(root, False)]
        while stack:
            name, done = stack.pop()
            if done:
                order.append(name)
            elif name not in seen and name in names:
                seen.add(name)
                stack.append((name, True))
                stack += [(ref.name, False) for ref in refs_of(names[name].node)]
    return order


#: llguidance skips ignored text only where a lexeme may follow, and before the first lexeme only with this option. A
#: lexeme that matches no text may therefore follow the last one, so that ignored text may also come last.
_SKIP_FIRST = '%llguidance {"allow_initial_skip": true}'


def written(syntax: Syntax, words: dict[str, Item], *, finely: bool = False) -> str:
    """The text of ``syntax`` for llguidance.

    ``words``: the expressions that are one lexeme (of ``regular``). ``finely``: every character is a lexeme, except in
    terminals with ``&`` or ``~``.
    """
    whole = {name for name, each in syntax.terminals.items() if not finely or _opaque(each.node)}
    whole |= set() if finely else set(words)
    names = {name: f"{'W' if name in whole else 'r'}{n}" for n, name in enumerate(syntax.names)}
    lines, closed = list[str](), () if finely else words.keys() - {syntax.start}
    if syntax.skipped:
        lines += [_SKIP_FIRST, f"start: {names[syntax.start]} MORE?", f"MORE: /{class_text(())}/"]
    else:
        names[syntax.start] = "start"
    for name in syntax.reached(Ref(syntax.start), *syntax.skipped, closed=closed):
        if not finely and name in words and name != syntax.start:
            lines.append(f"{names[name]}: /{text_of(words[name])}/")
        else:
            lines.append(f"{names[name]}: {_text(syntax.names[name].node, names, finely and name not in whole)}")
    lines += [f"%ignore {_text(node, names, False)}" for node in syntax.skipped]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines) + "\n"}]})


def _opaque(node: Node) -> bool:
    """Whether ``node`` can only be a single lexeme."""
    return isinstance(node, Both | Not) or any(map(_opaque, parts_of(node)))


def _text(node: Node, names: dict[str, str], finely: bool) -> str:
    match node:
        case Literal(text):
            return " ".join(map(_quoted, text)) if finely and text else _quoted(text)
        case Matching(item):
            return _item(item) if finely else f"/{text_of(item)}/"
        case Ref(name):
            return names[name]
        case Row(parts):
            return "(" + " ".join(_text(part, names, finely) for part in parts) + ")"
        case Either(parts):
            return "(" + " | ".join(_text(part, names, finely) for part in parts) + ")"
        case Times(part, low, high):
            return _times(_text(part, names, finely), low, high)
        case Both(parts):
            return "(" + " & ".join(_text(part, names, False) for part in parts) + ")"
        case Not(part):
            return f"~({_text(part, names, False)})"
        case Json(text, _):
            return f"%json {text}"


def _item(item: Item) -> str:
    """``item`` as lexemes of one character."""
    match item:
        case Group(branches):
            rows = (" ".join(map(_item, branch)) if branch else _quoted("") for branch in branches)
            return "(" + " | ".join(rows) + ")"
        case Repeat(part, low, high):
            return _times(_item(part), low, high)
    return f"/{text_of(item)}/"


def _times(part: str, low: int, high: int | None) -> str:
    if high == 0:
        return _quoted("")
    bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    most = "" if high is None else str(high)
    return f"({part}){bounds or f'{{{low},{most}}}'}"


def _quoted(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")

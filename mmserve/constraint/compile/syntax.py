"""Context-free grammars as data: what Lark and GBNF texts are read into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mmserve.constraint.compile import pattern
from mmserve.constraint.compile.charsets import single
from mmserve.constraint.compile.pattern import Chars, Group


@dataclass(frozen=True)
class Literal:
    """This text; the empty text if it is empty."""

    text: str


@dataclass(frozen=True)
class Matching:
    """A text that an expression without anchors matches whole."""

    item: pattern.Item


@dataclass(frozen=True)
class Ref:
    """The definition of the rule or terminal ``name``; ``line`` is where it is referred to."""

    name: str
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Row:
    """One part after another."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """One of several; there is at least one."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Times:
    """``part`` from ``low`` to ``high`` times; None = without end."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Both:
    """What every one of ``parts`` matches; within terminals only."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Not:
    """What ``part`` does not match; within terminals only."""

    part: Node


@dataclass(frozen=True)
class Json:
    """A document under a JSON schema: ``text`` is the grammar engine's own form of it, ``least`` its fewest bytes."""

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
    """A grammar. Names of ``terminals`` are those of single words of a lexer: nothing is skipped within them.

    ``skipped``: what may stand between the words of a text without being a part of any rule.
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


def parts_of(node: Node) -> tuple[Node, ...]:
    """The nodes directly in ``node``."""
    match node:
        case Row(parts) | Both(parts) | Either(parts):
            return parts
        case Times(part, _, _) | Not(part):
            return (part,)
    return ()


def refs_of(node: Node) -> Iterator[Ref]:
    """All references within ``node``."""
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, Ref):
            yield node
        stack += parts_of(node)


def item_of(node: Node, known: dict[str, Any]) -> pattern.Item:
    """``node`` as one expression. ``known``: expressions of the names that it refers to. ``ValueError`` where it has a
    part that no expression of this package has."""
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
        case Either(options):
            return Group(tuple((item_of(option, known),) for option in options))
        case Times(part, low, high):
            return pattern.Repeat(item_of(part, known), low, high)
    raise ValueError(type(node).__name__)

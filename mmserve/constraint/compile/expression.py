"""Regular expressions as data: sets of characters, anchors, alternatives and repetitions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from mmserve.constraint.compile import charsets
from mmserve.constraint.compile.charsets import Ranges


class BadPattern(ValueError):
    """A pattern that is malformed, or that no grammar can enforce; the message has the reason and the position."""


def _hashed(item: Item) -> int:
    """The hash of a frozen dataclass, computed once: derivatives of an expression mostly share its parts."""
    parts = vars(item)
    found: int | None = parts.get("hash")
    if found is None:
        found = parts["hash"] = hash((type(item), *parts.values()))
    return found


@dataclass(frozen=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges

    __hash__ = _hashed


@dataclass(frozen=True)
class Anchor:
    """``^`` or ``$``."""

    sign: str

    __hash__ = _hashed


@dataclass(frozen=True)
class Group:
    """Alternatives, each a sequence of items."""

    branches: tuple[tuple[Item, ...], ...]

    __hash__ = _hashed


@dataclass(frozen=True)
class Repeat:
    """``item`` from ``low`` to ``high`` times; None = unbounded. ``lazy`` matters to lexers only."""

    item: Item
    low: int
    high: int | None
    lazy: bool = False

    __hash__ = _hashed


Item = Chars | Anchor | Group | Repeat


def items_of(item: Item) -> Iterator[Item]:
    """``item`` and all within it."""
    yield item
    match item:
        case Group(branches):
            for inner in itertools.chain(*branches):
                yield from items_of(inner)
        case Repeat(inner, _, _):
            yield from items_of(inner)


def literal_of(text: str, *, folded: bool = False) -> Group:
    """The parts of the expression that matches ``text``, or, if ``folded``, ``text`` in either case."""
    sets = (charsets.single(ord(char)) for char in text)
    return Group((tuple(Chars(charsets.folded(each) if folded else each) for each in sets),))


def text_of(item: Item) -> str:
    """``item`` in Rust's syntax. Raises ``BadPattern`` for anchors."""
    match item:
        case Chars(ranges):
            return charsets.text_of(ranges)
        case Group(branches):
            return "(?:" + "|".join("".join(map(text_of, branch)) for branch in branches) + ")"
        case Repeat(inner, low, high):
            return f"(?:{text_of(inner)}){{{low},{'' if high is None else high}}}"
    raise BadPattern("'^' and '$' are supported only at the beginning and at the end of an alternative")


def size_of(item: Item) -> int:
    """Characters of ``item`` with its repetitions expanded."""
    match item:
        case Group(branches):
            return sum(size_of(inner) for branch in branches for inner in branch)
        case Repeat(inner, low, high):
            return size_of(inner) * max(1, low if high is None else high)
    return 1

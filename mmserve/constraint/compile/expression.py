"""Regular expressions as data: sets of characters, anchors, alternatives and repetitions; and lengths of matches.

Sets of Unicode scalar values are sorted ranges; the classes are those of ECMAScript.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import inf

Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
#: Every scalar value: UTF-8 has no surrogates.
EVERY: Ranges = ((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST))


def union(*sets: Ranges) -> Ranges:
    """All values of ``sets``, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(r for ranges in sets for r in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return _without_surrogates(tuple(merged))


def inverse(ranges: Ranges) -> Ranges:
    """All scalar values that are not in ``ranges``."""
    gaps, start = [], 0
    for low, high in union(ranges):
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        gaps.append((start, _LAST))
    return _without_surrogates(tuple(gaps))


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """All values that are in both sets."""
    return inverse(union(inverse(one), inverse(other)))


def _without_surrogates(ranges: Ranges) -> Ranges:
    kept = []
    for low, high in ranges:
        if low < _SURROGATES[0]:
            kept.append((low, min(high, _SURROGATES[0] - 1)))
        if high > _SURROGATES[1]:
            kept.append((max(low, _SURROGATES[1] + 1), high))
    return tuple(kept)


def single(code: int) -> Ranges:
    """The set of one value; empty for a surrogate."""
    return _without_surrogates(((code, code),))


def class_text(ranges: Ranges) -> str:
    """``ranges`` as a class of Rust's regular expressions, every value written out in hexadecimal."""
    if not ranges:
        return r"[^\u{0}-\u{10ffff}]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escaped(ranges[0][0])
    return "[" + "".join(_escaped(a) if a == b else f"{_escaped(a)}-{_escaped(b)}" for a, b in ranges) + "]"


def _escaped(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\u{{{code:x}}}"


@cache
def with_property(name: str) -> Ranges:
    """The characters with the Unicode property ``name``: a category such as ``Lu``, a script such as ``Greek``, or
    ``PROPERTY=VALUE``. Raises ``ValueError`` for an unknown property."""
    import regex  # seldom needed, and only in processes that read constraints

    try:
        having = regex.compile(rf"\p{{{name}}}+")
    except regex.error as error:
        raise ValueError(f"there is no Unicode property {name!r}") from error
    return _without_surrogates(tuple((run.start(), run.end() - 1) for run in having.finditer(_all_characters())))


@cache
def _all_characters() -> str:
    return "".join(map(chr, range(_LAST + 1)))


def folded(ranges: Ranges) -> Ranges:
    """``ranges`` and all characters that differ from them only in case."""
    orbits = _orbits()
    others = [other for low, high in ranges for code, other in orbits if low <= code <= high]
    return union(ranges, tuple((code, code) for code in others))


@cache
def _orbits() -> tuple[tuple[int, int], ...]:
    """Pairs of characters with the same simple case folding (Unicode's ``CaseFolding.txt``, statuses C and S)."""
    alike: dict[str, list[int]] = {}
    for low, high in _CASED:
        for code in range(low, high + 1):
            char = chr(code)
            key = char.casefold()
            if len(key) != 1:  # full folding; the simple one is the lower case, if that is one character
                key = char.lower() if len(char.lower()) == 1 else char
            alike.setdefault(key, []).append(code)
    return tuple((a, b) for codes in alike.values() if len(codes) > 1 for a in codes for b in codes if a != b)


#: Code point ranges with cased letters: there are none in the blocks of Han and Hangul between them, or after them.
_CASED: Ranges = ((0x41, 0x33FF), (0xA000, 0xABFF), (0xF900, 0xFFFF), (0x10000, 0x1EFFF))

DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = union(DIGIT, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
#: ECMA-262 22.2.2.9: white space and line terminators.
SPACE: Ranges = union(
    ((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    ((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
#: Characters that ``.`` does not match.
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
CLASSES: dict[str, Ranges] = {
    "d": DIGIT,
    "D": inverse(DIGIT),
    "w": WORD,
    "W": inverse(WORD),
    "s": SPACE,
    "S": inverse(SPACE),
}
#: Characters that are preferred if an expression has a choice.
_PLAIN = "a1A0bxnzX2-_. "
#: Characters that need an escape in a JSON string: controls, the quote and the backslash.
_ESCAPED = ((0x00, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\")))


class BadPattern(ValueError):
    """A pattern that is malformed, or that no grammar can enforce; the message has the reason and the position."""


def _hashed(item: Item) -> int:
    """The cached hash of a frozen dataclass: derivatives of an expression share most of its parts."""
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
    """``item`` from ``low`` to ``high`` times; None = unbounded. ``lazy`` matters only in lexers."""

    item: Item
    low: int
    high: int | None
    lazy: bool = False

    __hash__ = _hashed


Item = Chars | Anchor | Group | Repeat


def items_of(item: Item) -> Iterator[Item]:
    """``item`` and all items nested in it."""
    yield item
    match item:
        case Group(branches):
            for inner in itertools.chain(*branches):
                yield from items_of(inner)
        case Repeat(inner, _, _):
            yield from items_of(inner)


def literal(text: str) -> str:
    """The expression that matches ``text`` and nothing else."""
    return "".join(class_text(single(ord(char))) for char in text)


def literal_of(text: str, *, either_case: bool = False) -> Group:
    """The items of the expression that matches ``text``, or ``text`` in ``either_case``."""
    sets = (single(ord(char)) for char in text)
    return Group((tuple(Chars(folded(each) if either_case else each) for each in sets),))


def text_of(item: Item) -> str:
    """``item`` in Rust's syntax. Raises ``BadPattern`` for anchors."""
    match item:
        case Chars(ranges):
            return class_text(ranges)
        case Group(branches):
            return "(?:" + "|".join("".join(map(text_of, branch)) for branch in branches) + ")"
        case Repeat(inner, low, high):
            return f"(?:{text_of(inner)}){{{low},{'' if high is None else high}}}"
    raise BadPattern("'^' and '$' are supported only at the beginning and at the end of an alternative")


def size_of(item: Item) -> int:
    """Length of ``item`` in characters with its repetitions expanded."""
    match item:
        case Group(branches):
            return sum(size_of(inner) for branch in branches for inner in branch)
        case Repeat(inner, low, high):
            return size_of(inner) * max(1, low if high is None else high)
    return 1


def longest_match(item: Item, *, quoted: bool = False) -> float:
    """Maximum length in bytes of a text that ``item`` matches; ``quoted``: as written in a JSON string."""
    match item:
        case Chars(ranges):
            return max((_width(low, high, quoted=quoted) for low, high in ranges), default=0)
        case Group(branches):
            return max(sum(longest_match(inner, quoted=quoted) for inner in branch) for branch in branches)
        case Repeat(inner, _low, high):
            once = longest_match(inner, quoted=quoted)
            return once * (inf if high is None else high) if once and high != 0 else 0
    return 0  # an anchor


def _width(low: int, high: int, *, quoted: bool) -> int:
    """Maximum length in bytes of a character from ``low`` to ``high``."""
    escaped = quoted and any(low <= last and first <= high for first, last in _ESCAPED)
    return max(_bytes(high), 2 if escaped else 1)


def _bytes(code: int) -> int:
    return 1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF)


def least_of(item: Item) -> float:
    """Minimum length in bytes of a text that ``item`` matches; infinite if it matches none."""
    match item:
        case Chars(ranges):
            return _bytes(ranges[0][0]) if ranges else inf
        case Group(branches):
            return min((sum(map(least_of, branch)) for branch in branches), default=inf)
        case Repeat(part, low, _):
            return low * least_of(part) if low else 0
    return 0


def shortest_of(item: Item) -> str:
    """A shortest text that ``item`` matches; it must match some text."""
    match item:
        case Chars(ranges):
            return _character(ranges)
        case Group(branches):
            return "".join(map(shortest_of, min(branches, key=lambda branch: sum(map(least_of, branch)))))
        case Repeat(part, low, _):
            return shortest_of(part) * low if low else ""
    return ""


def _character(ranges: Ranges) -> str:
    for char in _PLAIN:
        if any(low <= ord(char) <= high for low, high in ranges):
            return char
    printable = (low for low, high in ranges if high >= 0x20)
    code = next(printable, ranges[0][0])
    return chr(code if _bytes(code) == _bytes(ranges[0][0]) else ranges[0][0])

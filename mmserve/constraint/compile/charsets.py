"""Sets of Unicode scalar values as sorted ranges, and the classes of ECMAScript's regular expressions."""

from __future__ import annotations

from functools import cache

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


def complement(ranges: Ranges) -> Ranges:
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
    return complement(union(complement(one), complement(other)))


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


def text_of(ranges: Ranges) -> str:
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
    ``PROPERTY=VALUE``. Raises ``ValueError`` where there is no such property."""
    import regex  # as it is needed seldom, and only where constraints are read

    try:
        having = regex.compile(rf"\p{{{name}}}+")
    except regex.error as error:
        raise ValueError(f"there is no Unicode property {name!r}") from error
    return _without_surrogates(tuple((run.start(), run.end() - 1) for run in having.finditer(_all_characters())))


@cache
def _all_characters() -> str:
    return "".join(map(chr, range(_LAST + 1)))


def folded(ranges: Ranges) -> Ranges:
    """``ranges`` and all characters that differ from theirs in case only."""
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
            if len(key) != 1:  # a full folding; the simple one is to the lower case, if that is one character
                key = char.lower() if len(char.lower()) == 1 else char
            alike.setdefault(key, []).append(code)
    return tuple((a, b) for codes in alike.values() if len(codes) > 1 for a in codes for b in codes if a != b)


#: Where letters with two cases are: none is in the blocks of Han and Hangul between them, or after them.
_CASED: Ranges = ((0x41, 0x33FF), (0xA000, 0xABFF), (0xF900, 0xFFFF), (0x10000, 0x1EFFF))

DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = union(DIGIT, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
#: ECMA-262 22.2.2.9: white space and line terminators.
SPACE: Ranges = union(
    ((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    ((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
#: What ``.`` does not match.
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
CLASSES: dict[str, Ranges] = {
    "d": DIGIT,
    "D": complement(DIGIT),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(SPACE),
}

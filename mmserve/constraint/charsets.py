"""Sets of Unicode scalar values as sorted ranges, and the classes of ECMAScript's regular expressions."""

from __future__ import annotations

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

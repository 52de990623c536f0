"""Keywords of strings and numbers, as llguidance enforces them exactly."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from math import inf, lcm, nextafter
from typing import Any

from mmserve.constraint.compile import charsets
from mmserve.constraint.compile.formats import BASE64, FORMATS, HINTS, NUMBERS
from mmserve.constraint.compile.notes import Notes
from mmserve.constraint.compile.pattern import BadPattern, searched, whole
from mmserve.constraint.compile.values import types_of
from mmserve.constraint.limits import DIGITS, LARGEST, MAX_INTEGER, MAX_MULTIPLE, MAX_REPEAT, SMALLEST

Schema = dict[str, Any]
#: Classes and their ranges, as ``charsets.text_of`` writes them.
_CLASS = re.compile(r"\[((?:\\u\{[0-9a-f]+\}|[0-9A-Za-z]|-)+)\]")
_RANGE = re.compile(r"(\\u\{[0-9a-f]+\}|[0-9A-Za-z])(?:-(\\u\{[0-9a-f]+\}|[0-9A-Za-z]))?")
#: What a string of an answer can hold: controls only with an escape of one letter.
_WRITABLE = charsets.union(((0x08, 0x0A), (0x0C, 0x0D)), ((0x20, 0x10FFFF),))


def string_parts(node: Schema, pointer: str, notes: Notes) -> list[Schema]:
    """What ``node`` says of strings, as schemas that all hold; each has at most one pattern."""
    lengths: Schema = {name: min(node[name], MAX_REPEAT) for name in ("minLength", "maxLength") if name in node}
    parts = [lengths] if lengths else []
    if "pattern" in node:
        try:
            parts.append({"pattern": anchored(searched(node["pattern"]))})
        except BadPattern as error:
            notes.cannot(pointer, "pattern", str(error))
    if "format" in node:
        parts += _format_parts(node["format"], pointer, notes)
    return [*parts, *_content_parts(node, pointer, notes)]


def _format_parts(name: str, pointer: str, notes: Notes) -> list[Schema]:
    if name in FORMATS:
        return [{"pattern": anchored(whole(FORMATS[name]))}]
    if name not in NUMBERS and name not in HINTS:
        known = dict.fromkeys((*FORMATS, *NUMBERS, *sorted(HINTS)))
        notes.cannot(pointer, "format", f"{name[:40]!r} is none of {', '.join(known)}")
    return []


def _content_parts(node: Schema, pointer: str, notes: Notes) -> list[Schema]:
    """What ``node`` says of text that strings encode; ``draft.modern`` leaves it only where that is judged."""
    if node.get("contentMediaType") == "application/json":
        notes.cannot(pointer, "contentMediaType", "documents within strings cannot be enforced")
    encoding = node.get("contentEncoding")
    if encoding in ("base16", "base32", "base64url"):
        notes.cannot(pointer, "contentEncoding", f"{encoding!r} cannot be enforced; base64 can")
    return [{"pattern": anchored(whole(BASE64))}] if encoding == "base64" else []


def anchored(expression: str) -> str:
    """The ``pattern`` that llguidance matches against whole strings.

    Its classes lose the control characters that no answer can write. Where a class has all of them, llguidance also
    lets through an escaped quote and an escaped backslash, whether or not the class has those.
    """
    return f"^{_CLASS.sub(_writable, expression)}$"


def _writable(found: re.Match[str]) -> str:
    ranges = [(_code(low), _code(high or low)) for low, high in _RANGE.findall(found[1])]
    kept = charsets.intersection(tuple(ranges), _WRITABLE)
    return charsets.text_of(kept) if kept != charsets.union(tuple(ranges)) else found[0]


def _code(text: str) -> int:
    return int(text[3:-1], 16) if len(text) > 1 else ord(text)


def number_part(node: Schema, pointer: str, notes: Notes, *, exponents: bool = False) -> Schema:
    """What ``node`` says of numbers, with inclusive bounds of few digits only.

    llguidance accepts 1 where ``exclusiveMinimum`` is 1 and ``maximum`` 1.25; 0.10000000000000001 where
    ``exclusiveMinimum`` is 0.1, which every reader takes for 0.1; and reads bounds of more than 15 digits as their
    neighbours. The next number of 15 digits as an inclusive bound has none of that: reading keeps the order.

    Without bounds, llguidance writes numbers with exponents, such as 1e999, and with any number of digits: many readers
    make an infinity of those. So numbers, multiples too, end at ±``LARGEST``, and have no exponents; those without
    bounds may have some where ``exponents`` are asked for.
    """
    part: Schema = {}
    for keyword, bound, strictly in (
        ("minimum", "minimum", False),
        ("maximum", "maximum", False),
        ("exclusiveMinimum", "minimum", True),
        ("exclusiveMaximum", "maximum", True),
    ):
        if keyword not in node:
            continue
        if node[keyword] and abs(node[keyword]) < SMALLEST:
            notes.cannot(pointer, keyword, f"must be 0, or at least {SMALLEST} from it")
            continue
        value = _inward(node[keyword], up=bound == "minimum", strictly=strictly)
        tighter = min if bound == "maximum" else max
        part[bound] = tighter(part[bound], value) if bound in part else value
    given = {"type": node["type"]} if "type" in node else {}
    if "number" in types_of(given):
        part = _exact(part, pointer, notes)
    if (bounds := NUMBERS.get(node.get("format", ""))) is not None:
        low, high = (max(-LARGEST, bounds[0]), min(LARGEST, bounds[1]))
        part = {"minimum": max(low, part.get("minimum", low)), "maximum": min(high, part.get("maximum", high))}
    free = exponents and not part and "multipleOf" not in node and "number" in types_of(given)
    if (part or given or "multipleOf" in node) and "integer" in types_of(given) and not free:
        part = {"minimum": -LARGEST, "maximum": LARGEST, **part}
    if "multipleOf" in node and (reason := _uncountable(node["multipleOf"])):
        notes.cannot(pointer, "multipleOf", reason)
    elif "multipleOf" in node:
        part["multipleOf"] = node["multipleOf"]
    elif bounds is not None and "number" in types_of(given):
        part["multipleOf"] = 1
    return part


def _exact(bounds: Schema, pointer: str, notes: Notes) -> Schema:
    """``bounds`` of numbers that need not be integers: of those, llguidance tells no two apart that are one double."""
    found = dict(bounds)
    for bound, sign in (("minimum", -1), ("maximum", 1)):
        if abs(found.get(bound, 0)) > MAX_INTEGER:
            if sign * found[bound] < 0:
                notes.cannot(pointer, bound, "must be within ±2⁵³ where numbers need not be integers")
            found[bound] = sign * MAX_INTEGER
    return found


def _inward(number: float, *, up: bool, strictly: bool) -> float:
    """The nearest number of 15 digits that is at least ``number`` (``up``) or at most it; ``strictly``: beyond it."""
    sign = 1 if up else -1
    if not number:
        return sign * SMALLEST if strictly else 0
    if abs(number) >= MAX_INTEGER:
        return _double_inward(int(number) + sign * strictly, up=up)
    if number == int(number) and abs(number) >= 10 ** (DIGITS - 1):
        return int(number) + sign * strictly
    exact = Decimal(repr(number))
    step = Decimal(1).scaleb(exact.adjusted() - DIGITS + 1)
    rounded = exact.quantize(step, ROUND_CEILING if up else ROUND_FLOOR)
    if strictly and rounded == exact:
        rounded += sign * step
    return int(rounded) if rounded == int(rounded) else float(rounded)


def _double_inward(number: int, *, up: bool) -> int:
    """The nearest double within ±``LARGEST`` that is at least ``number`` (``up``) or at most it."""
    found = float(max(-LARGEST, min(LARGEST, number)))
    if up and found < number:
        found = nextafter(found, inf)
    if not up and found > number:
        found = nextafter(found, -inf)
    return int(found)


def _uncountable(number: float) -> str | None:
    """Why no automaton counts multiples of ``number``, if none does."""
    exact = Fraction(repr(number))  # the decimal that was written, not the double it is read as
    if exact < SMALLEST:
        return f"must be at least {SMALLEST}"
    steps, places = exact.numerator, exact.denominator
    while places > 1:
        if places % 10 == 0:
            places //= 10
        elif places % 2 == 0:
            steps, places = steps * 5, places // 2
        else:
            steps, places = steps * 2, places // 5
    return None if steps <= MAX_MULTIPLE else f"must have at most {MAX_MULTIPLE} steps between 0 and it"


def overflows(numbers: Iterable[float]) -> bool:
    """Whether llguidance may pass 32 bits on its way to a common multiple of ``numbers``: it would not notice."""
    exact = [Decimal(repr(number)) for number in numbers]
    places = max(_places(part) for part in exact)
    steps = [int(part.scaleb(places)) for part in exact]
    return len(exact) > 1 and lcm(*steps) * max(steps) >= 1 << 32


def _places(number: Decimal) -> int:
    """Digits after the point."""
    exponent = number.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0

"""Keywords and formats of strings and numbers, as llguidance enforces them exactly.

The expression of a format matches a part of what its standard allows, and nothing else: RFC 3339 (date, time,
date-time, duration), RFC 2673 (ipv4), RFC 4291 (ipv6), RFC 9562 (uuid), RFC 1123 (hostname), RFC 5321 (email:
dot-atoms), RFC 3986 (uri, uri-reference), RFC 6570 (uri-template), RFC 6901 (json-pointer), ECMA-262 (regex: without
look-around), the ASCII part of their international kin, and what OpenAPI's format registry and draft 3 define.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from math import inf, lcm, nextafter

from mmserve.constraint.compile.expression import BadPattern, class_text, intersection, union
from mmserve.constraint.compile.keywords import Schema, types_of
from mmserve.constraint.compile.pattern import searched, whole
from mmserve.constraint.findings import Notes
from mmserve.constraint.limits import DIGITS, LARGEST, MAX_INTEGER, MAX_MULTIPLE, MAX_REPEAT, SMALLEST

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"

_MONTHS_30 = "(?:0[469]|11)"
_MONTHS_31 = "(?:0[13578]|1[02])"
_DAYS_28 = "(?:0[1-9]|1[0-9]|2[0-8])"
#: Years divisible by four but not by a hundred, or by four hundred; without year 0, which some validators reject.
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = (
    f"(?:{_YEAR}-(?:{_MONTHS_31}-(?:0[1-9]|[12][0-9]|3[01])|{_MONTHS_30}-(?:0[1-9]|[12][0-9]|30)|02-{_DAYS_28})"
    f"|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_DURATION_TIME = "T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DURATION_DATE = (
    "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"  # months have no hours
)
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]{{1,9}}W)"

#: The repeated part comes first, so that masks are unions of slices of the vocabulary (``search.vocabulary``).
_WORD = "[A-Za-z]{0,19}[A-Za-z]"
#: Without "--", which marks Unicode labels with other rules. At most 62 characters; 63 are allowed.
_LABEL = f"{_WORD}(?:(?:[0-9]|-[A-Za-z0-9])(?:-?[A-Za-z0-9]){{0,20}})?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = "[A-Za-z0-9_+\\-]{1,20}"
#: At most 230 characters, 254 are allowed.
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_LABEL}(?:\.{_LABEL})?(?:\.{_WORD}){{1,2}}"

_PCHAR = "(?:[A-Za-z0-9\\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:/{_PCHAR}*)*"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:\#(?:{_PCHAR}|[/?])*)?"
_AUTHORITY = rf"//(?:{_HOSTNAME}|{_IPV4})(?::[0-9]{{1,4}})?"
_URI = rf"{_WORD}(?:[0-9+.\-][A-Za-z0-9+.\-]{{0,19}})?:(?:{_AUTHORITY}{_PATH}|{_PCHAR}+{_PATH}){_TAIL}"
_FIRST = "(?:[A-Za-z0-9\\-._~!$&'()*+,;=@]|%[0-9A-Fa-f]{2})"  # no colon: it would end a scheme
_REFERENCE = rf"{_URI}|(?:{_AUTHORITY}{_PATH}|/(?:{_PCHAR}+{_PATH})?|(?:{_FIRST}+{_PATH})?){_TAIL}"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,20}(?::[1-9][0-9]{0,3}|\*)?"
_TEMPLATE = rf"(?:[A-Za-z0-9/:.?=&_~\-]|%[0-9A-Fa-f]{{2}}|\{{[+\#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

_MEMBER = r"(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,:;@]|\\[dws.\-])"
_ONE = rf"(?:[A-Za-z0-9 _:,;=@.]|\\[dDwWsS.*+?()\[\]{{}}|^$/\\]|\[\^?{_MEMBER}+\])(?:[*+?]|\{{[0-9]{{1,2}},?\}})?"
_CHOICE = rf"(?:{_ONE})*(?:\|(?:{_ONE})*)*"
_PART = rf"(?:{_ONE}|\((?:\?:)?{_CHOICE}\)[*+?]?)"
_REGEX = rf"\^?{_PART}*(?:\|{_PART}*)*\$?"

_GROUP = "[0-9A-Fa-f]{1,4}"


def _ipv6() -> str:
    """The expression of eight groups, or of fewer with one ``::`` for at least one."""
    forms = [f"{_GROUP}(?::{_GROUP}){{7}}"]
    for before in range(8):
        left = f"{_GROUP}(?::{_GROUP}){{{before - 1}}}" if before else ""
        after = 7 - before
        right = f"(?:{_GROUP}(?::{_GROUP}){{0,{after - 1}}})?" if after else ""
        forms.append(f"{left}::{right}")
    return "|".join(forms)


_DECIMAL = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"


def _whole(digits: int) -> str:
    """An integer as text."""
    return rf"0|-?[1-9][0-9]{{0,{digits - 1}}}"


_DIGIT64 = "[A-Za-z0-9+/]"
#: RFC 4648, section 4: with padding, and with zeros in the unused bits.
BASE64 = f"(?:{_DIGIT64}{{4}})*(?:{_DIGIT64}[AQgw]==|{_DIGIT64}{{2}}[AEIMQUYcgkosw048]=)?"

#: The expression of each format, which matches whole strings; in the dialect of ``mmserve.constraint.compile.pattern``.
FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "hostname": _HOSTNAME,
    "email": _EMAIL,
    "uri": _URI,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,5}})(?:\\#|{_POINTER})",
    "uri-reference": _REFERENCE,
    "uri-template": _TEMPLATE,
    "regex": _REGEX,
    "idn-email": _EMAIL,
    "idn-hostname": _HOSTNAME,
    "iri": _URI,
    "iri-reference": _REFERENCE,
    "byte": BASE64,
    "url": _URI,
    "host-name": _HOSTNAME,
    "ip-address": _IPV4,
    "int32": _whole(9),
    "int64": _whole(18),
    "float": _DECIMAL,
    "double": _DECIMAL,
}
#: The range of numbers of each numeric format; None = every number.
NUMBERS: dict[str, tuple[int, int] | None] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "float": None,
    "double": None,
    "utc-millisec": None,
}
#: Formats that only affect the display of a text.
HINTS = frozenset({"password"})


#: Character classes and their ranges, as ``class_text`` writes them.
_CLASS = re.compile(r"\[((?:\\u\{[0-9a-f]+\}|[0-9A-Za-z]|-)+)\]")
_RANGE = re.compile(r"(\\u\{[0-9a-f]+\}|[0-9A-Za-z])(?:-(\\u\{[0-9a-f]+\}|[0-9A-Za-z]))?")
#: The characters that a string of an answer may have: control characters only with a single-letter escape.
_WRITABLE = union(((0x08, 0x0A), (0x0C, 0x0D)), ((0x20, 0x10FFFF),))


def string_parts(node: Schema, pointer: str, notes: Notes) -> list[Schema]:
    """The string keywords of ``node`` as schemas that all hold; each has at most one pattern."""
    lengths: Schema = {name: min(node[name], MAX_REPEAT) for name in ("minLength", "maxLength") if name in node}
    parts = [lengths] if lengths else []
    if "pattern" in node:
        try:
            parts.append({"pattern": anchored(searched(node["pattern"]))})
        except BadPattern as error:
            notes.cannot(pointer, "pattern", str(error))
    if "format" in node:
        name = node["format"]
        if name in FORMATS:
            parts.append({"pattern": anchored(whole(FORMATS[name]))})
        elif name not in NUMBERS and name not in HINTS:
            known = dict.fromkeys((*FORMATS, *NUMBERS, *sorted(HINTS)))
            notes.cannot(pointer, "format", f"{name[:40]!r} is none of {', '.join(known)}")
    # content keywords: ``keywords.modern`` removes them in drafts where they are annotations
    if node.get("contentMediaType") == "application/json":
        notes.cannot(pointer, "contentMediaType", "documents within strings cannot be enforced")
    encoding = node.get("contentEncoding")
    if encoding in ("base16", "base32", "base64url"):
        notes.cannot(pointer, "contentEncoding", f"{encoding!r} cannot be enforced; base64 can")
    return [*parts, {"pattern": anchored(whole(BASE64))}] if encoding == "base64" else parts


def anchored(expression: str) -> str:
    """The ``pattern`` with which llguidance matches whole strings.

    Control characters that no answer can write are removed from its classes. If a class has all of them, llguidance
    would also accept an escaped quote and an escaped backslash, whether or not they are in the class.
    """
    return f"^{_CLASS.sub(_writable, expression)}$"


def _writable(found: re.Match[str]) -> str:
    ranges = [(_code(low), _code(high or low)) for low, high in _RANGE.findall(found[1])]
    kept = intersection(tuple(ranges), _WRITABLE)
    return class_text(kept) if kept != union(tuple(ranges)) else found[0]


def _code(text: str) -> int:
    return int(text[3:-1], 16) if len(text) > 1 else ord(text)


def number_part(node: Schema, pointer: str, notes: Notes, *, exponents: bool = False) -> Schema:
    """The number keywords of ``node``, with inclusive bounds of few digits only.

    llguidance accepts 1 for ``exclusiveMinimum`` 1 and ``maximum`` 1.25; it accepts 0.10000000000000001 for
    ``exclusiveMinimum`` 0.1, which parsers read as 0.1; and it misreads bounds of more than 15 digits. An inclusive
    bound at the next number of 15 digits avoids all of these, because parsing preserves order.

    Without bounds, llguidance writes numbers with exponents, such as 1e999, and with any number of digits, which many
    parsers read as infinity. So numbers, and multiples, are limited to ±``LARGEST``, without exponents; those without
    bounds may have exponents if ``exponents``.
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
    elif "multipleOf" in node:  # integers that are multiples of n/m are multiples of n
        step = node["multipleOf"]
        part["multipleOf"] = step if bounds is None else Fraction(repr(step)).numerator
    elif bounds is not None and "number" in types_of(given):
        part["multipleOf"] = 1
    return part


def _exact(bounds: Schema, pointer: str, notes: Notes) -> Schema:
    """``bounds`` of numbers that may be fractions; two bounds that are the same double are equal for llguidance."""
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
    """The reason why no automaton can enforce multiples of ``number``; None if one can."""
    exact = Fraction(repr(number))  # the decimal as written, not the double
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
    """Whether llguidance may overflow 32 bits while computing a common multiple of ``numbers``, which it does not
    detect."""
    exact = [Decimal(repr(number)) for number in numbers]
    places = max(0, *(-int(part.normalize().as_tuple().exponent) for part in exact))  # digits after the point
    steps = [int(part.scaleb(places)) for part in exact]
    return len(exact) > 1 and lcm(*steps) * max(steps) >= 1 << 32

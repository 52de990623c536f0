"""Formats of strings as regular expressions: each matches a part of what its standard allows, and nothing else.

RFC 3339 (date, time, date-time, duration), RFC 2673 (ipv4), RFC 4291 (ipv6), RFC 9562 (uuid), RFC 1123 (hostname),
RFC 5321 (email: dot-atoms), RFC 3986 (uri, uri-reference), RFC 6570 (uri-template), RFC 6901 (json-pointer), ECMA-262
(regex: without look-around), and the part of their international kin that is ASCII. Beside JSON Schema's own formats
there are those of OpenAPI's format registry and of its draft 3 that have a definition.
"""

from __future__ import annotations

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"

_MONTHS_30 = "(?:0[469]|11)"
_MONTHS_31 = "(?:0[13578]|1[02])"
_DAYS_28 = "(?:0[1-9]|1[0-9]|2[0-8])"
#: Years divisible by four but not by a hundred, or by four hundred; a judge may know no year 0.
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = (
    f"(?:{_YEAR}-(?:{_MONTHS_31}-(?:0[1-9]|[12][0-9]|3[01])|{_MONTHS_30}-(?:0[1-9]|[12][0-9]|30)|02-{_DAYS_28})"
    f"|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_DURATION_TIME = "T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DURATION_DATE = (
    "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"  # a month has no hours
)
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]{{1,9}}W)"

#: What repeats comes first, so that its masks are made of whole parts of the vocabulary (``search.vocabulary``).
_WORD = "[A-Za-z]{0,19}[A-Za-z]"
#: Never "--": those labels are Unicode in disguise, with rules of its own. At most 62 characters, 63 are allowed.
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
_FIRST = "(?:[A-Za-z0-9\\-._~!$&'()*+,;=@]|%[0-9A-Fa-f]{2})"  # no colon: what is before one is a scheme
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
    """Eight groups, or fewer around one ``::`` that stands for at least one."""
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
#: RFC 4648, section 4: padded, and with zeros in the bits that padding leaves over.
BASE64 = f"(?:{_DIGIT64}{{4}})*(?:{_DIGIT64}[AQgw]==|{_DIGIT64}{{2}}[AEIMQUYcgkosw048]=)?"

#: The expression of each format, matched whole; in the dialect of ``mmserve.constraint.compile.pattern``.
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
#: What formats say of numbers: the least and the greatest; None for those that every number is of.
NUMBERS: dict[str, tuple[int, int] | None] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "float": None,
    "double": None,
    "utc-millisec": None,
}
#: Formats that say how to show a text and nothing about it.
HINTS = frozenset({"password"})

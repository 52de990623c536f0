"""Formats of strings as regular expressions: each matches a part of what its standard allows, and nothing else.

RFC 3339 (date, time, date-time, duration), RFC 2673 (ipv4), RFC 4291 (ipv6), RFC 9562 (uuid), RFC 1123 (hostname),
RFC 5321 (email: dot-atoms), RFC 3986 (uri: with an authority), RFC 6901 (json-pointer).
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

_LABEL = "[A-Za-z](?:-?[A-Za-z0-9]){0,20}"  # never "--": those labels are Unicode in disguise, with rules of its own
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = "[A-Za-z0-9_+\\-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}"

_PCHAR = "(?:[A-Za-z0-9\\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_URI = rf"[A-Za-z][A-Za-z0-9+.\-]{{0,20}}://{_HOSTNAME}(?::[0-9]{{1,4}})?(?:/{_PCHAR}*)*(?:\?(?:{_PCHAR}|[/?])*)?(?:\#(?:{_PCHAR}|[/?])*)?"

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


_DIGIT64 = "[A-Za-z0-9+/]"
#: RFC 4648, section 4: padded, and with zeros in the bits that padding leaves over.
BASE64 = f"(?:{_DIGIT64}{{4}})*(?:{_DIGIT64}[AQgw]==|{_DIGIT64}{{2}}[AEIMQUYcgkosw048]=)?"

#: The expression of each format, matched whole; in the dialect of ``mmserve.constraint.pattern``.
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
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
}

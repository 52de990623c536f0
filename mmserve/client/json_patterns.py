"""JSON schemas of scalar types for which pydantic accepts only some of the strings of a format.

Arguments named ``schema`` are pydantic's core schemas; their bounds are included.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

Schema = dict[str, Any]

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9a-f]{1,4}"
_IPV6 = f"{_GROUP}(?::{_GROUP}){{7}}"
#: Networks must have zeros after their prefix.
_NETWORK4 = rf"(?:{_IPV4}/32|{_OCTET}(?:\.{_OCTET}){{2}}\.0/24|{_OCTET}\.{_OCTET}\.0\.0/16|{_OCTET}\.0\.0\.0/8)"
_NETWORK6 = f"(?:{_IPV6}/128|{_GROUP}(?::{_GROUP}){{3}}::/64)"
#: No label begins with "xn--", which has additional rules, and the last label is not a number.
_LABEL = "[a-z][a-z0-9]{0,19}(?:-[a-z0-9]{1,10})?"
_HOST = rf"(?:{_LABEL}\.){{1,3}}(?:com|org|net|edu|eu)"
_WORD = "[a-z0-9]{1,20}"
_EMAIL = rf"^{_WORD}(?:[._\-]{_WORD}){{0,2}}@{_HOST}$"
#: Base64 (with either alphabet) of ASCII, so that it is also valid as text.
_BASE64_TRIPLE = "[A-Za-f][A-HQ-Xg-nw-z0-3][ABEFIJMNQRUVYZcdghklopstwx014589][A-Za-z0-9]"
_WHOLE = "(?:0|-?[1-9][0-9]{0,14})"
_NUMBER = r"(?:-?(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,6})?)"
COMPLEX = r"^-?[0-9]{1,9}(?:\.[0-9]{1,6})?[+\-][0-9]{1,9}(?:\.[0-9]{1,6})?j$"


def _uuid(version: str) -> str:
    return rf"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"


#: Patterns of strings that pydantic accepts, by its formats; "" = every string.
FORMATS: dict[str, str] = {
    "binary": "",
    "path": "",
    "password": "",
    "base64": f"^(?:{_BASE64_TRIPLE})*$",
    "base64url": f"^(?:{_BASE64_TRIPLE})*$",
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "ipv4network": f"^{_NETWORK4}$",
    "ipv4interface": f"^{_IPV4}/(?:3[0-2]|[12]?[0-9])$",
    "ipv6network": f"^{_NETWORK6}$",
    "ipv6interface": f"^{_IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])$",
    "ipvanyaddress": f"^(?:{_IPV4}|{_IPV6})$",
    "ipvanynetwork": f"^(?:{_NETWORK4}|{_NETWORK6})$",
    "ipvanyinterface": f"^(?:{_IPV4}/(?:3[0-2]|[12]?[0-9])|{_IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))$",
    "email": _EMAIL,
    "name-email": _EMAIL,
    "regex": "^[A-Za-z0-9 ]*$",
    "fraction": r"^-?[0-9]{1,9}/[1-9][0-9]{0,8}$",
}
#: Formats whose validity depends on more than their text.
UNKNOWABLE = {"file-path": "files that exist on the client", "directory-path": "folders that exist on the client"}

_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
#: A date in a year of four digits.
DAY = f"[12][0-9]{{3}}-{_DAYS}"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET = "(?:Z|[+\\-](?:0[0-9]|1[0-4]):[0-5][0-9])"
_TIME_PART = (
    "T(?:[0-9]{1,3}H(?:[0-9]{1,3}M)?(?:[0-9]{1,3}S)?|[0-9]{1,3}M(?:[0-9]{1,3}S)?|[0-9]{1,3}S)"  # at least one of them
)
_DURATION = rf"^P(?:[0-9]{{1,4}}D(?:{_TIME_PART})?|{_TIME_PART})$"
#: Maximum number of years, or days, that are enumerated.
_MOST_YEARS, _MOST_DAYS = 100, 800


def decimal(schema: Mapping[str, Any]) -> Schema:
    """A number: bounds, and the digits after the point as ``multipleOf``."""
    made: Schema = {"type": "number", **_bounds(schema, float)}
    digits: int | None = schema.get("max_digits")
    places: int | None = schema.get("decimal_places")
    if digits is not None and places is None:
        places = min(2, digits)
    step = schema.get("multiple_of")
    if places is not None and step is None:
        step = Decimal(1).scaleb(-places)
    if step is not None:
        made["multipleOf"] = _plain(Decimal(str(step)))
    if digits is not None and places is not None:
        largest = _plain(Decimal(10) ** (digits - places) - Decimal(1).scaleb(-places))
        made["maximum"] = min(made.get("maximum", largest), largest)
        made["minimum"] = max(made.get("minimum", -largest), -largest)
    return made


def timedelta(schema: Mapping[str, Any]) -> Schema:
    """A duration of days, hours, minutes and seconds or, if it is bounded, a number of seconds."""
    bounds = _bounds(schema, lambda bound: bound.total_seconds())
    if not bounds:
        return {"type": "string", "pattern": _DURATION}
    return {"type": "number", "description": "seconds", "multipleOf": 0.001, **bounds}


def date(schema: Mapping[str, Any]) -> Schema:
    """A date: any, one within whole years between the bounds, or one of a few days."""
    if (span := _span(schema)) is None:
        return {"type": "string", "format": "date"}
    first, last = span
    days = _listed(first, last)
    if days:
        return {"enum": days}
    return {"type": "string", "pattern": f"^{_years(first, last)}-{_DAYS}$"}


def datetime(schema: Mapping[str, Any]) -> Schema:
    """A date and time, in UTC or with an offset unless it must be naive; its date is strictly between the bounds."""
    naive = schema.get("tz_constraint") == "naive"
    span = _span(schema)
    if span is None and not naive:
        return {"type": "string", "format": "date-time"}
    if span is None:
        day = DAY
    else:
        first, last = span[0] + dt.timedelta(days=1), span[1] - dt.timedelta(days=1)
        days = _listed(first, last)
        day = f"(?:{'|'.join(days)})" if days else f"{_years(first, last)}-{_DAYS}"
    return {"type": "string", "pattern": f"^{day}T{_CLOCK}{'' if naive else 'Z' if span else _OFFSET}$"}


def time(schema: Mapping[str, Any]) -> Schema:
    """A time of day without bounds."""
    if any(bound in schema for bound in ("ge", "gt", "le", "lt")):
        raise TypeError("times of day with bounds cannot be enforced: use a datetime, or a number of seconds")
    return {"type": "string", "pattern": f"^{_CLOCK}{'Z' if schema.get('tz_constraint') == 'aware' else ''}$"}


def binary(schema: Mapping[str, Any], encoding: str) -> Schema:
    """Bytes as ASCII or, with the ``encoding`` "base64" or "hex", encoded."""
    least, most = schema.get("min_length", 0), schema.get("max_length")
    if encoding == "base64":
        unit, (least, most) = _BASE64_TRIPLE, (-(-least // 3), None if most is None else most // 3)
    else:
        unit = "[0-9a-f]{2}" if encoding == "hex" else "[ -~]"
    return {"type": "string", "pattern": f"^(?:{unit}){{{least},{'' if most is None else most}}}$"}


def stripped(least: int) -> str:
    """The pattern of strings with at least ``least`` characters after stripping white space."""
    return r"\S" if least == 1 else rf"\S[\s\S]{{{least - 2},}}\S"


def url(schemes: Sequence[str] | None) -> str:
    """The pattern of URLs with one of ``schemes``, with a host unless the scheme is file."""
    path = r"(?:/[A-Za-z0-9_\-]{1,20}){0,3}"
    named = [scheme for scheme in schemes or ("https", "http") if scheme != "file"]
    forms = [f"(?:{'|'.join(scheme.replace('+', chr(92) + '+') for scheme in named)})://{_HOST}{path}"] if named else []
    forms += [f"file://{path}"] if "file" in (schemes or ()) else []
    return f"^(?:{'|'.join(forms)})$"


def key_names(keys: Mapping[str, Any]) -> Schema | None:
    """The schema of the member names for dictionary keys of the schema ``keys``; None if it is the same schema."""
    match keys.get("type"):
        case "integer":
            return {"type": "string", "pattern": f"^{_WHOLE}$"} if not _limited(keys) else _unreadable("integers")
        case "number":
            return {"type": "string", "pattern": f"^{_NUMBER}$"} if not _limited(keys) else _unreadable("numbers")
        case "boolean":
            return {"enum": ["true", "false"]}
        case "null":
            return {"enum": ["None"]}
    return None


def _limited(keys: Mapping[str, Any]) -> bool:
    return not set(keys) <= {"type", "title", "description", "default"}


def _unreadable(what: str) -> Schema:
    raise TypeError(f"keys of a dictionary that are {what} with bounds cannot be enforced: use a list of pairs")


def _bounds(schema: Mapping[str, Any], value: Any) -> Schema:
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    return {name: _plain(value(schema[key])) for key, name in names.items() if schema.get(key) is not None}


def _plain(number: Any) -> int | float:
    return int(number) if number == int(number) else float(number)


def _span(schema: Mapping[str, Any]) -> tuple[dt.date, dt.date] | None:
    """The first and the last day that the bounds of ``schema`` allow; for a missing bound, a day far away. None if
    there are no bounds."""
    keys = ("ge", "gt", "le", "lt", "now_op")
    if all(schema.get(key) is None for key in keys):
        return None
    day, today = dt.timedelta(days=1), dt.datetime.now(dt.UTC).date()
    low = [_day(schema["ge"])] if schema.get("ge") is not None else []
    low += [_day(schema["gt"]) + day] if schema.get("gt") is not None else []
    low += [today + 2 * day] if schema.get("now_op") == "future" else []  # today is already tomorrow in some time zone
    high = [_day(schema["le"])] if schema.get("le") is not None else []
    high += [_day(schema["lt"]) - day] if schema.get("lt") is not None else []
    high += [today - 2 * day] if schema.get("now_op") == "past" else []
    first = max(low) if low else None
    last = min(high) if high else None
    if first is None:
        assert last is not None
        first = dt.date(max(1, last.year - _MOST_YEARS), 1, 1)
    if last is None:
        last = dt.date(min(9999, first.year + _MOST_YEARS), 12, 31)
    if last < first:
        raise TypeError("no date is within the bounds")
    return first, last


def _day(bound: dt.date | dt.datetime) -> dt.date:
    return bound.date() if isinstance(bound, dt.datetime) else bound


def _listed(first: dt.date, last: dt.date) -> list[str]:
    """Each day from ``first`` to ``last``, if there are few."""
    count = (last - first).days + 1
    if count < 1:
        raise TypeError("no whole day is within the bounds")
    return [str(first + dt.timedelta(days=i)) for i in range(count)] if count <= _MOST_DAYS else []


def _years(first: dt.date, last: dt.date) -> str:
    """The whole years from ``first`` to ``last``; if there are many, those nearest to ``last``."""
    years = range(first.year + 1, last.year)
    return f"(?:{'|'.join(f'{year:04}' for year in years[-_MOST_YEARS:])})"

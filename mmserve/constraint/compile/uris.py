"""URI references resolved against a base and normalised, so that equal texts are equal URIs (RFC 3986, 5.2 and 6.2)."""

from __future__ import annotations

import re

#: Where a document without a name of its own is.
NOWHERE = "json-schema:///"
_CHARACTERS = re.compile(r"(?:[A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")
_PARTS = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/?]*))?([^?]*)(\?.*)?")
_PORTS = {"http": "80", "https": "443"}


def resolved(base: str | None, reference: str) -> str | None:
    """The URI that ``reference``, which has no fragment, means at ``base`` (a result of this, or ``NOWHERE``).

    None where there is none: ``reference`` is no URI reference (addresses in brackets are not read either), or it is
    relative to what has no hierarchy, such as a URN, or to None.
    """
    if not _CHARACTERS.fullmatch(reference) or (found := _PARTS.fullmatch(reference)) is None:
        return None
    scheme, host, path, query = found.groups()
    if scheme is None:
        above = _PARTS.fullmatch(base) if base is not None else None
        if above is None or above[2] is None or ":" in path.split("/")[0]:
            return None
        scheme = above[1]
        if host is None:
            host = above[2]
            if not path:
                path, query = above[3], query if query is not None else above[4]
            elif not path.startswith("/"):
                path = (above[3] or "/").rpartition("/")[0] + "/" + path
    scheme, path = scheme.lower(), _plain(path)
    if host is None:
        return f"{scheme}:{path}{_plain(query or '')}" if not path.startswith("/") else None
    return f"{scheme}://{_host(scheme, host)}{_without_dots(path or '/')}{_plain(query or '')}"


def _host(scheme: str, text: str) -> str:
    user, at, place = text.rpartition("@")
    name, _, port = place.partition(":")
    shown = f":{port}" if port and port != _PORTS.get(scheme) else ""
    return _plain(user) + at + _plain(_plain(name).lower()) + shown


def _plain(text: str) -> str:
    """``text`` without escapes that are not needed, and others in upper case."""

    def one(escape: re.Match[str]) -> str:
        char = chr(int(escape[1], 16))
        return char if char.isascii() and (char.isalnum() or char in "-._~") else escape[0].upper()

    return re.sub(r"%([0-9A-Fa-f]{2})", one, text)


def _without_dots(path: str) -> str:
    steps: list[str] = []
    parts = path.split("/")[1:]
    for i, step in enumerate(parts):
        if step == "..":
            del steps[-1:]
        elif step != ".":
            steps.append(step)
        if step in (".", "..") and i == len(parts) - 1:
            steps.append("")
    return "/" + "/".join(steps)

"""JSON objects that were cut: the part that can be read."""

from __future__ import annotations

import json

_CLOSING = {"{": "}", "[": "]"}


def completed(text: str) -> str:
    """``text``, the start of a JSON object, completed: without a truncated member or item, with closing brackets."""
    kept, closing = _scanned(text)
    return text[:kept] + closing


def cut_object(text: str) -> str | None:
    """``text`` completed if it is the start of a JSON object, without its end; None for any other text."""
    if not text.lstrip(" \t\r\n").startswith("{"):
        return None
    try:
        kept, closing = _scanned(text)
        whole = text[:kept] + closing
        json.loads(whole)
    except (IndexError, ValueError, RecursionError):
        return None
    return whole if closing else None


def _scanned(text: str) -> tuple[int, str]:
    """The length of the part of ``text`` that can be read, and the brackets to append to it. Raises ``IndexError`` if
    more brackets are closed than opened."""
    opened: list[str] = []  # closing brackets of the open objects and arrays
    kept = -1
    quoted = escaped = False
    for i, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{}[],":
            if char in _CLOSING:
                opened.append(_CLOSING[char])
            elif char != ",":
                opened.pop()
            kept = i + (char != ",")
    return (0, "{}") if kept < 0 else (kept, "".join(reversed(opened)))

"""The part that can be read of a JSON object that was cut."""

from __future__ import annotations

_CLOSING = {"{": "}", "[": "]"}


def completed(text: str) -> str:
    """``text``, the beginning of a JSON object, as a whole one: without the member or item that was cut, and closed."""
    opened: list[str] = []  # what closes each object and array that is open
    kept, closing = 0, ["{", "}"]  # how much of the text is kept, and what comes after it
    quoted = escaped = False
    for i, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in _CLOSING:
            opened.append(_CLOSING[char])
            kept, closing = i + 1, opened[::-1]
        elif char in "}]":
            opened.pop()
            kept, closing = i + 1, opened[::-1]
        elif char == ",":
            kept, closing = i, opened[::-1]
    return text[:kept] + "".join(closing)

"""The part that can be read of a JSON object that was cut."""

from __future__ import annotations

_CLOSING = {"{": "}", "[": "]"}


def completed(text: str) -> str:
    """``text``, the start of a JSON object, completed: without a truncated member or item, with closing brackets."""
    opened: list[str] = []  # closing brackets of the open objects and arrays
    kept, closing = 0, ["{", "}"]  # length of the kept text, and the brackets to append
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

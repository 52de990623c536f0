"""A schema's conditions on strings and numbers, and the equivalence classes of strings and numbers under them.

Classes are numbered in the order in which they are reached. The class after a byte depends only on the class before it,
and is cached.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from mmserve.constraint.compile.derivatives import DEAD, Automaton
from mmserve.constraint.compile.keywords import is_number, objects_within, values_within

#: Result of ``after`` at the end of a string or a number.
OVER = -1

_QUOTE = ord('"')
_ESCAPED = frozenset(b'"\\')  # not literal in a JSON string
_EACH = range(256)
_NUMERIC = frozenset(b"0123456789+-.eE")
_ESCAPES = {b"\\" + bytes([sign]): char for sign, char in zip(b'"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True)}


@dataclass(frozen=True)
class Conditions:
    """All conditions on strings and numbers in a schema and its subschemas."""

    patterns: tuple[str, ...]
    lengths: tuple[int, ...]  # lengths at which a condition begins or ceases to hold, in characters; ascending
    prefixes: frozenset[str]  # prefixes of member names and of constant strings
    words: frozenset[str]
    bounds: tuple[tuple[str, str], ...]  # digits before and after the point
    counted: bool  # whether there are multiples
    constants: frozenset[bytes]  # prefixes of constant numbers

    @classmethod
    def of(cls, schema: Any) -> Conditions:
        """The conditions of ``schema`` (of ``compile.schema``)."""
        patterns, lengths, words = set[str](), set[int](), set[str]()
        bounds, numbers = set[tuple[str, str]](), set[str]()
        counted = False
        for node in objects_within(schema):  # a property may have a keyword's name; its value then has another type
            words.update(node.get("properties", ()), node.get("required", ()))
            patterns.update(node.get("patternProperties", ()))
            patterns.update(found for found in [node.get("pattern")] if isinstance(found, str))
            for keyword, beyond in (("minLength", 0), ("maxLength", 1)):
                lengths.update(found + beyond for found in [node.get(keyword)] if isinstance(found, int))
            for keyword in ("minimum", "maximum"):
                bounds.update(_digits(found) for found in [node.get(keyword, "")] if isinstance(found, int | float))
            counted |= "multipleOf" in node
            for value in _leaves([node.get("enum"), node.get("const")]):
                if isinstance(value, str):
                    words.add(value)
                else:
                    numbers.add(json.dumps(value))
        return cls(
            tuple(pattern.removeprefix("^").removesuffix("$") for pattern in sorted(patterns)),
            tuple(sorted(lengths)),
            frozenset(word[:n] for word in words for n in range(len(word) + 1)),
            frozenset(words),
            tuple(sorted(bounds)),
            counted,
            frozenset(number[:n].encode() for number in numbers for n in range(1, len(number) + 1)),
        )


class Numbered:
    """Numbers for keys, from 0 on."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self._number: dict[Hashable, int] = {}

    def of(self, key: Hashable) -> int:
        """The number of ``key``, a new one if it has none."""
        found = self._number.setdefault(key, len(self.keys))
        if found == len(self.keys):
            self.keys.append(key)
        return found


class _String(NamedTuple):
    """The state of an open string under the conditions."""

    word: str | None  # the whole string, while it may still become one of the constants
    states: tuple[tuple[int, int], ...]  # number and state of each pattern that may still match
    length: int  # in characters, up to the largest length of a condition
    tail: bytes  # bytes of an incomplete character


class Strings:
    """Classes of open strings, by their bytes after the opening quote; 0 is the class of the empty string."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._longest = max(conditions.lengths, default=0)
        self._patterns = tuple(map(Automaton, conditions.patterns))
        self._strings = Numbered()
        self._moves = list[dict[int, int]]()
        self._groups: list[Sequence[int]] = []  # by byte, the group of bytes with the same transition
        self._alike = _alike({bound for pattern in self._patterns for bound in pattern.bounds})
        begun = tuple((n, 0) for n in range(len(self._patterns)))
        self._of(_String("" if "" in conditions.prefixes else None, begun, 0, b""))

    def after(self, string: int, byte: int) -> int:
        """The class after ``byte``; ``OVER`` after the closing quote.

        Raises ``ValueError`` if it is unknown, or if no such string exists.
        """
        moves, group = self._moves[string], self._groups[string][byte]
        found = moves.get(group)
        if found is None:
            found = moves[group] = self._next(self._strings.keys[string], byte)
        return found

    def alike(self, string: int) -> Sequence[int]:
        """A number for each byte: bytes with the same number lead from class ``string`` to the same class."""
        return self._groups[string]

    def closed(self, string: int) -> Hashable:
        """The class of a closed string."""
        word, states, length, _tail = self._strings.keys[string]
        ends = tuple(n for n, state in states if self._patterns[n].ends(state))
        return word if word in self._conditions.words else None, ends, bisect_right(self._conditions.lengths, length)

    def _next(self, at: _String, byte: int) -> int:
        if byte == _QUOTE and not at.tail:
            return OVER
        tail = at.tail + bytes([byte])
        char = _character(tail)
        if char is None:
            return self._of(at._replace(tail=tail))
        word = None if at.word is None else at.word + char
        states = [(n, self._patterns[n].after(state, char)) for n, state in at.states]
        return self._of(
            _String(
                word if word in self._conditions.prefixes else None,
                tuple((n, after) for n, after in states if after != DEAD),
                min(at.length + 1, self._longest),
                b"",
            )
        )

    def _of(self, string: _String) -> int:
        found = self._strings.of(string)
        if found == len(self._groups):
            self._groups.append(_EACH if string.tail or string.word is not None else self._alike)
            self._moves.append({})
        return found


class Numbers:
    """Classes of numbers by their text so far; 0 is the class of the empty text."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._whole = max((len(whole) for whole, _part in conditions.bounds), default=0)
        self._part = max((len(part) for _whole, part in conditions.bounds), default=0)
        self._classes = Numbered()
        self._first = list[bytes]()  # for each class, the first text that reached it
        self._moves = list[dict[int, int]]()
        self._of(b"")

    def after(self, number: int, byte: int) -> int:
        """The class after ``byte``; ``OVER`` if that is no part of a number."""
        found = self._moves[number].get(byte)
        if found is None:
            found = OVER if byte not in _NUMERIC else self._of(self._first[number] + bytes([byte]))
            self._moves[number][byte] = found
        return found

    def _of(self, raw: bytes) -> int:
        found = self._classes.of(self._key(raw))
        if found == len(self._first):
            self._first.append(raw)
            self._moves.append({})
        return found

    def _key(self, raw: bytes) -> Hashable:
        if not raw or self._conditions.counted or raw in self._conditions.constants:
            return raw
        mantissa, *exponent = re.split(rb"[eE]", raw)
        if exponent:  # only numbers without bounds have one
            return exponent[0][:1] in (b"+", b"-"), exponent[0][-1:].isdigit()
        digits, point, part = mantissa.removeprefix(b"-").decode().partition(".")
        relations = tuple(_relation(digits, point, part, bound) for bound in self._conditions.bounds)
        sizes = min(len(digits), self._whole + 1), min(len(part), self._part + 1)
        # with bounds there is no negative zero, and a negative fraction may not end in one
        zeros = mantissa.strip(b"-0.") == b"", part[-1:] == "0"
        return raw[:1] == b"-", zeros, digits == "0", digits != "", point, part != "", sizes, relations


def _alike(bounds: set[int]) -> list[int]:
    """A number for each byte, equal for literal characters between the same two of ``bounds``."""
    ordered = sorted(bounds)
    return [256 + bisect_right(ordered, i) if 0x20 <= i < 0x80 and i not in _ESCAPED else i for i in range(256)]


def character(raw: bytes) -> str | None:
    """The character of ``raw`` (UTF-8); None if it is incomplete. Raises ``ValueError`` for invalid bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        if len(raw) > 3:
            raise
        return None


def _character(raw: bytes) -> str | None:
    """As ``character``, for the inside of a JSON string; documents have only single-character escapes."""
    if raw[:1] != b"\\":
        return character(raw)
    if len(raw) == 1:
        return None
    if raw not in _ESCAPES:
        raise ValueError("no escape that documents hold")
    return _ESCAPES[raw]


def _digits(number: float) -> tuple[str, str]:
    whole, _point, part = f"{abs(Decimal(repr(number))):f}".partition(".")
    return whole, part.rstrip("0")


def _relation(digits: str, point: str, part: str, bound: tuple[str, str]) -> int:
    """-1, 0 or 1: the digits so far are below, equal to or above a bound's, as far as both have digits."""
    whole, rest = bound
    if not point:
        begun = whole[: len(digits)]
        return 0 if len(digits) > len(whole) else (digits > begun) - (digits < begun)
    if digits != whole:
        return 1 if (len(digits), digits) > (len(whole), whole) else -1
    begun = rest[: len(part)].ljust(len(part), "0")
    return (part > begun) - (part < begun)


def _leaves(value: Any) -> Iterator[str | int | float]:
    """The strings and numbers in a constant, including member names."""
    for each in values_within(value):
        if isinstance(each, dict):
            yield from each
        elif isinstance(each, str) or is_number(each):
            yield each

"""Texts that a constraint cannot tell apart: whatever may follow one of them may follow the other.

A document under a schema is judged by the satisfaction of a few conditions on each string and number in it. So two
beginnings are alike if they have the same structure, and strings and numbers that fare alike under every condition of
the whole schema, wherever it stands. That is finer than what a parser could say, and it is sound: the search for the
shortest answer (``decode.paths.least``) goes on from one of those that are alike.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

from mmserve.constraint import derivatives

_EXPRESSION = re.compile(r"start: TEXT\nTEXT: /(.*)/\n")
_LONGEST = 16 << 10  # characters of a grammar; every one may be work for every character of a text
_NUMERIC = frozenset(b"0123456789+-.eE")
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz")


class Kinds(Protocol):
    """Classes of the beginnings of texts."""

    def begun(self) -> Hashable:
        """The class of the empty text."""
        ...

    def after(self, kind: Any, text: bytes) -> Hashable:
        """The class of a text of class ``kind`` and ``text`` behind it. Raises ``ValueError`` where that is unknown."""
        ...


class Texts:
    """Every text is a class of its own."""

    def begun(self) -> bytes:
        """The class of the empty text."""
        return b""

    def after(self, kind: bytes, text: bytes) -> bytes:
        """The class of a text of class ``kind`` and ``text`` behind it."""
        return kind + text


def kinds_of(grammar: str) -> Kinds:
    """The classes of the beginnings of sentences of ``grammar`` (of ``constraint.grammar``)."""
    if len(grammar) > _LONGEST:
        return Texts()
    try:
        part = json.loads(grammar)["grammars"][0]
        if "json_schema" in part:
            return Documents(part["json_schema"])
        if found := _EXPRESSION.fullmatch(part["lark_grammar"]):
            return Matches(found[1])
    except (ValueError, KeyError, TypeError):  # a user's own grammar
        return Texts()
    return Texts()


@dataclass
class _Interned:
    """Numbers for classes: each class is told by a key, and gone on from by the first text that had it."""

    number: dict[Hashable, int] = field(default_factory=dict)
    first: list[Any] = field(default_factory=list)
    moves: list[dict[int, int]] = field(default_factory=list)  # by the byte that follows

    def of(self, key: Hashable, text: Any) -> int:
        found = self.number.setdefault(key, len(self.first))
        if found == len(self.first):
            self.first.append(text)
            self.moves.append({})
        return found


class Matches:
    """Of a regular expression: alike is that behind which the same of it is left."""

    def __init__(self, expression: str) -> None:
        self._interned = _Interned()
        self._start = self._interned.of(
            (b"", derivatives.beginning(expression)), (b"", derivatives.beginning(expression))
        )

    def begun(self) -> int:
        """The class of the empty text."""
        return self._start

    def after(self, kind: int, text: bytes) -> int:
        """The class of a text of class ``kind`` and ``text`` behind it."""
        interned = self._interned
        for byte in text:
            move = interned.moves[kind].get(byte)
            if move is None:
                tail, rest = interned.first[kind]
                whole, tail = _characters(tail + bytes([byte]))
                for char in whole:
                    rest = derivatives.behind(rest, char)
                move = interned.moves[kind][byte] = interned.of((tail, rest), (tail, rest))
            kind = move
        return kind


@dataclass(frozen=True)
class _Frame:
    """An open array or object: its bracket, a class of what stands in it, and the latest sign there, spaces aside."""

    bracket: int
    history: int
    sign: int


@dataclass(frozen=True)
class _Place:
    """A beginning: what is open, and the last string, number or literal, if that is not at its end."""

    frames: tuple[_Frame, ...]
    mode: str  # "plain", "string", "number", "literal"
    raw: bytes = b""


class Documents:
    """Of a schema, as ``constraint.schema`` writes it."""

    def __init__(self, schema: Any) -> None:
        conditions = _Conditions.of(schema)
        self._strings, self._numbers = _Strings(conditions), _Numbers(conditions)
        # A value that is over is of no more interest, unless it tells which of several schemas is the one.
        self._telling = any("anyOf" in node or _nested(node.get("enum")) for node in _nodes(schema))
        self._interned = _Interned()
        self._histories: dict[Hashable, int] = {}
        self._start = self._kind(_Place((_Frame(0, self._history(-1, 0), 0),), "plain"))

    def begun(self) -> int:
        """The class of the empty text."""
        return self._start

    def after(self, kind: int, text: bytes) -> int:
        """The class of a text of class ``kind`` and ``text`` behind it."""
        interned = self._interned
        for byte in text:
            move = interned.moves[kind].get(byte)
            if move is None:
                move = interned.moves[kind][byte] = self._kind(self._next(interned.first[kind], byte))
            kind = move
        return kind

    def _next(self, place: _Place, byte: int) -> _Place:
        raw = place.raw + bytes([byte])
        match place.mode:
            case "string":
                if byte != ord('"') or _open_escape(place.raw):
                    return _Place(place.frames, "string", raw)
                closed, frame = self._strings.closed(place.raw), place.frames[-1]
                is_name = frame.bracket == ord("{") and frame.sign != ord(":")
                return self._noted(place, closed, 0) if is_name else self._valued(place, closed)
            case "number" if byte in _NUMERIC:
                return _Place(place.frames, "number", raw)
            case "number":
                place = self._valued(place, self._numbers.key(place.raw))
            case "literal" if byte in _LETTERS:
                return _Place(place.frames, "literal", raw)
            case "literal":
                place = self._valued(place, place.raw)
        if byte == ord('"'):
            return _Place(place.frames, "string")
        if byte in b"-0123456789":
            return _Place(place.frames, "number", bytes([byte]))
        if byte in _LETTERS:
            return _Place(place.frames, "literal", bytes([byte]))
        if byte in b"[{":
            return _Place((*place.frames, _Frame(byte, self._history(-1, byte), 0)), "plain")
        if byte in b"]}" and len(place.frames) > 1:
            return self._valued(_Place(place.frames[:-1], "plain"), (byte, place.frames[-1].history))
        return self._noted(place, byte, byte)

    def _valued(self, place: _Place, kind: Hashable) -> _Place:
        """Behind a value of class ``kind``."""
        return self._noted(place, ("value", kind if self._telling else None), 0)

    def _noted(self, place: _Place, more: Hashable, sign: int) -> _Place:
        *outer, frame = place.frames
        sign = frame.sign if sign == ord(" ") else sign
        return _Place((*outer, _Frame(frame.bracket, self._history(frame.history, more), sign)), "plain")

    def _history(self, before: int, more: Hashable) -> int:
        return self._histories.setdefault((before, more), len(self._histories))

    def _kind(self, place: _Place) -> int:
        key: Hashable = place.raw
        if place.mode == "string":
            key = self._strings.key(place.raw)
        elif place.mode == "number":
            key = self._numbers.key(place.raw)
        return self._interned.of((place.frames, place.mode, key), place)


@dataclass(frozen=True)
class _Conditions:
    """Everything that a schema says of strings and numbers, wherever it says it."""

    patterns: tuple[derivatives.Rest, ...]
    lengths: tuple[int, ...]  # characters from which on a condition holds, or no longer holds; ascending
    prefixes: frozenset[str]  # of names and of strings among the constants
    words: frozenset[str]
    bounds: tuple[tuple[str, str], ...]  # digits before and behind the point
    counted: bool  # whether there are multiples
    constants: frozenset[bytes]  # beginnings of the numbers among the constants

    @classmethod
    def of(cls, schema: Any) -> _Conditions:
        patterns, lengths, words = set[str](), set[int](), set[str]()
        bounds, numbers = set[tuple[str, str]](), set[str]()
        counted = False
        for node in _nodes(schema):  # a property may have a keyword's name: what it says then is of another type
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
            tuple(derivatives.beginning(pattern.removeprefix("^").removesuffix("$")) for pattern in sorted(patterns)),
            tuple(sorted(lengths)),
            frozenset(word[:n] for word in words for n in range(len(word) + 1)),
            frozenset(words),
            tuple(sorted(bounds)),
            counted,
            frozenset(number[:n].encode() for number in numbers for n in range(1, len(number) + 1)),
        )


class _Strings:
    """Strings by what they are to the conditions on strings; ``raw`` is what stands behind the opening quote."""

    def __init__(self, conditions: _Conditions) -> None:
        self._conditions = conditions
        self._longest = max(conditions.lengths, default=0)
        self._seen: dict[str, tuple[derivatives.Rest, ...]] = {"": conditions.patterns}

    def key(self, raw: bytes) -> Hashable:
        """Of a string that goes on."""
        text, tail = _content(raw)
        word = text if text in self._conditions.prefixes else None
        return word, self._rests(text), min(len(text), self._longest), tail

    def closed(self, raw: bytes) -> Hashable:
        """Of a string that is over."""
        text, _tail = _content(raw)
        word = text if text in self._conditions.words else None
        return word, tuple(map(derivatives.ends, self._rests(text))), bisect_right(self._conditions.lengths, len(text))

    def _rests(self, text: str) -> tuple[derivatives.Rest, ...]:
        known = len(text)
        while text[:known] not in self._seen:
            known -= 1
        rests = self._seen[text[:known]]
        for i in range(known, len(text)):
            rests = tuple(derivatives.behind(rest, text[i]) for rest in rests)
            self._seen[text[: i + 1]] = rests
        return rests


class _Numbers:
    """Numbers by what they are to the conditions on numbers."""

    def __init__(self, conditions: _Conditions) -> None:
        self._conditions = conditions
        self._whole = max((len(whole) for whole, _part in conditions.bounds), default=0)
        self._part = max((len(part) for _whole, part in conditions.bounds), default=0)

    def key(self, raw: bytes) -> Hashable:
        """Of a number, whether it goes on or not."""
        if self._conditions.counted or raw in self._conditions.constants:
            return raw
        mantissa, *exponent = re.split(rb"[eE]", raw)
        if exponent:  # only numbers without bounds have one
            return exponent[0][:1] in (b"+", b"-"), exponent[0][-1:].isdigit()
        digits, point, part = mantissa.removeprefix(b"-").decode().partition(".")
        relations = tuple(_relation(digits, point, part, bound) for bound in self._conditions.bounds)
        sizes = min(len(digits), self._whole + 1), min(len(part), self._part + 1)
        # beside bounds there is no negative zero, and a negative fraction may not end in one
        zeros = mantissa.strip(b"-0.") == b"", part[-1:] == "0"
        return raw[:1] == b"-", zeros, digits == "0", digits != "", point, part != "", sizes, relations


def _digits(number: float) -> tuple[str, str]:
    whole, _point, part = f"{abs(Decimal(repr(number))):f}".partition(".")
    return whole, part.rstrip("0")


def _relation(digits: str, point: str, part: str, bound: tuple[str, str]) -> int:
    """Where the digits so far stand to a bound's, as far as both have them: below, beside or above it."""
    whole, rest = bound
    if not point:
        begun = whole[: len(digits)]
        return 0 if len(digits) > len(whole) else (digits > begun) - (digits < begun)
    if digits != whole:
        return 1 if (len(digits), digits) > (len(whole), whole) else -1
    begun = rest[: len(part)].ljust(len(part), "0")
    return (part > begun) - (part < begun)


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """``value`` and all within it that may be a schema."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(inner)


def _nested(values: Any) -> bool:
    return isinstance(values, list) and any(isinstance(value, list | dict) for value in values)


def _leaves(value: Any) -> Iterator[str | int | float]:
    """The strings and numbers of a constant, names too."""
    match value:
        case bool() | None:
            return
        case str() | int() | float():
            yield value
        case list():
            for inner in value:
                yield from _leaves(inner)
        case dict():
            for name, inner in value.items():
                yield name
                yield from _leaves(inner)


def _open_escape(raw: bytes) -> bool:
    return (len(raw) - len(raw.rstrip(b"\\"))) % 2 == 1


def _content(raw: bytes) -> tuple[str, bytes]:
    """The characters of ``raw``, the inside of a JSON string, and the bytes of one that has only begun."""
    escape = raw[-1:] if _open_escape(raw) else b""
    whole, tail = _characters(raw[: len(raw) - len(escape)])
    text: str = json.loads(f'"{whole}"', strict=False)
    return text, tail + escape


def _characters(raw: bytes) -> tuple[str, bytes]:
    """The characters of ``raw`` (UTF-8), and the bytes of one that has only begun."""
    for size in range(len(raw), max(-1, len(raw) - 4), -1):
        try:
            return raw[:size].decode(), raw[size:]
        except UnicodeDecodeError:
            continue
    raise ValueError("this is no UTF-8")

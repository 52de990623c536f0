"""Regular expressions of users, read as ECMAScript and written again in the part of Rust's syntax that has one meaning.

The two dialects differ in what ``\\d``, ``\\w``, ``\\s``, ``.`` and ``$`` match, and llguidance searches or matches
depending on where a pattern stands. So every class is written out as ranges, and anchors are gone: what comes out is
always matched against the whole string. Look-around and back-references are no regular language's: they are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.constraint import charsets
from mmserve.constraint.charsets import Ranges
from mmserve.constraint.limits import MAX_DEPTH, MAX_REGEX_BYTES, MAX_REPEAT

_ANY = r"(?s:.)*"
_EVERYTHING = (r"(?s:.)", r"[\u{0}-\u{10ffff}]")  # the one flag that is written, and what is read for it
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_SYNTAX = frozenset("^$\\.*+?()[]{}|/-")


class BadPattern(ValueError):
    """A pattern that is malformed, or outside what a grammar can enforce; the message says where and why."""


def _hashed(item: Item) -> int:
    """As of any frozen dataclass, but found once: what is left of an expression is mostly what it was before."""
    parts = vars(item)
    found: int | None = parts.get("hash")
    if found is None:
        found = parts["hash"] = hash((type(item), *parts.values()))
    return found


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges

    __hash__ = _hashed


@dataclass(frozen=True)
class Anchor:
    """``^`` or ``$``."""

    sign: str

    __hash__ = _hashed


@dataclass(frozen=True)
class Group:
    """Alternatives, each a row of items."""

    branches: tuple[tuple[Item, ...], ...]

    __hash__ = _hashed


@dataclass(frozen=True)
class Repeat:
    """``item`` from ``low`` to ``high`` times; None = without end."""

    item: Item
    low: int
    high: int | None

    __hash__ = _hashed


Item = Chars | Anchor | Group | Repeat


def whole(pattern: str) -> str:
    """The expression that matches what ``pattern`` matches whole; ``^`` and ``$`` at its ends change nothing.

    Raises ``BadPattern``.
    """
    return _alternatives(parsed(pattern), search=False)


def searched(pattern: str) -> str:
    """The expression that matches every string in which ``pattern`` is found somewhere. Raises ``BadPattern``."""
    return _alternatives(parsed(pattern), search=True)


def literal(text: str) -> str:
    """The expression that matches ``text`` and nothing else."""
    return "".join(charsets.text_of(charsets.single(ord(char))) for char in text)


def parsed(pattern: str) -> Group:
    """The expression's parts. Raises ``BadPattern``."""
    if len(pattern.encode()) > MAX_REGEX_BYTES:
        raise BadPattern(f"must be at most {MAX_REGEX_BYTES} bytes")
    parser = _Parser(pattern)
    group = parser.group(0)
    if parser.at < len(pattern):
        raise BadPattern(f"unmatched ')' at character {parser.at}")
    if _size(group) > MAX_REPEAT:
        raise BadPattern(f"repeats more than {MAX_REPEAT} characters, written out")
    return group


def written(expression: str) -> Group:
    """The parts of an ``expression`` that ``whole``, ``searched`` or ``literal`` gave. Raises ``BadPattern``."""
    return parsed(expression.replace(*_EVERYTHING))


def _alternatives(group: Group, *, search: bool) -> str:
    return "(?:" + "|".join(_branch(branch, search=search) for branch in group.branches) + ")"


def _branch(branch: tuple[Item, ...], *, search: bool) -> str:
    """One top-level alternative, free of anchors; a group that is all of it may hold anchors itself."""
    if len(branch) == 1 and isinstance(branch[0], Group):
        return _alternatives(branch[0], search=search)
    started = bool(branch) and branch[0] == Anchor("^")
    inner = branch[1:] if started else branch
    ended = bool(inner) and inner[-1] == Anchor("$")
    inner = inner[:-1] if ended else inner
    if started and ended and len(inner) == 1 and isinstance(inner[0], Group):
        return _alternatives(inner[0], search=False)
    body = "".join(_text(item) for item in inner)
    return f"{'' if started or not search else _ANY}{body}{'' if ended or not search else _ANY}"


def _text(item: Item) -> str:
    match item:
        case Chars(ranges):
            return charsets.text_of(ranges)
        case Group(branches):
            return "(?:" + "|".join("".join(map(_text, branch)) for branch in branches) + ")"
        case Repeat(inner, low, high):
            return f"(?:{_text(inner)}){{{low},{'' if high is None else high}}}"
    raise BadPattern("'^' and '$' may stand only at the beginning and at the end of an alternative")


def _size(item: Item) -> int:
    match item:
        case Group(branches):
            return sum(_size(inner) for branch in branches for inner in branch)
        case Repeat(inner, low, high):
            return _size(inner) * max(1, low if high is None else high)
    return 1


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def group(self, depth: int) -> Group:
        if depth > MAX_DEPTH:
            raise BadPattern(f"more than {MAX_DEPTH} nested groups")
        branches: list[tuple[Item, ...]] = []
        row: list[Item] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self._take("|"):
                branches.append(tuple(row))
                row = []
            else:
                row.append(self._repeated(self._atom(depth)))
        return Group((*branches, tuple(row)))

    def _atom(self, depth: int) -> Item:
        char = self._next()
        match char:
            case "(":
                return self._parenthesis(depth)
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(charsets.complement(charsets.LINE_ENDS))
            case "^" | "$":
                return Anchor(char)
            case "\\":
                return Chars(self._escape(inside=False))
            case "*" | "+" | "?" | "{":
                raise self._bad(f"{char!r} with nothing before it to repeat")
        return Chars(charsets.single(ord(char)))

    def _parenthesis(self, depth: int) -> Item:
        if self._take("?"):
            if self._take("<") and self.text[self.at : self.at + 1] not in ("=", "!"):
                self.at = self.text.find(">", self.at) + 1 or len(self.text)
            elif not self._take(":"):
                raise self._bad("look-around and flags are not supported")
        inner = self.group(depth + 1)
        if not self._take(")"):
            raise self._bad("a group is not closed")
        return inner

    def _repeated(self, item: Item) -> Item:
        bounds = self._bounds()
        if bounds is None:
            return item
        if isinstance(item, Anchor):
            raise self._bad("an anchor cannot be repeated")
        self._take("?")  # lazy: the same language
        if self._bounds() is not None:
            raise self._bad("a repetition of a repetition needs a group")
        low, high = bounds
        if max(low, high or 0) > MAX_REPEAT:
            raise self._bad(f"a repeat bound must be at most {MAX_REPEAT}")
        if high is not None and high < low:
            raise self._bad("a repeat's upper bound is below its lower one")
        return Repeat(item, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        if not self._take("{"):
            return None
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at : end].partition(",")
        if end < 0 or end - self.at > 24 or not _number(low) or not (_number(high) or not high):
            raise self._bad("'{' must be a repeat bound like {2,5}, or be escaped")
        self.at = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def _class(self) -> Ranges:
        negated = self._take("^")
        if self.text.startswith("]", self.at):
            raise self._bad("']' at the beginning of a class must be escaped: dialects read it differently")
        parts: list[Ranges] = []
        while not self._take("]"):
            low = self._member()
            if self.text[self.at : self.at + 1] == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                parts.append(self._range(low, self._member()))
            else:
                parts.append(low)
        chosen = charsets.union(*parts)
        return charsets.complement(chosen) if negated else chosen

    def _range(self, low: Ranges, high: Ranges) -> Ranges:
        if any(len(end) != 1 or end[0][0] != end[0][1] for end in (low, high)) or low > high:
            raise self._bad("a range must go from one character up to another")
        return charsets.union(((low[0][0], high[0][0]),))

    def _member(self) -> Ranges:
        char = self._next()
        if char == "\\":
            return self._escape(inside=True)
        if char == "[":
            raise self._bad("'[' within a class must be escaped: dialects read it differently")
        if char == "&" and self.text[self.at : self.at + 1] == "&":
            raise self._bad("'&&' within a class must be escaped: dialects read it differently")
        return charsets.single(ord(char))

    def _escape(self, *, inside: bool) -> Ranges:
        char = self._next()
        if char in charsets.CLASSES:
            return charsets.CLASSES[char]
        if char in _CONTROLS:
            return charsets.single(_CONTROLS[char])
        if char == "0" and not _number(self.text[self.at : self.at + 1]):
            return charsets.single(0)
        if char == "b" and inside:
            return charsets.single(0x08)
        if char == "x":
            return self._code(2)
        if char == "u":
            return self._braced() if self._take("{") else self._utf16()
        if char in _SYNTAX or not (char.isalnum() or char == "_"):
            return charsets.single(ord(char))
        raise self._bad(f"'\\{char}' is not supported")

    def _utf16(self) -> Ranges:
        first = self._hex(4)
        if 0xD800 <= first <= 0xDBFF and self.text[self.at : self.at + 2] == "\\u":
            self.at += 2
            second = self._hex(4)
            if 0xDC00 <= second <= 0xDFFF:
                return charsets.single(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00)
        return self._scalar(first)

    def _braced(self) -> Ranges:
        end = self.text.find("}", self.at)
        code = self._hex(end - self.at if 1 <= end - self.at <= 8 else 8)
        if not self._take("}"):
            raise self._bad("'\\u{' is not closed")
        return self._scalar(code)

    def _code(self, digits: int) -> Ranges:
        return self._scalar(self._hex(digits))

    def _scalar(self, code: int) -> Ranges:
        found = charsets.single(code) if code <= 0x10FFFF else ()
        if not found:
            raise self._bad("no character has this code")
        return found

    def _hex(self, digits: int) -> int:
        text = self.text[self.at : self.at + digits]
        if len(text) < digits or any(c not in "0123456789abcdefABCDEF" for c in text):
            raise self._bad(f"{digits} hexadecimal digits are needed")
        self.at += digits
        return int(text, 16)

    def _take(self, char: str) -> bool:
        if self.text.startswith(char, self.at):
            self.at += 1
            return True
        return False

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise self._bad("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _bad(self, reason: str) -> BadPattern:
        return BadPattern(f"{reason}, at character {self.at}")


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit()

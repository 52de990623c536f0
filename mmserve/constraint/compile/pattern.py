"""Users' regular expressions, parsed as ECMAScript and written in the unambiguous subset of Rust's syntax.

The two dialects differ in what ``\\d``, ``\\w``, ``\\s``, ``.`` and ``$`` match, and llguidance searches or matches
depending on the keyword of a pattern. So every class is expanded to ranges, and anchors are removed: the result always
matches the whole string. Look-around and back-references are not regular, and are refused. In addition to ECMAScript's
syntax, that of Python and Rust is accepted if unambiguous: ``(?P<name>…)``, ``\\p{…}``, and the flags ``i`` (letters in
either case), ``s`` (``.`` is any character) and ``u`` (no effect), as ``(?i)`` up to the end of a group or as
``(?i:…)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from mmserve.constraint.compile.expression import (
    CLASSES,
    EVERY,
    LINE_ENDS,
    Anchor,
    BadPattern,
    Chars,
    Group,
    Item,
    Ranges,
    Repeat,
    folded,
    inverse,
    single,
    size_of,
    text_of,
    union,
    with_property,
)
from mmserve.constraint.limits import MAX_DEPTH, MAX_REGEX_BYTES, MAX_REPEAT

_ANY = r"(?s:.)*"
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_FLAGGED = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
_MOST_ROWS = 10_000  # alternatives; anchors in groups multiply them
_PROPERTY = 60  # maximum length of the name of a Unicode property
_SYNTAX = frozenset("^$\\.*+?()[]{}|/-")
_NAMED = frozenset(CLASSES.values())


def whole(pattern: str) -> str:
    """The expression that matches exactly the strings that ``pattern`` fully matches; ``^`` and ``$`` at its ends have
    no effect.

    Raises ``BadPattern``.
    """
    return text_of(matched(pattern))


def matched(pattern: str) -> Group:
    """The parsed form of ``whole``, without anchors. Raises ``BadPattern``."""
    found = _unanchored(parsed(pattern))
    text_of(found)  # refuses remaining anchors
    return found


def terminal(pattern: str, flags: str = "") -> Group:
    """The parsed form of an expression with Python's ``flags`` that matches within a text: anchors are refused as well.

    Raises ``BadPattern``.
    """
    found = parsed(pattern, frozenset(flags))
    text_of(found)
    return found


def searched(pattern: str) -> str:
    """The expression that matches every string in which ``pattern`` is found somewhere. Raises ``BadPattern``."""
    return _alternatives(parsed(pattern), search=True)


def parsed(pattern: str, flags: frozenset[str] = frozenset()) -> Group:
    """The parsed expression. Raises ``BadPattern``."""
    if len(pattern.encode()) > MAX_REGEX_BYTES:
        raise BadPattern(f"must be at most {MAX_REGEX_BYTES} bytes")
    group = (parser := _Parser(pattern, flags)).group(0)
    if parser.at < len(pattern):
        raise BadPattern(f"unmatched ')' at character {parser.at}")
    if size_of(group) > MAX_REPEAT:
        raise BadPattern(f"repeats more than {MAX_REPEAT} characters, written out")
    return group


def _unanchored(group: Group) -> Group:
    """``group`` without anchors at the ends of its alternatives, which have no effect in a full match."""
    return Group(tuple(map(_row, _rows(group))))


def _rows(group: Group) -> list[tuple[Item, ...]]:
    """The alternatives of ``group``, expanded. Raises ``BadPattern``."""
    found = list(islice((row for branch in group.branches for row in _spread(branch)), _MOST_ROWS + 1))
    if len(found) > _MOST_ROWS:
        raise BadPattern(f"more than {_MOST_ROWS} alternatives with and without '^' and '$'")
    return found


def _spread(branch: tuple[Item, ...]) -> Iterator[tuple[Item, ...]]:
    """``branch``; one row for each alternative if a group at its end has alternatives with an anchor there."""
    for at, sign in ((0, "^"), (len(branch) - 1, "$")):
        if branch and isinstance(group := branch[at], Group):
            rows = _rows(group)
            if any(row and row[0 if sign == "^" else -1] == Anchor(sign) for row in rows):
                for row in rows:
                    yield from _spread((*branch[:at], *row, *branch[at + 1 :]))
                return
    yield branch


def _ends(branch: tuple[Item, ...]) -> tuple[bool, tuple[Item, ...], bool]:
    """Whether ``branch`` begins with an anchor, the items between, and whether it ends with an anchor."""
    started = branch[:1] == (Anchor("^"),)
    ended = branch[started:][-1:] == (Anchor("$"),)
    return started, branch[started : len(branch) - ended], ended


def _row(branch: tuple[Item, ...]) -> tuple[Item, ...]:
    started, inner, ended = _ends(branch)
    if len(inner) == 1 and isinstance(inner[0], Group) and started == ended:
        return (_unanchored(inner[0]),)
    return inner


def _alternatives(group: Group, *, search: bool) -> str:
    return "(?:" + "|".join(_branch(each, search=search) for each in _rows(group)) + ")"


def _branch(branch: tuple[Item, ...], *, search: bool) -> str:
    """One top-level alternative without anchors; if it is a single group, that may contain anchors."""
    if len(branch) == 1 and isinstance(branch[0], Group):
        return _alternatives(branch[0], search=search)
    started, inner, ended = _ends(branch)
    if started and ended and len(inner) == 1 and isinstance(inner[0], Group):
        return _alternatives(inner[0], search=False)
    body = "".join(text_of(item) for item in inner)
    return f"{'' if started or not search else _ANY}{body}{'' if ended or not search else _ANY}"


#: Supported flags, and those without effect on matches.
_FLAGS = frozenset("isu")


class _Parser:
    def __init__(self, text: str, flags: frozenset[str] = frozenset()) -> None:
        self.text = text
        self.at = 0
        self.flags = self._supported(flags)

    def group(self, depth: int) -> Group:
        if depth > MAX_DEPTH:
            raise BadPattern(f"more than {MAX_DEPTH} nested groups")
        outer = self.flags
        branches: list[tuple[Item, ...]] = []
        row: list[Item] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self._take("|"):
                branches.append(tuple(row))
                row = []
            elif (atom := self._atom(depth)) is not None:
                row.append(self._repeated(atom))
        self.flags = outer
        return Group((*branches, tuple(row)))

    def _atom(self, depth: int) -> Item | None:
        """The next atom; None if it only sets flags."""
        char = self._next()
        match char:
            case "(":
                return self._parenthesis(depth)
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(EVERY if "s" in self.flags else inverse(LINE_ENDS))
            case "^" | "$":
                return Anchor(char)
            case "\\":
                return Chars(self._folded(self._escape(inside=False)))
            case "*" | "+" | "?" | "{":
                raise self._bad(f"{char!r} with nothing before it to repeat")
        return Chars(self._folded(single(ord(char))))

    def _parenthesis(self, depth: int) -> Item | None:
        outer = self.flags
        if self._take("?") and not self._take(":"):
            if (self._take("P<") or self._take("<")) and self.text[self.at : self.at + 1] not in ("=", "!"):
                self.at = self.text.find(">", self.at) + 1 or len(self.text)
            elif self._flagged():
                return None  # applies up to the end of the surrounding group
        inner = self.group(depth + 1)
        self.flags = outer
        if not self._take(")"):
            raise self._bad("a group is not closed")
        return inner

    def _flagged(self) -> bool:
        """Read flags. Returns whether they apply to what follows the parentheses, rather than to their contents."""
        found = _FLAGGED.match(self.text, self.at)
        if found is None:
            raise self._bad("look-around, back-references and atomic groups are not supported")
        on, off, end = found.groups()
        self.at = found.end()
        self.flags = (self.flags | self._supported(frozenset(on))) - self._supported(frozenset(off or ""))
        return bool(end == ")")

    def _supported(self, flags: frozenset[str]) -> frozenset[str]:
        if unknown := "".join(sorted(flags - _FLAGS)):
            raise self._bad(f"the flag {unknown[0]!r} is not supported")
        return flags

    def _folded(self, ranges: Ranges) -> Ranges:
        """``ranges`` in either case if the flag ``i`` is set; ``\\w`` and ``\\W`` have both cases anyway."""
        return folded(ranges) if "i" in self.flags and ranges not in _NAMED else ranges

    def _repeated(self, item: Item) -> Item:
        bounds = self._bounds()
        if bounds is None:
            return item
        if isinstance(item, Anchor):
            raise self._bad("an anchor cannot be repeated")
        (low, high), lazy = bounds, self._take("?")
        if self._bounds() is not None:
            raise self._bad("a repetition of a repetition needs a group")
        if max(low, high or 0) > MAX_REPEAT:
            raise self._bad(f"a repeat bound must be at most {MAX_REPEAT}")
        if high is not None and high < low:
            raise self._bad("a repeat's upper bound is below its lower one")
        return Repeat(item, low, high, lazy)

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
                low = self._range(low, self._member())
            parts.append(self._folded(low))
        chosen = union(*parts)
        return inverse(chosen) if negated else chosen

    def _range(self, low: Ranges, high: Ranges) -> Ranges:
        if any(len(end) != 1 or end[0][0] != end[0][1] for end in (low, high)) or low > high:
            raise self._bad("a range must go from one character up to another")
        return union(((low[0][0], high[0][0]),))

    def _member(self) -> Ranges:
        char = self._next()
        if char == "\\":
            return self._escape(inside=True)
        if char == "[":
            raise self._bad("'[' within a class must be escaped: dialects read it differently")
        if char == "&" and self.text[self.at : self.at + 1] == "&":
            raise self._bad("'&&' within a class must be escaped: dialects read it differently")
        return single(ord(char))

    def _escape(self, *, inside: bool) -> Ranges:
        char = self._next()
        if char in CLASSES:
            return CLASSES[char]
        if char in _CONTROLS:
            return single(_CONTROLS[char])
        if char in ("p", "P"):
            having = self._property()
            return having if char == "p" else inverse(having)
        if char == "0" and not _number(self.text[self.at : self.at + 1]):
            return single(0)
        if char == "b" and inside:
            return single(0x08)
        if char == "x":
            return self._scalar(self._hex(2))
        if char == "u":
            return self._braced() if self._take("{") else self._utf16()
        if char in _SYNTAX or not char.isalnum():
            return single(ord(char))
        raise self._bad(f"'\\{char}' is not supported")

    def _property(self) -> Ranges:
        name, end = self._next(), self.text.find("}", self.at)
        if name == "{":
            if not self.at < end <= self.at + _PROPERTY:
                raise self._bad("'\\p{' must be followed by the name of a Unicode property and '}'")
            name, self.at = self.text[self.at : end], end + 1
        if not all(char.isascii() and (char.isalnum() or char in "_=- ") for char in name):
            raise self._bad("'\\p' must be followed by the name of a Unicode property")
        try:
            return with_property(name)
        except ValueError as error:
            raise self._bad(str(error)) from error

    def _utf16(self) -> Ranges:
        first = self._hex(4)
        if 0xD800 <= first <= 0xDBFF and self.text[self.at : self.at + 2] == "\\u":
            self.at += 2
            second = self._hex(4)
            if 0xDC00 <= second <= 0xDFFF:
                return single(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00)
        return self._scalar(first)

    def _braced(self) -> Ranges:
        end = self.text.find("}", self.at)
        code = self._hex(end - self.at if 1 <= end - self.at <= 8 else 8)
        if not self._take("}"):
            raise self._bad("'\\u{' is not closed")
        return self._scalar(code)

    def _scalar(self, code: int) -> Ranges:
        if code > 0x10FFFF or not single(code):
            raise self._bad("no character has this code")
        return single(code)

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

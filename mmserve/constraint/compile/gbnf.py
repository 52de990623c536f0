"""llama.cpp's GBNF, read into ``syntax``.

The language is that of llama.cpp's ``grammars/README.md`` and ``src/llama-grammar.cpp`` but for its tokens (``<…>``),
and with alternatives that begin on a new line. Repetitions may be repeated.
"""

from __future__ import annotations

from bisect import bisect_left

from mmserve.constraint.compile.charsets import Ranges, complement, single, union
from mmserve.constraint.compile.expression import Chars
from mmserve.constraint.compile.syntax import (
    EMPTY,
    Definition,
    Either,
    Literal,
    Matching,
    Node,
    Ref,
    Row,
    Syntax,
    Times,
)
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import MAX_DEPTH, MAX_REPEAT

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_CODES = {"x": 2, "u": 4, "U": 8}
_LARGEST = 0x10FFFF


def read_gbnf(text: str) -> Syntax:
    """The grammar that ``text`` is. Raises ``Refused``, with the rule and the line of what is wrong."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise Refused.at("", "gbnf", "must have a rule named root")
    return Syntax("root", rules)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._rule = text, 0, ""
        self._ends = [i for i, char in enumerate(text) if char == "\n"]

    def rules(self) -> dict[str, Definition]:
        """All rules by their names."""
        found: dict[str, Definition] = {}
        self._space(newlines=True)
        while self._at < len(self._text):
            line = self._line()
            self._rule = ""
            name = self._name()
            self._rule = name
            if name in found:
                raise self._bad(f"is defined twice, first on line {found[name].line}")
            self._space(newlines=True)
            if not self._take("::="):
                raise self._bad("'::=' must follow the name of a rule")
            self._space(newlines=True)
            found[name] = Definition(self._either(0), line)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._bad(f"unexpected {self._text[self._at]!r}")
            self._space(newlines=True)
        return found

    def _either(self, depth: int) -> Node:
        options = [self._row(depth)]
        while self._bar():
            self._space(newlines=True)
            options.append(self._row(depth))
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _bar(self) -> bool:
        """Take ``|``, also from the beginning of the next line."""
        before = self._at
        self._space(newlines=True)
        if self._take("|"):
            return True
        self._at = before
        return False

    def _row(self, depth: int) -> Node:
        parts = list[Node]()
        while (part := self._part(depth)) is not None:
            self._space(newlines=depth > 0)
            while (bounds := self._bounds()) is not None:
                part = Times(part, *bounds)
                self._space(newlines=depth > 0)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Row(tuple(parts)) if parts else EMPTY

    def _part(self, depth: int) -> Node | None:
        char = self._text[self._at : self._at + 1]
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if self._take("."):
            return Matching(Chars(complement(())))
        if self._take("("):
            if depth >= MAX_DEPTH:
                raise self._bad(f"more than {MAX_DEPTH} nested groups")
            self._space(newlines=True)
            inner = self._either(depth + 1)
            self._space(newlines=True)
            if not self._take(")"):
                raise self._bad("a group is not closed")
            return inner
        if char in ("<", "!"):
            raise self._bad("special tokens have no text and cannot be part of an answer")
        if char in ("*", "+", "?", "{"):
            raise self._bad(f"{char!r} with nothing before it to repeat")
        return Ref(self._name(), self._line()) if _word(char) else None

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if not self._take("{"):
            return None
        low = self._number()
        high = low
        if self._take(","):
            self._space(newlines=True)
            high = self._number()
        elif low is None:
            raise self._bad("'{' must be followed by a number")
        if not self._take("}"):
            raise self._bad("a repeat bound is not closed")
        if max(low or 0, high or 0) > MAX_REPEAT:
            raise self._bad(f"a repeat bound must be at most {MAX_REPEAT}")
        if high is not None and high < (low or 0):
            raise self._bad("a repeat's upper bound is below its lower one")
        return low or 0, high

    def _number(self) -> int | None:
        self._space(newlines=True)
        begin = self._at
        while self._text[self._at : self._at + 1] in tuple("0123456789"):
            self._at += 1
        digits = self._text[begin : self._at]
        self._space(newlines=True)
        if len(digits) > 9:
            raise self._bad(f"a repeat bound must be at most {MAX_REPEAT}")
        return int(digits) if digits else None

    def _literal(self) -> Node:
        self._at += 1
        text = ""
        while not self._take('"'):
            text += self._char("a literal")
        return Literal(text)

    def _class(self) -> Node:
        self._at += 1
        negated = self._take("^")
        parts = list[Ranges]()
        while not self._take("]"):
            low = high = self._char("a class")
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char("a class")
            if high < low:
                raise self._bad("a range must go from one character up to another")
            parts.append(((ord(low), ord(high)),))
        chosen = union(*parts)
        return Matching(Chars(complement(chosen) if negated else chosen))

    def _char(self, within: str) -> str:
        char = self._text[self._at : self._at + 1]
        if char in ("", "\n", "\r"):
            raise self._bad(f"{within} is not closed")
        self._at += 1
        if char != "\\":
            return char
        escaped = self._text[self._at : self._at + 1]
        self._at += 1
        if escaped in _CODES:
            digits = self._text[self._at : self._at + _CODES[escaped]]
            if len(digits) < _CODES[escaped] or any(c not in "0123456789abcdefABCDEF" for c in digits):
                raise self._bad(f"'\\{escaped}' needs {_CODES[escaped]} hexadecimal digits")
            self._at += len(digits)
            if int(digits, 16) > _LARGEST or not single(int(digits, 16)):
                raise self._bad(f"no character has the code {digits}")
            return chr(int(digits, 16))
        if escaped not in _ESCAPES:
            raise self._bad(f"'\\{escaped}' is not supported")
        return _ESCAPES[escaped]

    def _name(self) -> str:
        begin = self._at
        while _word(self._text[self._at : self._at + 1]):
            self._at += 1
        if begin == self._at:
            raise self._bad("the name of a rule must begin here")
        return self._text[begin : self._at]

    def _space(self, *, newlines: bool) -> None:
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "#":
                while self._at < len(self._text) and self._text[self._at] not in "\r\n":
                    self._at += 1
            elif char in " \t" or (newlines and char in "\r\n"):
                self._at += 1
            else:
                break

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _line(self) -> int:
        return bisect_left(self._ends, self._at) + 1

    def _bad(self, reason: str) -> Refused:
        line = self._line()
        where = f"line {line}, rule {self._rule!r}" if self._rule else f"line {line}"
        return Refused.at(f"/{line}", "gbnf", f"{where}: {reason}")


def _word(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char in ("-", "_"))

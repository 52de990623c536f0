"""The common part of readers of grammar dialects (Lark, GBNF): a recursive-descent parser that makes ``syntax``.

A dialect sets the tokens of its text, and reads its definitions and the elements of its sequences.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import dataclass

from mmserve.constraint.compile.expression import Ranges, single, union
from mmserve.constraint.compile.syntax import (
    EMPTY,
    Both,
    Definition,
    Either,
    Node,
    Row,
    Syntax,
    Times,
)
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import MAX_DEPTH, MAX_REPEAT

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


@dataclass(frozen=True)
class Word:
    """A token of a grammar's text."""

    kind: str  # a group of the reader's ``words``, "json", or "end"
    text: str
    at: int


class Reader:
    """A recursive-descent parser: the common part of grammar dialects.

    ``dialect`` names the dialect in errors, ``root`` is its start rule. ``words``: the tokens of a text; the first
    matching group is taken. ``escapes``: string escapes other than codes. ``named``: the prefix of definition names in
    error messages.
    """

    dialect: str
    root: str
    words: re.Pattern[str]
    escapes: dict[str, str]
    named = ""

    def __init__(self, text: str) -> None:
        self.text, self.name = text, ""  # name of the current definition
        self.lines = [i for i, char in enumerate(text) if char == "\n"]
        self.rules, self.terminals = dict[str, Definition](), dict[str, Definition]()
        self.skipped, self.warnings = list[Node](), list[str]()
        self.found, self.next = self._split(), 0

    def grammar(self) -> Syntax:
        """The whole grammar. Raises ``Refused``, with the line of the error."""
        self._newlines()
        while self._word.kind != "end":
            self.name = ""
            self._item()
            if self._word.kind not in ("newline", "end"):
                raise self._unexpected()
            self._newlines()
        if self.root not in self.rules:
            raise Refused.at("", self.dialect, f"must have a rule named {self.root}")
        return Syntax(self.root, self.rules, self.terminals, tuple(self.skipped), tuple(self.warnings))

    def _item(self) -> None:
        """Read a definition or a statement."""
        raise NotImplementedError

    def _atom(self, depth: int) -> Node:
        """The next element of a sequence, without its repetition."""
        raise NotImplementedError

    def _begins_an_item(self) -> bool:
        """Whether the next non-empty line cannot continue an alternative."""
        return False

    def _split(self) -> list[Word]:
        found, at = list[Word](), 0
        while at < len(self.text):
            word = self.words.match(self.text, at)
            if word is None:
                raise self._bad(at, f"unexpected {self.text[at]!r}")
            kind = word.lastgroup or ""
            if kind not in ("comment", "space"):
                found.append(Word(kind, word[0], at))
            at = word.end()
            if word[0] == "%json":
                end = self._end_of_json(at)
                found.append(Word("json", self.text[at:end], at))
                at = end
        return [*found, Word("end", "", at)]

    def _end_of_json(self, at: int) -> int:
        begin = at + len(self.text[at:]) - len(self.text[at:].lstrip())
        try:
            return json.JSONDecoder().raw_decode(self.text, begin)[1]
        except (ValueError, RecursionError) as error:
            raise self._bad(at, f"is not followed by JSON: {error}", "%json") from error

    def _define(self, name: str, node: Node, at: int, into: dict[str, Definition]) -> None:
        if name in into:
            self.name = name
            raise self._bad(at, f"is defined twice, first on line {into[name].line}")
        into[name] = Definition(node, self._line(at))

    def _either(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._bad(self._word.at, f"more than {MAX_DEPTH} nested groups")
        options = [self._both(depth)]
        while self._bar(depth):
            options.append(self._both(depth))
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _bar(self, depth: int) -> bool:
        """Consume ``|``, also at the beginning of the next line."""
        before = self.next
        self._newlines()
        if self._is("|"):
            if depth or not self._begins_an_item():
                self._newlines()
            return True
        if not depth:  # newlines are white space within parentheses
            self.next = before
        return False

    def _both(self, depth: int) -> Node:
        parts = [self._row(depth)]
        while self._is("&"):
            parts.append(self._row(depth))
        if self._is("->"):
            self._take()  # an alternative's name in parse trees
        return parts[0] if len(parts) == 1 else Both(tuple(parts))

    def _row(self, depth: int) -> Node:
        parts = list[Node]()
        while True:
            if depth:
                before = self.next
                self._newlines()
                if self._word.text == "|":
                    self.next = before
            if self._word.kind in ("newline", "end") or self._word.text in ("|", ")", "]", "&", "->"):
                return parts[0] if len(parts) == 1 else Row(tuple(parts)) if parts else EMPTY
            node = self._atom(depth)
            while (bounds := self._bounds()) is not None:
                node = Times(node, *bounds)
            parts.append(node)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._is(sign):
                return bounds
        if self._word.text == "~" and self.found[self.next + 1].kind == "number":
            self._take()
            low = self._number()
            return self._checked(low, self._number() if self._is("..") else low)
        if not self._is("{"):
            return None
        low = 0 if self._word.text == "," else self._number()
        high: int | None = low
        if self._is(","):
            high = None if self._word.text == "}" else self._number()
        if not self._is("}"):
            raise self._unexpected("a repeat bound is not closed")
        return self._checked(low, high)

    def _checked(self, low: int, high: int | None) -> tuple[int, int | None]:
        if max(low, high or 0) > MAX_REPEAT:
            raise self._bad(self._word.at, f"a repeat bound must be at most {MAX_REPEAT}")
        if low < 0 or (high is not None and high < low):
            raise self._bad(self._word.at, "a repeat's upper bound is below its lower one")
        return low, high

    def _closed(self, node: Node, sign: str) -> Node:
        self._newlines()
        if not self._is(sign):
            raise self._unexpected(f"{sign!r} is missing")
        return node

    def _range(self, word: Word, low: str, high: str) -> Ranges:
        """The characters from ``low`` to ``high``; ``word`` is used in errors."""
        if len(low) != 1 or len(high) != 1 or high < low:
            raise self._bad(word.at, "a range must go from one character up to another")
        return union(((ord(low), ord(high)),))

    def _unescaped(self, word: Word, text: str) -> str:
        """``text``, a part of ``word``, with its escapes decoded."""

        def char(found: re.Match[str]) -> str:
            code = found[1] or found[2] or found[3]
            if code is not None:
                if int(code, 16) > 0x10FFFF or not single(int(code, 16)):
                    raise self._bad(word.at, f"no character has the code {code}")
                return chr(int(code, 16))
            if found[4] not in self.escapes:
                raise self._bad(word.at, f"'\\{found[4]}' is not supported in a string")
            return self.escapes[found[4]]

        return _ESCAPE.sub(char, text)

    @property
    def _word(self) -> Word:
        return self.found[self.next]

    def _take(self) -> Word:
        word = self.found[self.next]
        if word.kind != "end":
            self.next += 1
        return word

    def _is(self, sign: str) -> bool:
        found = self._word.kind == "sign" and self._word.text == sign
        self.next += found
        return found

    def _newlines(self) -> None:
        while self._word.kind == "newline":
            self.next += 1

    def _number(self) -> int:
        word = self._take()
        if word.kind != "number" or len(word.text) > 9:
            raise self._bad(word.at, "a number is missing")
        return int(word.text)

    def _line(self, at: int) -> int:
        return bisect_left(self.lines, at) + 1

    def _unexpected(self, why: str = "") -> Refused:
        found = "the end" if self._word.kind == "end" else "the end of the line"
        shown = found if self._word.kind in ("newline", "end") else repr(self._word.text[:40])
        return self._bad(self._word.at, f"unexpected {shown}" + (f"; {why}" if why else ""))

    def _bad(self, at: int, reason: str, keyword: str = "") -> Refused:
        line = self._line(at)
        where = f"line {line}, {self.named}{self.name!r}" if self.name else f"line {line}"
        return Refused.at(f"/{line}", keyword or self.dialect, f"{where}: {reason}")

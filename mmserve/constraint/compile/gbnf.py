"""llama.cpp's GBNF, read into ``syntax``.

The language is that of llama.cpp's ``grammars/README.md`` and ``src/llama-grammar.cpp``, without its tokens (``<…>``),
and with alternatives that begin on a new line. Repetitions may be repeated.
"""

from __future__ import annotations

import re

from mmserve.constraint.compile.expression import Chars, inverse, union
from mmserve.constraint.compile.reader import Reader
from mmserve.constraint.compile.syntax import Literal, Matching, Node, Ref

_CHAR = r"(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|[^\\])"
#: A character of a class, or a range.
_MEMBER = re.compile(rf"({_CHAR})(?:-({_CHAR}))?", re.DOTALL)
_NOT_CLOSED = {'"': "a literal is not closed", "[": "a class is not closed"}


class GbnfReader(Reader):
    """A reader of GBNF grammars."""

    dialect, root, named = "gbnf", "root", "rule "
    escapes = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '\\"[]-^'}}  # noqa: RUF012
    words = re.compile(
        r"(?P<comment>\#[^\r\n]*)"
        r"|(?P<space>[ \t]+)"
        r"|(?P<newline>[\r\n])"
        r'|(?P<string>"(?:\\.|[^"\\\r\n])*")'
        r"|(?P<class>\[\^?(?:\\.|[^\]\\\r\n])*\])"
        r"|(?P<number>[0-9]+(?![A-Za-z0-9_-]))"
        r"|(?P<name>[A-Za-z0-9_-]+)"
        r"|(?P<special>[<!])"
        r"|(?P<sign>::=|[|(){},.*+?])"
        r"|(?P<wrong>.)"
    )

    def _item(self) -> None:
        word = self._take()
        if word.kind not in ("name", "number"):
            raise self._bad(word.at, "the name of a rule must begin here")
        self.name = word.text
        self._newlines()
        if not self._is("::="):
            raise self._bad(self._word.at, "'::=' must follow the name of a rule")
        self._newlines()
        self._define(self.name, self._either(0), word.at, self.rules)

    def _bounds(self) -> tuple[int, int | None] | None:
        begin = self.next
        if self._word.text == "{":  # a newline is white space within bounds
            while self._word.kind != "end" and self._word.text != "}":
                self.next += 1
            self.found[begin : self.next] = [word for word in self.found[begin : self.next] if word.kind != "newline"]
            self.next = begin
        return super()._bounds()

    def _atom(self, depth: int) -> Node:
        word = self._take()
        match word.kind, word.text:
            case "string", _:
                return Literal(self._unescaped(word, word.text[1:-1]))
            case "class", _:
                found = _MEMBER.findall(word.text[1:-1].removeprefix("^"))
                members = [[self._unescaped(word, end or low) for end in (low, high)] for low, high in found]
                chosen = union(*(self._range(word, low, high) for low, high in members))
                return Matching(Chars(inverse(chosen) if word.text[1] == "^" else chosen))
            case _, ".":
                return Matching(Chars(inverse(())))
            case _, "(":
                return self._closed(self._either(depth + 1), ")")
            case "name" | "number", _:
                return Ref(word.text, self._line(word.at))
            case "special", _:
                raise self._bad(word.at, "special tokens have no text and cannot be part of an answer")
        if word.kind == "wrong" and word.text in _NOT_CLOSED:
            raise self._bad(word.at, _NOT_CLOSED[word.text])
        self.next -= 1
        raise self._unexpected()

"""Lark grammars, read into ``syntax``.

The language is that of Lark's own ``lark/grammars/lark.lark`` (lark-parser/lark, 9bae961), without templates, imports
of files, ``%declare``, ``%override`` and ``%extend``, and with what llguidance adds to it (``docs/syntax.md`` there):
``{m,n}``, ``&`` and ``~`` in terminals, and ``%json``. Aliases, priorities and the marks ``?`` and ``!`` are for parse
trees: the language is the same without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mmserve.constraint.compile.expression import BadPattern, Chars, literal_of
from mmserve.constraint.compile.pattern import terminal
from mmserve.constraint.compile.reader import Reader, Word
from mmserve.constraint.compile.syntax import Json, Literal, Matching, Node, Not, Ref, Times
from mmserve.constraint.compile.terminals import COMMON
from mmserve.constraint.findings import Finding, Refused

#: Compiles the JSON text of a schema in a grammar to its node. Raises ``Refused``.
Schemas = Callable[[str, int], tuple[Json, tuple[Finding, ...]]]


class LarkReader(Reader):
    """A reader of Lark grammars; ``schemas`` reads the schemas in one."""

    dialect, root = "lark", "start"
    escapes = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\", '"': '"'}  # noqa: RUF012
    words = re.compile(
        r"(?P<comment>//[^\n]*|\#[^\n]*)"
        r"|(?P<space>[ \t\f]+|\\\r?\n)"
        r"|(?P<newline>\r?\n)"
        r'|(?P<string>"(?:\\.|[^"\\\n])*"i?)'
        r"|(?P<regexp>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)"
        r"|(?P<statement>%[a-z]+)"
        r"|(?P<token>_?[A-Z][_A-Z0-9]*(?:-[_A-Z0-9]+)*)"
        r"|(?P<rule>_*[a-z][_a-z0-9]*(?:-[_a-z0-9]+)*)"
        r"|(?P<number>[+-]?[0-9]+)"
        r"|(?P<special><[^>\n]*>)"
        r"|(?P<sign>->|\.\.|[:|()\[\]{},.~&*+?!@=])"
    )

    def __init__(self, text: str, schemas: Schemas) -> None:
        super().__init__(text)
        self.schemas = schemas

    def _item(self) -> None:
        while self._is("?") or self._is("!"):  # marks for parse trees
            pass
        word = self._take()
        if word.kind in ("rule", "token"):
            self._definition(word)
        elif word.text == "%ignore":
            self.skipped.append(self._either(0))
        elif word.text == "%import":
            self._import(word)
        elif word.kind == "statement":
            raise self._bad(word.at, "is not supported", word.text)
        else:
            raise self._bad(word.at, "a rule, a terminal or a statement must begin here")

    def _definition(self, word: Word) -> None:
        self.name = word.text
        if self._word.text == "[":
            raise self._bad(word.at, "attributes of rules are not supported", "[…]")
        if self._word.text == "{":
            raise self._bad(word.at, "templates are not supported", "{…}")
        if self._is("."):
            self._number()  # priorities choose between parse trees
        if not self._is(":"):
            raise self._unexpected("':' must follow the name of a rule")
        self._define(self.name, self._either(0), word.at, self.rules if word.kind == "rule" else self.terminals)

    def _import(self, statement: Word) -> None:
        path = list[str]()
        if self._is("."):
            raise self._bad(statement.at, "files cannot be imported", "%import")
        while self._word.kind in ("rule", "token"):
            path.append(self._take().text)
            if not self._is("."):
                break
        names = path[-1:]
        if self._is("("):
            names = []
            while not self._is(")"):
                if self._word.kind not in ("rule", "token"):
                    raise self._unexpected("a name to import, or ')', is missing")
                names.append(self._take().text)
                self._is(",")
        else:
            path = path[:-1]
        if path != ["common"]:
            raise self._bad(statement.at, f"only 'common' can be imported from, not {'.'.join(path)!r}", "%import")
        alias = self._take().text if self._is("->") else None
        for name in names:
            if name not in COMMON:
                raise self._bad(statement.at, f"'common' has no {name!r}; it has {', '.join(COMMON)}", "%import")
            self._define(alias or name, Matching(terminal(COMMON[name])), statement.at, self.terminals)

    def _begins_an_item(self) -> bool:
        """Whether the next non-empty line is a definition or a statement."""
        at = self.next
        while self.found[at].kind == "newline":
            at += 1
        first, second = self.found[at : at + 2] if self.found[at].kind != "end" else (self.found[at],) * 2
        return first.kind in ("end", "statement") or first.text in ("?", "!") or second.text in (":", "[", "{", ".")

    def _atom(self, depth: int) -> Node:
        word = self._take()
        match word.kind, word.text:
            case _, "(":
                return self._closed(self._either(depth + 1), ")")
            case _, "[":
                return Times(self._closed(self._either(depth + 1), "]"), 0, 1)
            case _, "~":
                return Not(self._atom(depth + 1))
            case "string", _:
                return self._string(word)
            case "regexp", _:
                return self._expression(word)
            case "rule" | "token", _:
                if self._word.text == "{" and self.found[self.next + 1].kind not in ("number", "sign"):
                    raise self._bad(word.at, "templates are not supported", "{…}")
                return Ref(word.text, self._line(word.at))
            case "statement", "%json":
                return self._schema(self._take())
            case "statement", _:
                raise self._bad(word.at, "is not supported", word.text)
            case "special", _:
                raise self._bad(word.at, "special tokens have no text and cannot be part of an answer", "<token>")
            case _, "@":
                raise self._bad(word.at, "there are no other grammars to refer to", "@")
        self.next -= 1
        raise self._unexpected()

    def _string(self, word: Word) -> Node:
        text = self._unescaped(word, word.text.removesuffix("i")[1:-1])
        if self._is(".."):
            last = self._take()
            end = self._unescaped(last, last.text[1:-1]) if last.kind == "string" else ""
            return Matching(Chars(self._range(word, text, end)))
        return Matching(literal_of(text, either_case=True)) if word.text.endswith("i") else Literal(text)

    def _expression(self, word: Word) -> Node:
        pattern, _, flags = word.text[1:].rpartition("/")
        try:
            return Matching(terminal(pattern, flags))
        except BadPattern as error:
            raise self._bad(word.at, f"/{pattern[:40]}/: {error}") from error

    def _schema(self, word: Word) -> Node:
        line = self._line(word.at)
        try:
            node, warnings = self.schemas(word.text, line)
        except Refused as refused:
            raise Refused(
                *(
                    Finding(f"/{line}{f.pointer}", f.keyword, f"line {line}: %json: {f.reason}")
                    for f in refused.findings
                )
            ) from refused
        self.warnings += [f"/{line}{f.pointer}: {f.keyword} {f.reason}" for f in warnings]
        return node

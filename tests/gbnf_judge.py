"""An independent judge of GBNF: whether a text is a sentence of a grammar.

By the rules of llama.cpp's ``grammars/README.md``: the grammar is split into words, made into rules of two symbols or
fewer, and the text is parsed character by character as in J. Earley, "An Efficient Context-Free Parsing Algorithm"
(Communications of the ACM 13(2), 1970), with rules for the empty text as in J. Aycock, R. N. Horspool (2002).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count

WORD = re.compile(
    r'(?P<space>[ \t]+|\#[^\n]*)|(?P<line>\r?\n)|(?P<text>"(?:\\.|[^"\\])*")|(?P<set>\[(?:\\.|[^\]\\])*\])'
    r"|(?P<name>[A-Za-z0-9_-]+)|(?P<times>\{[0-9, ]*\}|[*+?])|(?P<sign>::=|[|().])",
    re.DOTALL,
)
CHAR = re.compile(r"\\x(..)|\\u(....)|\\U(........)|\\(.)|(.)", re.DOTALL)
Symbol = str | Callable[[str], bool]


def char(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return (
        chr(int(code, 16))
        if code
        else {"n": "\n", "t": "\t", "r": "\r"}.get(found[4], found[4])
        if found[4]
        else found[5]
    )


def one_of(source: str) -> Callable[[str], bool]:
    negated = source.startswith("[^")
    members = list(CHAR.finditer(source[2 if negated else 1 : -1]))
    spans, i = [], 0
    while i < len(members):
        low = high = char(members[i])
        if i + 2 < len(members) and members[i + 1][0] == "-":
            high, i = char(members[i + 2]), i + 2
        spans.append((low, high))
        i += 1
    return lambda c: any(low <= c <= high for low, high in spans) != negated


def is_char(wanted: str) -> Callable[[str], bool]:
    return lambda c: c == wanted


class Judge:
    """Of the grammar ``text``."""

    def __init__(self, text: str) -> None:
        found = ((m.lastgroup or "", m[0]) for m in WORD.finditer(text))
        self.words = [word for word in found if word[0] != "space"]
        self.rules: dict[str, list[tuple[Symbol, ...]]] = {}
        self.fresh = (f"#{n}" for n in count())
        self.at = 0
        while self.skip() and self.at < len(self.words):
            name = self.words[self.at][1]
            self.at += 2
            self.skip()
            self.rules[name] = self.options(nested=False)
        self.empty = self.nullable()

    def skip(self) -> bool:
        while self.at < len(self.words) and self.words[self.at][0] == "line":
            self.at += 1
        return True

    def options(self, *, nested: bool) -> list[tuple[Symbol, ...]]:
        rows: list[tuple[Symbol, ...]] = []
        row: list[Symbol] = []
        while self.at < len(self.words):
            before = self.at
            if nested:
                self.skip()
            kind, word = self.words[self.at]
            if kind == "line":
                self.skip()
                if self.at < len(self.words) and self.words[self.at][1] == "|":
                    continue
                self.at = before
                break
            if word == ")":
                break
            self.at += 1
            if word == "|":
                rows.append(tuple(row))
                row = []
                self.skip()
            elif kind == "times":
                row[-1] = self.times(row[-1], word)
            else:
                row.append(self.symbol(kind, word))
        return [*rows, tuple(row)]

    def symbol(self, kind: str, word: str) -> Symbol:
        if kind == "text":
            return self.rule([tuple(is_char(char(m)) for m in CHAR.finditer(word[1:-1]))])
        if kind == "set":
            return one_of(word)
        if word == ".":
            return lambda c: True
        if word == "(":
            made = self.rule(self.options(nested=True))
            self.at += 1
            return made
        return word

    def times(self, symbol: Symbol, word: str) -> Symbol:
        if word in "*+?":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[word]
        else:
            first, comma, last = word[1:-1].replace(" ", "").partition(",")
            low = int(first or 0)
            high = (int(last) if last else None) if comma else low
        more = next(self.fresh)
        if high is None:
            self.rules[more] = [(), (more, symbol)]
            return self.rule([(*[symbol] * low, more)])
        return self.rule([(symbol,) * n for n in range(low, high + 1)])

    def rule(self, rows: list[tuple[Symbol, ...]]) -> str:
        name = next(self.fresh)
        self.rules[name] = rows
        return name

    def nullable(self) -> set[str]:
        found: set[str] = set()
        while more := {
            name
            for name, rows in self.rules.items()
            if name not in found and any(all(isinstance(s, str) and s in found for s in row) for row in rows)
        }:
            found |= more
        return found

    def takes(self, text: str) -> bool:
        """Whether ``text`` is a sentence."""
        sets: list[dict[tuple[str, tuple[Symbol, ...], int, int], None]] = [{} for _ in range(len(text) + 1)]
        sets[0] = {("root", row, 0, 0): None for row in self.rules["root"]}
        for i in range(len(text) + 1):
            queue = list(sets[i])
            while queue:
                name, row, dot, begin = queue.pop()
                if dot == len(row):
                    after = [(n, r, d + 1, b) for n, r, d, b in list(sets[begin]) if d < len(r) and r[d] == name]
                elif isinstance(symbol := row[dot], str):
                    after = [(symbol, option, 0, i) for option in self.rules[symbol]]
                    after += [(name, row, dot + 1, begin)] if symbol in self.empty else []
                else:
                    if i < len(text) and symbol(text[i]):
                        sets[i + 1][name, row, dot + 1, begin] = None
                    continue
                for state in after:
                    if state not in sets[i]:
                        sets[i][state] = None
                        queue.append(state)
        return any(name == "root" and dot == len(row) and not begin for name, row, dot, begin in sets[-1])

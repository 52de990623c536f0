"""Context-free grammars of users: Lark text checked for what must not be in it, and GBNF turned into Lark."""

from __future__ import annotations

import re

from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import MAX_GRAMMAR_BYTES

#: Comments, strings and expressions, in which nothing has a meaning.
_OPAQUE = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"[i]?|/(?![/*])(?:\\.|[^/\\\n])+/[imslux]*")
#: What would reach past the grammar: other grammars, whole schemas that nothing checked, tokens without text.
_FORBIDDEN = (
    (re.compile(r"%\s*json\b"), "%json", "a schema inside a grammar is not checked; use json_schema"),
    (re.compile(r"%\s*(?:llguidance|lark|regex)\b"), "%", "options and grammars within a grammar are not supported"),
    (re.compile(r"%\s*import\b"), "%import", "nothing is imported"),
    (re.compile(r"@"), "@", "there are no other grammars to refer to"),
    (re.compile(r"<[^>\n]*>"), "<token>", "special tokens have no text and cannot be part of an answer"),
    (re.compile(r"\b(?:max_tokens|temperature|suffix|stop|lazy|capture)\b\s*[\]=,(]"), "[…]", "attributes of rules"),
)


def checked_lark(text: str) -> str:
    """``text``, if it is one self-contained grammar. Raises ``Refused``; whether it compiles is not looked at."""
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise Refused.at("", "lark", f"must be at most {MAX_GRAMMAR_BYTES} bytes")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise Refused.at("", "lark", "holds half of a surrogate pair")
    bare = _OPAQUE.sub(lambda found: " " * len(found[0]), text)
    for pattern, keyword, reason in _FORBIDDEN:
        if found := pattern.search(bare):
            line = bare.count("\n", 0, found.start()) + 1
            raise Refused.at(f"/{line}", keyword, f"line {line}: {reason}")
    if not re.search(r"^\s*start\s*(?:\[[^\]\n]*\]\s*)?:", bare, re.MULTILINE):
        raise Refused.at("", "lark", "must have a rule named start")
    return text

"""The grammar (llguidance's Lark dialect) of answers with tool calls, whose arguments match their schemas."""

from __future__ import annotations

import json
import re

from mmserve.core.tools import ToolChoice, ToolUse
from mmserve.tools.formats import ToolFormat


def openings(use: ToolUse, form: ToolFormat) -> tuple[str, ...]:
    """The beginning of a call under ``use`` in the format ``form``, up to its arguments, for each tool."""
    return tuple(f"{form.opening}{tool.name}{form.middle}" for tool in use.callable)


def tool_grammar(use: ToolUse, form: ToolFormat, *, beside_json: bool = False) -> str:
    """The Lark grammar of all answers under ``use`` in the format ``form``; not for ``ToolChoice.NONE``.

    ``beside_json``: whether an answer may be a JSON document instead of a call. Calls are then split into the same
    lexemes as documents: after a longer lexeme, which llguidance's lexer prefers, only a call could follow.
    """
    tools = list(enumerate(use.callable))
    rules = [f"arguments_{i}: %json {tool.parameters}" for i, tool in tools]
    free = use.choice is ToolChoice.AUTO and use.named is None
    before = ""
    if free and form.after_text:  # text and the opening are one terminal, so that its end is unambiguous
        before = "BEFORE? "
        rules.append(f"BEFORE: /{_without(_mark(form))}/")
    begins = {i: f"{form.opening}{tool.name}{form.middle}" for i, tool in tools}
    if not beside_json:
        rules += [f"BEGIN_{i}: {before}{_literal(text)}" for i, text in begins.items()]
    firsts = {i: _words(text) if beside_json else f"BEGIN_{i}" for i, text in begins.items()}
    calls = " | ".join(f"{first} arguments_{i} {_literal(form.closing)}" for i, first in firsts.items())
    if use.parallel and form.several and use.named is None:
        rules += [
            f"NEXT_{i}: {_literal(f'{form.separator}{form.opening}{tool.name}{form.middle}')}" for i, tool in tools
        ]
        more = " | ".join(f"NEXT_{i} arguments_{i} {_literal(form.closing)}" for i, _ in tools)
        calls = f"({calls}) ({more})*"
    if free:
        rules += [f"TEXT: /{_without(_mark(form)) if form.after_text else _not_begun(form.opening)}/"]
        calls = f"{calls} | TEXT"
    return "\n".join([*rules, f"start: {calls}"]) + "\n"


def _mark(form: ToolFormat) -> str:
    """The string that text before a call must not contain."""
    return form.opening.splitlines()[0]


def _words(text: str) -> str:
    """``text`` as JSON lexemes: strings, and the parts between them."""
    return " ".join(map(_literal, re.findall('"[^"]*"|[^"]+', text)))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A regular expression (without the terminal's slashes) that matches ``text``."""
    return "".join(f"\\{char}" if char in "\\/.^$*+?()[]{}|-" else char for char in text).replace("\n", "\\n")


def _without(mark: str) -> str:
    """A regular expression of non-empty texts that do not contain ``mark``, whose first character must be unique in
    it."""
    first, begun, left = _escaped(mark[0]), "", ""  # after the first: a proper beginning; the same and a way out of it
    for char in reversed(mark[1:]):
        this = _escaped(char)
        begun = f"(?:{this}{begun})?" if left else ""
        left = f"(?:[^{first}{this}]|{this}{left})" if left else f"[^{first}{this}]"
    part = f"(?:{first}{begun})"
    step = f"(?:[^{first}]|{part}*{first}{left})"
    return f"(?:{step}+{part}*|{part}+)"


def _not_begun(opening: str) -> str:
    """A regular expression of non-empty texts that do not begin with ``opening``."""
    found = ""
    for char in reversed(opening):
        this = _escaped(char)
        found = f"(?:[^{this}][\\s\\S]*|{this}{found}?)" if found else f"(?:[^{this}][\\s\\S]*)"
    return found

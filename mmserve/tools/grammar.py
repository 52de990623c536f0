"""The grammar (llguidance's Lark dialect) of the answers that may call tools, each with arguments under its schema."""

from __future__ import annotations

import json

from mmserve.core.tools import ToolChoice, ToolUse
from mmserve.tools.formats import ToolFormat


def tool_grammar(use: ToolUse, form: ToolFormat) -> str:
    """The Lark grammar of all answers under ``use`` in the format ``form``; not for ``ToolChoice.NONE``."""
    tools = [(i, tool) for i, tool in enumerate(use.tools) if use.named in (None, tool.name)]
    rules = [f"arguments_{i}: %json {tool.parameters}" for i, tool in tools]
    free = use.choice is ToolChoice.AUTO and use.named is None
    before = ""
    if free and form.after_text:  # text and the beginning of the call are one terminal: where it ends is then clear
        before = "BEFORE? "
        rules.append(f"BEFORE: /{_without(_mark(form))}/")
    rules += [f"BEGIN_{i}: {before}{_literal(f'{form.opening}{tool.name}{form.middle}')}" for i, tool in tools]
    calls = " | ".join(f"BEGIN_{i} arguments_{i} {_literal(form.closing)}" for i, _ in tools)
    if use.parallel and use.named is None:
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
    """What text before a call must not contain."""
    return form.opening.splitlines()[0]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A regular expression, between the slashes of a terminal, that matches ``text``."""
    return "".join(f"\\{char}" if char in "\\/.^$*+?()[]{}|-" else char for char in text).replace("\n", "\\n")


def _without(mark: str) -> str:
    """A regular expression of the texts, at least one character long, that do not contain ``mark``, whose first
    character it has only once."""
    first, begun, left = _escaped(mark[0]), "", ""  # after the first: a proper beginning; the same and a way out of it
    for char in reversed(mark[1:]):
        this = _escaped(char)
        begun = f"(?:{this}{begun})?" if left else ""
        left = f"(?:[^{first}{this}]|{this}{left})" if left else f"[^{first}{this}]"
    part = f"(?:{first}{begun})"
    step = f"(?:[^{first}]|{part}*{first}{left})"
    return f"(?:{step}+{part}*|{part}+)"


def _not_begun(opening: str) -> str:
    """A regular expression of the texts, at least one character long, that do not begin as ``opening``."""
    found = ""
    for char in reversed(opening):
        this = _escaped(char)
        found = f"(?:[^{this}][\\s\\S]*|{this}{found}?)" if found else f"(?:[^{this}][\\s\\S]*)"
    return found

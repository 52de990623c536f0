"""Formats of tool calls in models' texts, and detection of a chat template's format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """A call is ``opening``, the name, ``middle``, the arguments as JSON, ``closing``; calls are joined by
    ``separator``.

    ``after_text``: whether text may precede calls; otherwise an answer has only calls. ``marks``: strings contained in
    chat templates of this format.
    """

    name: str
    opening: str
    middle: str
    closing: str
    separator: str
    after_text: bool
    several: bool
    marks: tuple[str, ...]


#: NousResearch's Hermes 2 Pro format, also used by Qwen 2.5 and 3 and LLaDA 2 (their chat templates).
HERMES = ToolFormat(
    name="hermes",
    opening='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    closing="}\n</tool_call>",
    separator="\n",
    after_text=True,
    several=True,
    marks=("tools", "<tool_call>", '"arguments'),  # in quotes: Qwen3-Coder's calls are XML between the same tags
)
#: Llama 3.1 to 3.3: JSON-based tool calling (Meta's model cards and chat templates).
LLAMA3 = ToolFormat(
    name="llama3_json",
    opening='{"name": "',
    middle='", "parameters": ',
    closing="}",
    separator="; ",
    after_text=False,
    several=False,
    marks=("tools", '"parameters": ', "ipython"),
)
FORMATS = {each.name: each for each in (HERMES, LLAMA3)}


def format_in(template: str) -> ToolFormat | None:
    """The format of the tool calls in a chat template (Jinja text); None if it is unknown."""
    found = (each for each in FORMATS.values() if all(mark in template for mark in each.marks))
    return next(found, None)

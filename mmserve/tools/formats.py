"""How models write tool calls: the formats known, and which of them a chat template has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """A call is ``opening``, the name, ``middle``, the arguments as JSON, ``closing``; ``separator`` is between two.

    ``after_text``: whether calls may follow text of the answer; otherwise they are all of it. ``marks``: what a chat
    template that renders tools in this format contains.
    """

    name: str
    opening: str
    middle: str
    closing: str
    separator: str
    after_text: bool
    marks: tuple[str, ...]


#: NousResearch's Hermes 2 Pro format, also that of Qwen 2.5 and 3 and of LLaDA 2 (their chat templates).
HERMES = ToolFormat(
    name="hermes",
    opening='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    closing="}\n</tool_call>",
    separator="\n",
    after_text=True,
    marks=("tools", "<tool_call>", "arguments"),
)
#: Llama 3.1 to 3.3: JSON-based tool calling (Meta's model cards and chat templates).
LLAMA3 = ToolFormat(
    name="llama3_json",
    opening='{"name": "',
    middle='", "parameters": ',
    closing="}",
    separator="; ",
    after_text=False,
    marks=("tools", '"parameters": ', "ipython"),
)
FORMATS = {each.name: each for each in (HERMES, LLAMA3)}


def format_in(template: str) -> ToolFormat | None:
    """The format of the tool calls in a chat template (Jinja text); None where it is none of those known."""
    found = (each for each in FORMATS.values() if all(mark in template for mark in each.marks))
    return next(found, None)

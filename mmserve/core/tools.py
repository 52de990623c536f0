"""Tools that an answer may call: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: The JSON schema of the arguments of a tool without parameters.
NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'


class ToolChoice(StrEnum):
    """Whether an answer calls tools."""

    AUTO = "auto"  # the model chooses between text and calls
    NONE = "none"  # text only
    REQUIRED = "required"  # at least one call


@dataclass(frozen=True)
class Tool:
    """A function that the caller can run. ``parameters``: JSON schema (text) of its arguments, an object.

    ``strict``: whether a schema with keywords that a grammar cannot enforce is rejected; otherwise it is enforced in
    part.
    """

    name: str
    parameters: str = NO_PARAMETERS
    description: str = ""
    strict: bool = True


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer or in a chat; ``arguments`` is a JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools of a request. ``named``: the tool that must be called; ``allowed``: tools that may be called, empty =
    all; ``parallel``: whether an answer may have several calls."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    named: str | None = None
    allowed: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        names = self.allowed if self.named is None else (self.named,)
        return tuple(tool for tool in self.tools if not names or tool.name in names)

    @property
    def must_call(self) -> bool:
        """Whether the answer must contain a call."""
        return self.named is not None or self.choice is ToolChoice.REQUIRED

"""Tools that an answer may call: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: The JSON schema of the arguments of a tool that takes none.
NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'


class ToolChoice(StrEnum):
    """Whether an answer calls tools."""

    AUTO = "auto"  # the model chooses between text and calls
    NONE = "none"  # text only
    REQUIRED = "required"  # at least one call


@dataclass(frozen=True)
class Tool:
    """A function that the caller can run. ``parameters``: the JSON schema (text) of its arguments, an object.

    ``strict``: whether a schema with keywords that no grammar can enforce is refused; otherwise it is enforced in part.
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
    """The tools of a request. ``named``: the one that must be called; ``allowed``: those that may be, all of them where
    it is empty; ``parallel``: whether several calls may follow one another in an answer."""

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
        """Whether an answer without a call is none."""
        return self.named is not None or self.choice is ToolChoice.REQUIRED

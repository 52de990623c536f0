"""Tools of a client (functions, Python types or descriptions), and the calls in answers."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmserve.client.schemas import Schema, reader, schema_text
from mmserve.core.request import Message, TextPart
from mmserve.core.tools import ToolCall
from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import TOOL_CHOICES, number_of


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool: its name, a description for the model, and the schema of its arguments (a JSON schema or Python type).

    ``strict``: whether a schema with parts that no grammar can enforce is rejected, or enforced in part.
    """

    name: str
    description: str = ""
    parameters: Schema | None = None
    strict: bool = True


#: A tool: a ``Tool``; a function with annotated parameters; a Python type, whose fields are the arguments; or a mapping
#: in OpenAI's format. Names and descriptions of functions and types are taken from them.
ToolLike = Tool | Callable[..., Any] | type[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Call(ToolCall):
    """A call of a tool. ``arguments``: the JSON text, ``value``: the same as the tool's type."""

    read: Callable[[str], Any] = field(default=json.loads, repr=False, compare=False)

    @property
    def value(self) -> Any:
        """The arguments: an instance of the tool's type, else a dictionary."""
        return self.read(self.arguments)

    def reply(self, result: Any) -> Message:
        """The message with the tool's ``result`` (a text or a JSON value), for the next turn of the chat."""
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return Message("tool", (TextPart(text),), tool_call_id=self.id)


def described(tool: Any, place: str) -> Tool:
    """``tool`` in any supported form, converted; raises ``InvalidArgument`` for others."""
    if isinstance(tool, Tool):
        return tool
    if isinstance(tool, Mapping):
        function = tool.get("function", tool)
        known = {"name", "description", "parameters", "strict"}
        if isinstance(function, Mapping) and "name" in function and set(function) - {"type"} <= known:
            return Tool(**{name: value for name, value in function.items() if name in known and value is not None})
    elif isinstance(tool, type):
        return Tool(name=tool.__name__, description=_first_paragraph(tool), parameters=tool)
    elif callable(tool):
        parameters = _parameters(tool, place)
        return Tool(name=getattr(tool, "__name__", ""), description=_first_paragraph(tool), parameters=parameters)
    raise InvalidArgument.of(place, f"must be a Tool, a function, a type or a mapping with a name, not {tool!r}")


def put_tools(
    request: pb.GenerateRequest,
    tools: Sequence[Any] | None,
    choice: str | None,
    allowed: Sequence[str] = (),
    *,
    parallel: bool | None,
) -> None:
    """Set ``tools`` in ``request``; ``choice``: ``auto``, ``none``, ``required`` or the name of a tool; ``allowed``:
    names of the tools that may be called, empty = all."""
    for i, each in enumerate(tools or ()):
        tool = described(each, f"tools[{i}]")
        try:
            text = "" if tool.parameters is None else schema_text(tool.parameters)
            request.tools.add(
                name=tool.name, description=tool.description, parameters_json_schema=text, strict=tool.strict
            )
        except (TypeError, ValueError) as error:
            raise InvalidArgument.of(f"tools[{i}]", f"cannot be sent: {error}") from error
    if choice is not None and choice not in TOOL_CHOICES.values():
        request.required_tool = choice
    elif choice is not None:
        request.tool_choice = number_of(TOOL_CHOICES, choice, "tool_choice")
    try:
        request.allowed_tools.extend([allowed] if isinstance(allowed, str) else allowed)
    except TypeError as error:
        raise InvalidArgument.of("allowed_tools", f"must be names of tools: {error}") from error
    if parallel is not None:
        request.parallel_tool_calls = parallel


def tool_call(given: Any, place: str) -> ToolCall:
    """Converts ``given`` to a call: one of a result, or a mapping in OpenAI's format."""
    if isinstance(given, ToolCall):
        return given
    if isinstance(given, Mapping):
        function = given.get("function", given)
        if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), str):
            return ToolCall(str(given.get("id", "")), str(function.get("name", "")), arguments)
    raise InvalidArgument.of(place, "must be a call of a result, or a mapping with a name and arguments (JSON text)")


def readers(tools: Sequence[Any] | None) -> dict[str, Callable[[str], Any]]:
    """The functions that convert the arguments of each tool to values, by its name."""
    found = (described(tool, "tools") for tool in tools or ())
    return {tool.name: reader(tool.parameters) or json.loads for tool in found}


def _parameters(function: Callable[..., Any], place: str) -> Any:
    """A typed dictionary of the parameters of ``function``; those with a default are optional."""
    import typing_extensions  # a dependency of pydantic, which types need

    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError, NameError) as error:
        raise InvalidArgument.of(place, f"must be a function with annotations that are known: {error}") from error
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
            raise InvalidArgument.of(place, f"the parameter {name!r} must be annotated, and have a name of its own")
        required = parameter.default is parameter.empty
        fields[name] = hints[name] if required else typing_extensions.NotRequired[hints[name]]
    make: Any = typing_extensions.TypedDict
    return make(getattr(function, "__name__", "Arguments"), fields)


def _first_paragraph(tool: Any) -> str:
    """The first paragraph of the docstring; for a type only its own, because an inherited one describes pydantic, or
    ``dict``."""
    text = inspect.cleandoc(vars(tool).get("__doc__") or "") if isinstance(tool, type) else inspect.getdoc(tool)
    return (text or "").split("\n\n")[0].replace("\n", " ")

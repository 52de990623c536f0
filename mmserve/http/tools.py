"""Tools in bodies: the three APIs' formats of tools and of tool choices."""

from __future__ import annotations

import json
from typing import Any

from mmserve.errors import InvalidArgument
from mmserve.http.fields import Fields
from mmserve.v1 import generation_pb2 as pb

_CHOICES = {"auto": pb.TOOL_CHOICE_AUTO, "none": pb.TOOL_CHOICE_NONE, "required": pb.TOOL_CHOICE_REQUIRED}
#: Type of a choice that allows some of the tools.
_ALLOWED = "allowed_tools"
#: Fields of Anthropic's tools without effect: all tools are in the prompt, and arguments are streamed.
_TOOL_LABELS: dict[str, type] = {
    "cache_control": dict,
    "eager_input_streaming": bool,
    "defer_loading": bool,
    "input_examples": list,
    "allowed_callers": list,
}


def take_chat_tools(fields: Fields, found: pb.GenerateRequest) -> None:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of chat completions into ``found``."""
    add_chat_tools(fields, found)
    _choose(fields, found, nested=True)


def add_chat_tools(fields: Fields, found: pb.GenerateRequest) -> None:
    """Read ``tools`` of chat completions into ``found``."""
    for each in fields.each("tools"):
        with each, each.within("function") as function:
            _of_kind(each, "function")
            _add(function, found, "parameters")


def take_response_tools(fields: Fields, found: pb.GenerateRequest) -> None:
    """The same for Responses, whose functions are not nested."""
    for each in fields.each("tools"):
        with each:
            _of_kind(each, "function")
            _add(each, found, "parameters")
    _choose(fields, found, nested=False)


def take_message_tools(fields: Fields, found: pb.GenerateRequest) -> None:
    """Read ``tools`` and ``tool_choice`` of Anthropic's messages into ``found``."""
    for each in fields.each("tools"):
        with each:
            _of_kind(each, "custom", default="custom")
            for label, kind in _TOOL_LABELS.items():
                each.take(label, kind)
            _add(each, found, "input_schema")
    choice = fields.nested("tool_choice")
    if choice is None:
        return
    kind = choice.take("type", str, "")
    parallel = not choice.take("disable_parallel_tool_use", bool, False)
    if kind == "tool":
        found.required_tool = choice.take("name", str, "")
    elif kind in ("auto", "any", "none"):
        found.tool_choice = _CHOICES["required" if kind == "any" else kind]
    else:
        raise InvalidArgument.of(choice.path("type"), "must be 'auto', 'any', 'tool' or 'none'")
    choice.end()
    if found.tools:
        found.parallel_tool_calls = parallel
    elif kind in ("auto", "none"):
        found.ClearField("tool_use")


def _of_kind(tool: Fields, kind: str, default: str = "") -> None:
    if tool.take("type", str, default) != kind:
        raise InvalidArgument.of(tool.path("type"), f"must be {kind!r}: the server runs no tools of its own")


def _add(tool: Fields, found: pb.GenerateRequest, schema: str) -> None:
    """Add a tool. Without ``strict``, parts of its schema that no grammar can enforce are not enforced."""
    parameters: Any = tool.take(schema, dict)
    found.tools.add(
        name=tool.take("name", str, ""),
        description=tool.take("description", str, ""),
        parameters_json_schema="" if parameters is None else json.dumps(parameters),
        strict=tool.take("strict", bool, False),
    )


def _named(given: Fields, *, nested: bool) -> str:
    """The name of the function in ``given``."""
    _of_kind(given, "function")
    named = given.within("function") if nested else given
    name: str = named.take("name", str, "")
    named.end()
    given.end()
    return name


def _allow(given: Fields, found: pb.GenerateRequest, *, nested: bool) -> None:
    """Read a choice of some of the tools; the prompt contains all of them."""
    given.take("type", str)
    allowed = given.within(_ALLOWED) if nested else given
    mode = allowed.take("mode", str, "")
    if mode not in ("auto", "required"):
        raise InvalidArgument.of(allowed.path("mode"), "must be 'auto' or 'required'")
    found.tool_choice = _CHOICES[mode]
    found.allowed_tools.extend(_named(each, nested=nested) for each in allowed.each("tools"))
    if not found.allowed_tools:
        raise InvalidArgument.of(allowed.path("tools"), "must refer to one of the tools at least")
    allowed.end()
    given.end()


def _choose(fields: Fields, found: pb.GenerateRequest, *, nested: bool) -> None:
    choice = fields.any("tool_choice")
    parallel = fields.take("parallel_tool_calls", bool, True)
    if isinstance(choice, dict) and choice.get("type") == _ALLOWED:
        _allow(Fields(choice, "tool_choice"), found, nested=nested)
    elif isinstance(choice, dict):
        found.required_tool = _named(Fields(choice, "tool_choice"), nested=nested)
    elif isinstance(choice, str) and choice in _CHOICES:
        if found.tools or choice == "required":
            found.tool_choice = _CHOICES[choice]
    elif choice is not None:
        raise InvalidArgument.of("tool_choice", "must be 'none', 'auto', 'required', a function, or allowed_tools")
    if found.tools:
        found.parallel_tool_calls = parallel

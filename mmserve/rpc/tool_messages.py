"""Tools in messages: validation, conversion to core types, and the constraint of their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mmserve.constraint.compile.keywords import ANNOTATIONS, KNOWN, dialect
from mmserve.constraint.compile.references import subschemas
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import MAX_GRAMMAR_BYTES
from mmserve.core.constraint import CallsOrJson, ConstraintMode, ConstraintSpec, JsonSchema, Lark
from mmserve.core.events import Finished
from mmserve.core.info import ModelInfo
from mmserve.core.tools import NO_PARAMETERS, Tool, ToolCall, ToolChoice, ToolUse
from mmserve.errors import FieldViolation, InvalidArgument, MMServeError
from mmserve.tools.formats import FORMATS
from mmserve.tools.grammar import openings, tool_grammar
from mmserve.tools.partial_json import cut_object
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import TOOL_CHOICES

#: Maximum number of tools of a request.
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
#: Maximum total bytes of descriptions and schemas, which the chat template writes.
MAX_TOOL_BYTES = 256 << 10
#: Maximum characters of the arguments of all calls in a chat that were cut.
MAX_CUT_CHARACTERS = 256 << 10
#: Maximum levels of objects and arrays in a schema and in arguments, which chat templates write recursively.
MAX_LEVELS = 256
#: Maximum bytes that a grammar adds for all tools, and for each schema without its name.
_AROUND_ALL, _AROUND = 1 << 10, 250
#: Matches the field of a violation in a line of a grammar, and the location in the schema there.
_IN_GRAMMAR = re.compile(r"constraint\.(?:lark|json_schema)#/([0-9]{1,9})(|/.*)", re.DOTALL)
#: Matches the beginning of the description of a grammar that cannot be compiled: a place in its final form.
_LARK = re.compile(r"^lark: (at [0-9]{1,9}\([0-9]{1,9}\): )?")
#: Matches the line of a grammar at the beginning of a warning; the location in the schema there follows.
_WARNING = re.compile(r"/([0-9]{1,9})(?=/|: )")
#: Keywords without effect on a grammar.
_TEXTS = ("$comment", "default", "deprecated", "description", "example", "examples", "readOnly", "title", "writeOnly")
#: Keywords that have an effect, and for which null is no value.
_NEVER_NULL = KNOWN - ANNOTATIONS - {"const"}
LEVELS = f", with at most {MAX_LEVELS} levels and without halves of surrogate pairs"
_ARGUMENTS = (
    f"must be the JSON text of an object{LEVELS}, or the beginning of one, with at most {MAX_CUT_CHARACTERS} "
    "characters in all calls that were cut"
)
_NAMED = "must be 1 to 128 letters, digits, '_', '.' and '-'"


def wrong_tools(message: pb.GenerateRequest) -> Iterator[tuple[str, str]]:
    """Yields the violations of the tools of ``message``, and of calls and results in its chat: field and
    description."""
    for i, chat in enumerate(message.messages):
        yield from _wrong_calls(chat, f"messages[{i}]")
    yield from _wrong_arguments(message)
    asked = message.WhichOneof("tool_use")
    if not message.tools:
        if asked is not None and message.tool_choice != pb.TOOL_CHOICE_NONE:
            yield asked, "must not be set without tools"
        if message.allowed_tools:
            yield "allowed_tools", "must not be set without tools"
        return
    if len(message.tools) > MAX_TOOLS:
        yield "tools", f"must hold at most {MAX_TOOLS} tools, not {len(message.tools)}"
        return
    if (size := sum(tool.ByteSize() for tool in message.tools)) > MAX_TOOL_BYTES:
        yield "tools", f"must be at most {MAX_TOOL_BYTES} bytes together, not {size}"
        return
    kind = message.constraint.WhichOneof("kind")
    if kind not in (None, "json_schema") and message.tool_choice != pb.TOOL_CHOICE_NONE:
        yield f"constraint.{kind}", "must not be set with tools: an answer that calls none can obey a json_schema alone"
    names, size = [tool.name for tool in message.tools], _AROUND_ALL
    callable_names = set([message.required_tool] if asked == "required_tool" else message.allowed_tools or names)
    for i, tool in enumerate(message.tools):
        if not _NAME.fullmatch(tool.name):
            yield f"tools[{i}].name", _NAMED
        elif tool.name in names[:i]:
            yield f"tools[{i}].name", f"is that of another tool: {tool.name!r}"
        if tool.parameters_json_schema and not is_object(tool.parameters_json_schema):
            yield f"tools[{i}].parameters_json_schema", f"must be the JSON text of a schema that is an object{LEVELS}"
        elif tool.parameters_json_schema and not _takes_objects(json.loads(tool.parameters_json_schema)):
            yield f"tools[{i}].parameters_json_schema", "must have the type object: arguments are one"
        elif tool.name in callable_names:
            size += len(_bare(tool.parameters_json_schema or NO_PARAMETERS).encode()) + 2 * len(tool.name) + _AROUND
    if size > MAX_GRAMMAR_BYTES and message.tool_choice != pb.TOOL_CHOICE_NONE:
        yield "tools", f"must make a grammar of at most {MAX_GRAMMAR_BYTES} bytes, not some {size}; texts do not count"
    if asked == "required_tool" and message.required_tool not in names:
        yield "required_tool", "must be the name of one of the tools"
    elif asked == "required_tool" and message.allowed_tools and message.required_tool not in message.allowed_tools:
        yield "required_tool", "must be one of allowed_tools"
    for i, name in enumerate(message.allowed_tools[: MAX_TOOLS + 1]):
        if i == MAX_TOOLS:
            yield "allowed_tools", f"must hold at most {MAX_TOOLS} names"
        elif name not in names:
            yield f"allowed_tools[{i}]", "must be the name of one of the tools"
    if message.tool_choice and message.tool_choice not in TOOL_CHOICES:
        yield "tool_choice", "must be TOOL_CHOICE_AUTO, TOOL_CHOICE_NONE or TOOL_CHOICE_REQUIRED"


def _wrong_calls(chat: pb.ChatMessage, path: str) -> Iterator[tuple[str, str]]:
    if chat.tool_calls and chat.role != pb.ROLE_ASSISTANT:
        yield f"{path}.tool_calls", "must be empty but in a message of ROLE_ASSISTANT"
    if chat.tool_call_id and chat.role != pb.ROLE_TOOL:
        yield f"{path}.tool_call_id", "must be empty but in a message of ROLE_TOOL"
    if chat.role == pb.ROLE_TOOL and any(part.WhichOneof("part") != "text" for part in chat.parts):
        yield f"{path}.parts", "must be text: the result of a tool is"
    for i, call in enumerate(chat.tool_calls):
        if not _NAME.fullmatch(call.name):
            yield f"{path}.tool_calls[{i}].name", _NAMED


def _wrong_arguments(message: pb.GenerateRequest) -> Iterator[tuple[str, str]]:
    room = MAX_CUT_CHARACTERS
    for i, chat in enumerate(message.messages):
        for j, call in enumerate(chat.tool_calls):
            if not is_object(call.arguments):
                room -= len(call.arguments)
                if room < 0 or not is_object(cut_object(call.arguments) or ""):
                    yield f"messages[{i}].tool_calls[{j}].arguments", _ARGUMENTS


def is_object(text: str) -> bool:
    """Whether ``text`` is a JSON object of at most ``MAX_LEVELS`` levels whose strings are valid Unicode."""
    try:
        found = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    level: list[Any] = [found] if isinstance(found, dict) else []
    for _ in range(MAX_LEVELS):
        if not level:  # of most arguments, after a few levels
            break
        level = [inner for each in level for inner in _inner(each) if isinstance(inner, dict | list)]
    return isinstance(found, dict) and not level


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _inner(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def parse_tools(message: pb.GenerateRequest) -> ToolUse | None:
    """The core form of the valid tools of ``message``; None if none are in its prompt."""
    choice = ToolChoice(TOOL_CHOICES.get(message.tool_choice, "auto"))
    if not message.tools or choice is ToolChoice.NONE:
        return None
    return ToolUse(
        tools=tuple(map(_tool, message.tools)),
        choice=choice,
        named=message.required_tool or None,
        allowed=tuple(message.allowed_tools),
        parallel=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True,
    )


def _takes_objects(schema: dict[str, Any]) -> bool:
    kind = schema.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _tool(tool: pb.Tool) -> Tool:
    text, strict = tool.parameters_json_schema or NO_PARAMETERS, tool.strict if tool.HasField("strict") else True
    schema = _of_objects(text if strict else _without_nulls(text))
    return Tool(tool.name, schema, tool.description, strict=strict)


def _without_nulls(text: str) -> str:
    """The schema in ``text`` without keywords whose value is null, which some programs write for those that are absent
    (``"required": null``)."""
    schema: dict[str, Any] = json.loads(text)
    left: list[Any] = [schema]
    while left:
        if isinstance(node := left.pop(), dict):
            for name in [name for name, value in node.items() if value is None and name in _NEVER_NULL]:
                del node[name]
            left += (inner for _keyword, inner, _pointer in subschemas(node, ""))
    return json.dumps(schema, ensure_ascii=False)


def _of_objects(text: str) -> str:
    """The schema in ``text``, restricted to objects if it does not restrict the type: arguments are always objects."""
    schema: dict[str, Any] = json.loads(text)
    if "$ref" in schema and _is_alone(schema):
        kept = {name: value for name, value in schema.items() if name in ANNOTATIONS or name not in KNOWN}
        schema = {**kept, "allOf": [{"$ref": schema["$ref"]}]}
    return json.dumps({**schema, "type": "object"}, ensure_ascii=False)


def _bare(text: str) -> str:
    """The schema in ``text`` without keywords that have no effect on a grammar."""
    schema: dict[str, Any] = json.loads(text)
    left: list[Any] = [schema]
    while left:
        if isinstance(node := left.pop(), dict):
            for name in _TEXTS:
                node.pop(name, None)
            left += (inner for _keyword, inner, _pointer in subschemas(node, ""))
    return json.dumps(schema, ensure_ascii=False)


def _is_alone(schema: dict[str, Any]) -> bool:
    """Whether keywords next to a reference have no effect in the draft of ``schema``."""
    try:
        return dialect(schema) <= 7
    except Refused:  # unknown draft: reported when the grammar is compiled
        return False


def parse_calls(chat: pb.ChatMessage) -> tuple[ToolCall, ...]:
    """The calls in a message of a chat."""
    return tuple(ToolCall(call.id, call.name, call.arguments) for call in chat.tool_calls)


def tool_constraint(use: ToolUse, info: ModelInfo, text: ConstraintSpec | None = None) -> ConstraintSpec:
    """The constraint of answers under ``use`` for the model of ``info``, which supports tools.

    ``text``: the constraint of answers without calls, a JSON schema; ignored if a tool must be called.
    """
    use = replace(use, tools=tuple(replace(tool, parameters=_bare(tool.parameters)) for tool in use.callable))
    form = FORMATS[info.tool_format]
    strict = tuple(line for line, tool in enumerate(use.tools, 1) if tool.strict)
    if text is None or use.must_call:
        return ConstraintSpec(Lark(tool_grammar(use, form), strict), ConstraintMode.LENIENT)
    assert isinstance(text.kind, JsonSchema)
    calls = tool_grammar(replace(use, choice=ToolChoice.REQUIRED), form, beside_json=True)
    kind = CallsOrJson(calls, openings(use, form), text.kind.text, text.kind.options, strict)
    return replace(text, kind=kind)


def named_warnings(finished: Finished, use: ToolUse) -> Finished:
    """``finished`` of a request under ``use``, with the tool's name in each warning about a line of the grammar of
    calls."""
    return replace(finished, warnings=tuple(_warning(each, use) for each in finished.warnings))


def _warning(text: str, use: ToolUse) -> str:
    found = _WARNING.match(text)
    if found is None or not 0 < int(found[1]) <= len(use.callable):
        return text
    return f"tool {use.callable[int(found[1]) - 1].name!r}: {text[found.end() :].removeprefix(': ')}"


def named_tools(error: MMServeError, use: ToolUse) -> MMServeError:
    """``error`` of a request under ``use``, with the tool's name for each refused line of the grammar of calls."""
    if not isinstance(error, InvalidArgument) or not error.violations:
        return error
    named = tuple(_of_tool(each, use) for each in error.violations)
    return (
        error if named == error.violations else InvalidArgument(*named)
    )  # keeps additional fields of subclasses such as ``DoesNotFit``


def _of_tool(wrong: FieldViolation, use: ToolUse) -> FieldViolation:
    if wrong.field == "constraint.lark":  # the grammar as a whole
        one = _schema_of(use.callable[0], use) if len(use.callable) == 1 else "tools"
        return FieldViolation(one, _LARK.sub("", wrong.description))
    found = _IN_GRAMMAR.fullmatch(wrong.field)
    line = int(found[1]) if found else 0
    if found is None or not 0 < line <= len(use.callable):  # which have the first lines, see ``tool_grammar``
        return wrong
    field = _schema_of(use.callable[line - 1], use)
    why = wrong.description.replace(f"line {line}: %json: ", "", 1)
    return FieldViolation(f"{field}#{found[2]}" if found[2] else field, why)


def _schema_of(tool: Tool, use: ToolUse) -> str:
    """The field of the schema of ``tool``."""
    return f"tools[{use.tools.index(tool)}].parameters_json_schema"

"""Anthropic's messages: bodies to ``GenerateRequest``, and events to messages and streams."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from mmserve.core.events import Delta, Draft, Event, Finished, Prefilled, ToolCallDelta, Usage
from mmserve.errors import FailedPrecondition, InvalidArgument, MMServeError
from mmserve.http import api, media
from mmserve.http.api import Neutral, ParsedRequest, draft_line, model_in, own_fields, sse, take_neutral
from mmserve.http.constraints import constrain, format_of
from mmserve.http.content import Placed, add_messages, message, part_of, role_of, text_part
from mmserve.http.errors import openai_error, status_of
from mmserve.http.fields import Fields, copy_fields, merge_own, stops
from mmserve.http.tools import take_message_tools
from mmserve.http.vllm import take_template_options, take_xargs
from mmserve.observe import calls
from mmserve.tools.partial_json import completed
from mmserve.v1 import generation_pb2 as pb

SAMPLING = {**api.SAMPLING, "max_tokens": "sampling.max_new_tokens"}
NAMES = api.names_in_errors(
    SAMPLING,
    {
        "sampling.stop": "stop_sequences",
        "constraint": "output_config.format",
        "stream.alternatives": "mmserve.stream.alternatives",
        **api.names_of_tools("", "input_schema"),
        **api.names_of_messages({"name": "name", "arguments": "input"}, image="source", video="source"),
    },
)
NEUTRAL: Neutral = {
    "service_tier": (("auto", "standard_only"), "must be 'auto' or 'standard_only'"),
    "container": ((), "is not supported"),
    "mcp_servers": (([],), "is not supported"),
}
#: Content blocks in other servers' responses that are not part of the chat.
_THOUGHTS = ("thinking", "redacted_thinking")
#: The ``type`` of an error, by HTTP status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS = {"end": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}


#: Values of ``thinking``: permission to think, which no model here does separately from its answer.
THINKING = ("disabled", "adaptive", "enabled")
#: Context edits without effect if there is no thinking.
_CLEAR_THINKING = "clear_thinking_"


class Messages:
    """``/v1/messages``."""

    names = NAMES

    def read(self, body: dict[str, Any]) -> ParsedRequest:
        fields, found, places = _prompt(body)
        if body.get("max_tokens") is None:
            raise InvalidArgument.of("max_tokens", "is required")
        copy_fields(fields, found, SAMPLING)
        found.sampling.stop.extend(stops(fields, "stop_sequences"))
        stream = found.stream.deltas = found.stream.prefilled = fields.take("stream", bool, False)
        names = constrain(fields, found)
        _output_config(fields, found)
        names |= take_xargs(fields, found)
        names |= merge_own(fields, found)
        take_neutral(fields, NEUTRAL, ())
        with fields.within("metadata") as labels:
            labels.take("user_id", str)
        fields.end()
        return ParsedRequest(found, stream, _Reply(found.model), names, places, fits=True)

    def error(self, error: MMServeError) -> dict[str, Any]:
        status, text = status_of(error), openai_error(error, NAMES)["error"]["message"]
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        body = {"type": "error", "error": {"type": kind, "message": text}}
        return {**body, "request_id": calls.current().request_id}


def read_counted(body: dict[str, Any]) -> tuple[pb.GenerateRequest, dict[str, str]]:
    """The request whose prompt ``/v1/messages/count_tokens`` counts, and the locations of its messages."""
    fields, found, places = _prompt(body)
    _output_config(fields, pb.GenerateRequest())  # not part of the prompt
    fields.end()
    if found.tool_choice == pb.TOOL_CHOICE_NONE:
        del found.tools[:]
    found.ClearField("tool_use")
    return found, places


def _prompt(body: dict[str, Any]) -> tuple[Fields, pb.GenerateRequest, dict[str, str]]:
    """A request with the prompt of ``body``, the remaining fields, and the locations of the messages."""
    fields, found = Fields(body), pb.GenerateRequest()
    found.model = model_in(fields)
    system = fields.any("system")
    if system is not None and system != []:
        found.messages.append(message("system", system, "system", {"text": _text}))
    places = add_messages(found, (m for each in fields.each("messages") for m in _messages(each)))
    found.continue_final_message = bool(found.messages) and _continued(found.messages[-1])
    take_message_tools(fields, found)
    take_template_options(fields, found)
    fields.take("cache_control", dict)  # prefixes are always cached
    with fields.within("thinking") as thinking:
        if thinking.take("type", str, THINKING[0]) not in THINKING:
            raise InvalidArgument.of("thinking.type", f"must be one of {', '.join(map(repr, THINKING))}")
        thinking.take("budget_tokens", int)
        thinking.take("display", str)
    with fields.within("context_management") as context:
        for edit in context.each("edits"):
            if not edit.take("type", str, "").startswith(_CLEAR_THINKING):
                raise InvalidArgument.of(edit.path("type"), "is not supported: no message is changed or left out")
    return fields, found, places


def _continued(last: pb.ChatMessage) -> bool:
    """Whether the answer continues the ``last`` message."""
    return last.role == pb.ROLE_ASSISTANT and not last.tool_calls


def _messages(fields: Fields) -> Iterator[Placed]:
    """A message of the body; tool results in it become separate messages before it."""
    role, content, path = role_of(fields, ("user", "assistant")), fields.any("content"), fields.path("content")
    fields.end()
    if not isinstance(content, list):
        yield Placed(message(role, content, path, {}), fields.path(""))
        return
    found, inner = message(role, [], path, {}), {}
    for i, block in enumerate(content):
        at = f"{path}[{i}]"
        kind = (each := Fields.of(block, at)).any("type")
        if kind == "tool_result" and role == "user":
            yield Placed(_result(each), at)
        elif kind == "tool_use" and role == "assistant":
            inner[f"tool_calls[{len(found.tool_calls)}]"] = at
            found.tool_calls.append(_call(each))
        elif not (kind in _THOUGHTS and role == "assistant"):
            inner[f"content[{len(found.parts)}]"] = at
            found.parts.append(part_of(block, at, {"text": _text, "image": _image, "video": _video}))
    if found.parts or found.tool_calls or not (content or role == "assistant"):
        yield Placed(found, fields.path(""), inner)


def _call(fields: Fields) -> pb.ToolCall:
    with fields:
        for label in ("cache_control", "caller"):
            fields.take(label, dict)
        own, name = fields.take("id", str, ""), fields.take("name", str, "")
        return pb.ToolCall(id=own, name=name, arguments=json.dumps(fields.take("input", dict, {})))


def _result(fields: Fields) -> pb.ChatMessage:
    fields.take("cache_control", dict)
    fields.take("is_error", bool)  # the content describes the error
    content = fields.any("content")
    readers = {"text": _text, "image": _image}
    found = message("tool", "" if content is None else content, fields.path("content"), readers)
    found.tool_call_id = fields.take("tool_use_id", str, "")
    fields.end()
    return found


def _output_config(fields: Fields, found: pb.GenerateRequest) -> None:
    """Structured outputs: ``output_config.format`` with a ``schema``; ``effort`` is a hint."""
    with fields.within("output_config") as config:
        take_neutral(config, {"effort": api.one_of(api.EFFORTS)}, ())
        given = config.nested("format")
    if given is None:
        return
    with given:
        constraint = format_of(given, given)
    if constraint is not None:
        if found.continue_final_message:
            why = "cannot be combined with a last message of the assistant: the answer would not obey it as a whole"
            raise InvalidArgument.of("output_config.format", why)
        if found.HasField("constraint"):
            raise InvalidArgument.of("output_config.format", "cannot be combined with another constraint")
        found.constraint.CopyFrom(constraint)


def _text(fields: Fields) -> pb.ContentPart:
    fields.take("cache_control", dict)
    fields.take("citations", list)
    return text_part(fields)


def _image(fields: Fields) -> pb.ContentPart:
    fields.take("cache_control", dict)
    return media.image(*_source(fields))


def _video(fields: Fields) -> pb.ContentPart:
    return media.video(*_source(fields))


def _source(fields: Fields) -> tuple[str, str]:
    """A source as a URL, and its location."""
    with fields.within("source") as source:
        kind = source.take("type", str, "")
        if kind == "url":
            return source.take("url", str, ""), source.path("url")
        if kind == "base64":
            found = f"data:{source.take('media_type', str, '')};base64,{source.take('data', str, '')}"
            return found, source.path("data")
        raise InvalidArgument.of(source.path("type"), "must be 'base64' or 'url'")


class _Reply:
    """The response to one request."""

    def __init__(self, model: str) -> None:
        self._common = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def whole(self, finished: Sequence[Finished], prompts: Sequence[Prefilled] = ()) -> dict[str, Any]:
        (one,) = finished
        calls = [_tool_use(call.id, call.name, _given(call.arguments)) for call in one.tool_calls]
        if (cut := one.cut_call) is not None:
            calls.append(_tool_use(cut.id, cut.name, _given(completed(cut.arguments))))
        content = [{"type": "text", "text": one.text, "citations": None}] if one.text or not calls else []
        content += calls
        own = {"usage": _usage(one.usage), "mmserve": own_fields(finished)}
        return {**self._common, "content": content, **_end(one), **own}

    def failed(self, body: dict[str, Any]) -> str:
        """See ``Reply.failed``."""
        return sse(body, "error")

    def _start(self, usage: Usage) -> str:
        """The first event of a stream; ``usage``: of the prompt."""
        begun = {**self._common, "content": [], **_end(None), "usage": _usage(usage)}
        return sse({"type": "message_start", "message": begun}, "message_start")

    async def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """``message_start``, content blocks with their deltas, ``message_delta`` with the usage, ``message_stop``."""
        usage, begun = Usage(0, 0, 0), False
        index, kind = -1, ""  # of the current block

        def block(content: dict[str, Any]) -> str:
            nonlocal index, kind
            before = sse({"type": "content_block_stop", "index": index}, "content_block_stop") if index >= 0 else ""
            index, kind = index + 1, content["type"]
            start = {"type": "content_block_start", "index": index, "content_block": content}
            return before + sse(start, "content_block_start")

        def more(delta: dict[str, Any]) -> str:
            return sse({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")

        text = {"type": "text", "text": "", "citations": None}
        async for event in events:
            line = ""
            if isinstance(event, Prefilled):
                usage = event.usage
                continue
            if isinstance(event, Draft):
                line = draft_line(event)
            elif isinstance(event, Delta):
                line = block(text) if kind != "text" else ""
                line += more({"type": "text_delta", "text": event.text})
            elif isinstance(event, ToolCallDelta):
                line = block(_tool_use(event.id, event.name, {})) if event.id else ""
                line += more({"type": "input_json_delta", "partial_json": event.arguments}) if event.arguments else ""
            elif isinstance(event, Finished):
                line = block(text) if index < 0 else ""  # a message has at least one block
                line += sse({"type": "content_block_stop", "index": index}, "content_block_stop")
                own = {"usage": _tokens(event.usage), "mmserve": own_fields([event])}
                line += sse({"type": "message_delta", "delta": _end(event), **own}, "message_delta")
                line += sse({"type": "message_stop"}, "message_stop")
            yield line if begun else self._start(usage) + line
            begun = True


def _given(arguments: str) -> dict[str, Any]:
    """The object in a call's ``arguments`` (JSON text); numbers beyond the range of floats become the maximum."""
    try:
        given: dict[str, Any] = json.loads(arguments, parse_float=_float, parse_int=_integer)
    except RecursionError:
        why = "the arguments of a call are nested too deeply: limit them by the schema of the tool, or use stream"
        raise FailedPrecondition(why) from None
    return given


def _float(text: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _integer(text: str) -> float:
    return int(text) if len(text) <= sys.float_info.max_10_exp else _float(text)


def _tool_use(own: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": own, "name": name, "input": given, "caller": {"type": "direct"}}


def _end(one: Finished | None) -> dict[str, Any]:
    """The reason why the answer ended; all None before its end."""
    reason = None if one is None else _REASONS[one.reason]
    stop = None if one is None else one.stop or None
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """``usage`` in the format of a message."""
    return {
        **_tokens(usage),
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "inference_geo": None,
        "service_tier": "standard",
    }


def _tokens(usage: Usage) -> dict[str, Any]:
    """Prompt tokens that were run, and those read from the cache. Caching is implicit, so none are written
    explicitly."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens_details": None,
        "server_tool_use": None,
    }

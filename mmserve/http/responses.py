"""Open Responses: bodies to ``GenerateRequest``, and events to responses and streams.

Nothing is stored: a conversation is sent in ``input``.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mmserve.core.events import Delta, Draft, Event, Finished, Prefilled, ToolCallDelta
from mmserve.core.tools import ToolCall
from mmserve.errors import InvalidArgument, MMServeError
from mmserve.http import api, media
from mmserve.http.api import Neutral, ParsedRequest, draft_line, model_in, own_fields, sse, take_neutral
from mmserve.http.constraints import constrain, format_of
from mmserve.http.content import Placed, add_messages, message, refusal_part, role_of, text_part
from mmserve.http.errors import openai_error
from mmserve.http.fields import Fields, copy_fields, merge_own, typed
from mmserve.http.logprobs import token_logprobs
from mmserve.http.tools import take_response_tools
from mmserve.http.vllm import take_template_options, take_xargs
from mmserve.v1 import generation_pb2 as pb

SAMPLING = {**api.SAMPLING, **api.PENALTIES, "max_output_tokens": "sampling.max_new_tokens"}
NAMES = api.names_in_errors(
    SAMPLING,
    {
        "messages": "input",
        "constraint": "text.format",
        "stream.alternatives": "top_logprobs",
        "allowed_tools": "tool_choice.tools",
        **api.names_of_tools("", "parameters"),
        **api.names_of_messages({"name": "name", "arguments": "arguments"}, image="image_url"),
    },
)
NEUTRAL: Neutral = {
    "max_tool_calls": ((), "is not supported"),
    "store": ((False, True), "must be true or false; nothing is stored either way"),
    "background": ((False,), "is not supported"),
    "previous_response_id": ((), "is not supported: nothing is stored; send the conversation in input"),
    "conversation": ((), "is not supported: nothing is stored; send the conversation in input"),
    "prompt": ((), "is not supported"),
    "truncation": (("disabled", "auto"), "must be 'disabled' or 'auto'"),
    "service_tier": api.one_of(api.TIERS),
}
#: Values of ``include``: log-probabilities of the tokens, and values without effect here.
LOGPROBS, REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
#: Hints of ``reasoning``: no model here reasons separately from its answer.
HINTS: Neutral = {
    "effort": api.one_of(api.EFFORTS),
    "summary": api.one_of(("auto", "concise", "detailed")),
    "generate_summary": api.one_of(("auto", "concise", "detailed")),
}
LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
#: Fields of a response that repeat those of the request, with their defaults.
_ECHOED: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 0.0,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
#: Fields with a fixed value.
_FIXED: dict[str, Any] = {
    "background": False,
    "error": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "reasoning": None,
    "service_tier": "default",
    "store": False,
}


class Responses:
    """``/v1/responses``."""

    names = NAMES

    def read(self, body: dict[str, Any]) -> ParsedRequest:
        fields, found = Fields(body), pb.GenerateRequest()
        found.model = model_in(fields)
        if (instructions := fields.take("instructions", str)) is not None:
            found.messages.append(message("system", instructions, "instructions", {}))
        found.continue_final_message = fields.take("continue_final_message", bool, _unfinished(body.get("input")))
        places = add_messages(found, _input(fields))
        copy_fields(fields, found, SAMPLING)
        stream = found.stream.deltas = fields.take("stream", bool, False)
        with fields.within("stream_options") as options:
            options.take("include_obfuscation", bool)
        _take_logprobs(fields, found)
        text = _text(fields, found)
        names = constrain(fields, found)
        take_response_tools(fields, found)
        take_template_options(fields, found)
        names |= take_xargs(fields, found)
        names |= merge_own(fields, found)
        take_neutral(fields, NEUTRAL, LABELS)
        with fields.within("reasoning") as reasoning:
            take_neutral(reasoning, HINTS, ())
        for label in ("metadata", "client_metadata"):
            fields.take(label, dict)
        fields.end()
        echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
        tools = [{"description": None, "parameters": None, "strict": False, **tool} for tool in echoed["tools"]]
        return ParsedRequest(
            found, stream, _Reply(found, {**_FIXED, **echoed, "tools": tools, "text": text}), names, places
        )

    def error(self, error: MMServeError) -> dict[str, Any]:
        return openai_error(error, NAMES)


def _take_logprobs(fields: Fields, found: pb.GenerateRequest) -> None:
    """Read ``include`` and ``top_logprobs``, which implies the log-probabilities of the tokens."""
    for i, name in enumerate(fields.take("include", list, [])):
        if name not in (LOGPROBS, REASONING):
            raise InvalidArgument.of(f"include[{i}]", f"must be {LOGPROBS!r}: nothing else can be included")
        found.stream.tokens |= name == LOGPROBS
    if others := fields.take("top_logprobs", int, 0):
        copy_fields(Fields({"top_logprobs": others}), found, {"top_logprobs": "stream.alternatives"})
        found.stream.tokens = True


def _unfinished(given: Any) -> bool:
    """Whether the last item of ``input`` is an incomplete assistant message, which the answer continues, as in vLLM."""
    last = given[-1] if isinstance(given, list) and given else None
    return (
        isinstance(last, dict)
        and (last.get("type") or "message", last.get("role")) == ("message", "assistant")
        and last.get("status") in ("in_progress", "incomplete")
    )


_ITEMS = "must be 'message', 'function_call', 'function_call_output' or 'reasoning'"


def _input(fields: Fields) -> list[Placed]:
    given = fields.any("input")
    if isinstance(given, str):
        return [Placed(message("user", given, "input", {}), "input")]
    found: list[Placed] = []
    for i, item in enumerate(typed(given, list, "input")):
        each = Fields.of(item, f"input[{i}]")
        kind = each.take("type", str, "message")
        if kind == "function_call":
            if not (found and found[-1].message.role == pb.ROLE_ASSISTANT):  # calls belong to the preceding message
                found.append(Placed(message("assistant", [], each.path("type"), {}), each.path("")))
            found[-1].inner[f"tool_calls[{len(found[-1].message.tool_calls)}]"] = each.path("")
            found[-1].message.tool_calls.append(_call(each))
            continue
        if kind == "function_call_output":
            found.append(Placed(_result(each), each.path("")))
            continue
        if kind == "reasoning":  # in other servers' responses
            continue
        if kind != "message":
            raise InvalidArgument.of(each.path("type"), _ITEMS)
        role = role_of(each, ("system", "developer", "user", "assistant"))
        for name in ("id", "status", "phase"):
            each.take(name, str)
        readers = {"input_text": text_part, "output_text": _output, "text": text_part, "input_image": _image}
        readers["refusal"] = refusal_part
        found.append(Placed(message(role, each.any("content"), each.path("content"), readers), each.path("")))
        each.end()
    return found


def _call(fields: Fields) -> pb.ToolCall:
    with fields:
        for name in ("id", "status"):
            fields.take(name, str)
        name, arguments = fields.take("name", str, ""), fields.take("arguments", str, "") or "{}"
        return pb.ToolCall(id=fields.take("call_id", str, ""), name=name, arguments=arguments)


def _result(fields: Fields) -> pb.ChatMessage:
    for name in ("id", "status"):
        fields.take(name, str)
    readers = {"input_text": text_part, "output_text": _output, "input_image": _image}
    found = message("tool", fields.any("output"), fields.path("output"), readers)
    found.tool_call_id = fields.take("call_id", str, "")
    fields.end()
    return found


def _output(fields: Fields) -> pb.ContentPart:
    fields.take("annotations", list)
    fields.take("logprobs", list)
    return text_part(fields)


def _image(fields: Fields) -> pb.ContentPart:
    media.take_detail(fields)
    return media.image(fields.take("image_url", str, ""), fields.path("image_url"))


def _text(fields: Fields, found: pb.GenerateRequest) -> dict[str, Any]:
    """Read ``text``, the format of the answer. Returns it as repeated in a response."""
    with fields.within("text") as text:
        take_neutral(text, {"verbosity": api.one_of(api.VERBOSITIES)}, ())
        given = text.take("format", dict, {"type": "text"})
    with Fields(given, "text.format") as described:
        constraint = format_of(described, described)
    if constraint is not None:
        found.constraint.CopyFrom(constraint)
    return {"format": {"description": None, "strict": True, **given} if "schema" in given else given}


class _Reply:
    """The response to one request."""

    def __init__(self, asked: pb.GenerateRequest, fields: dict[str, Any]) -> None:
        self._logprobs = asked.stream.tokens
        self.numbers = itertools.count()  # of the events of a stream
        self._id, self.item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._common = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": asked.model,
            **fields,
        }

    def whole(self, finished: Sequence[Finished], prompts: Sequence[Prefilled] = ()) -> dict[str, Any]:
        (one,) = finished
        status = "incomplete" if one.reason == "length" else "completed"
        usage = {
            "input_tokens": one.usage.prompt_tokens,
            "output_tokens": one.usage.completion_tokens,
            "total_tokens": one.usage.prompt_tokens + one.usage.completion_tokens,
            "input_tokens_details": {"cached_tokens": one.usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        calls = [_call_item(call, "completed") for call in one.tool_calls]
        calls += [_call_item(one.cut_call, "incomplete")] if one.cut_call is not None else []
        logprobs = token_logprobs(one.tokens) if self._logprobs and not calls else []
        ended = "completed" if calls else status  # text before a call is complete
        output = [self.message(ended, [_part(one.text, logprobs)])] if one.text or not calls else []
        output += calls
        return {
            **self._common,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": usage,
            "mmserve": own_fields(finished),
        }

    async def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """The numbered events of a response: of a message, if there is text, and of each call."""
        begun = {**self._common, "status": "in_progress", "completed_at": None, "incomplete_details": None}
        begun |= {"output": [], "usage": None}
        items = _Items(self)
        first = "".join(items.line(f"response.{name}", response=begun) for name in ("created", "in_progress"))
        async for event in events:
            if isinstance(event, Draft):
                yield first + draft_line(event)
                first = ""
                continue
            if isinstance(event, Delta):
                lines = items.text(event.text)
            elif isinstance(event, ToolCallDelta):
                lines = items.call(event)
            elif isinstance(event, Finished):
                lines = items.end(event)
            else:
                continue
            yield first + "".join(lines)
            first = ""

    def failed(self, body: dict[str, Any]) -> str:
        """The event of an error, with the fields of both OpenAI's events and Open Responses."""
        given = {name: body["error"][name] for name in ("code", "message", "param")}
        return sse({"type": "error", "sequence_number": next(self.numbers), **given, **body}, "error")

    def message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message item."""
        return {"type": "message", "id": self.item, "status": status, "role": "assistant", "content": content}


class _Items:
    """The output items of a streamed response, in order."""

    def __init__(self, reply: _Reply) -> None:
        self._reply = reply
        self._done: list[dict[str, Any]] = []
        self._open: ToolCall | str | None = None  # the current item: a call, or the text of the message

    def line(self, event: str, **fields: Any) -> str:
        """A numbered event."""
        return sse({"type": event, "sequence_number": next(self._reply.numbers), **fields}, event)

    def text(self, delta: str) -> Iterator[str]:
        """Add text to the message, which precedes all calls."""
        if self._open is None:
            self._open = ""
            yield self.line("response.output_item.added", output_index=0, item=self._reply.message("in_progress", []))
            yield self.line("response.content_part.added", **self._place(), part=_part(""))
        if delta:
            self._open = f"{self._open}{delta}"
            yield self.line("response.output_text.delta", **self._place(), delta=delta, logprobs=[])

    def call(self, delta: ToolCallDelta) -> Iterator[str]:
        """Add a part of a call."""
        if delta.id:
            yield from self._close()
            self._open = ToolCall(delta.id, delta.name, "")
            item = _call_item(self._open, "in_progress")
            yield self.line("response.output_item.added", output_index=len(self._done), item=item)
        assert isinstance(self._open, ToolCall)
        if delta.arguments:
            self._open = replace(self._open, arguments=self._open.arguments + delta.arguments)
            event = "response.function_call_arguments.delta"
            yield self.line(event, **self._place(), delta=delta.arguments)

    def end(self, one: Finished) -> Iterator[str]:
        """The end of the last item, and of the response, whose output has all streamed items, including an incomplete
        call."""
        if self._open is None:
            yield from self.text("")
        whole = self._reply.whole([one])
        if isinstance(self._open, ToolCall):
            complete = any(call.id == self._open.id for call in one.tool_calls)
            yield from self._close("completed" if complete else "incomplete")
        else:
            message = whole["output"][0]
            yield from self._close(message["status"], message["content"][0]["logprobs"])
        yield self.line(f"response.{whole['status']}", response={**whole, "output": self._done})

    def _close(self, status: str = "completed", logprobs: Sequence[Any] = ()) -> Iterator[str]:
        if isinstance(self._open, ToolCall):
            item, place = _call_item(self._open, status), self._place()
            yield self.line(
                "response.function_call_arguments.done",
                **place,
                name=self._open.name,
                arguments=self._open.arguments,
            )
        elif isinstance(self._open, str):
            part, place = _part(self._open, logprobs), self._place()
            item = self._reply.message(status, [part])
            yield self.line("response.output_text.done", **place, text=self._open, logprobs=part["logprobs"])
            yield self.line("response.content_part.done", **place, part=part)
        else:
            return
        yield self.line("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)

    def _place(self) -> dict[str, Any]:
        """The fields that locate a delta."""
        if isinstance(self._open, ToolCall):
            return {"item_id": _call_item(self._open, "")["id"], "output_index": len(self._done)}
        return {"item_id": self._reply.item, "output_index": 0, "content_index": 0}


def _call_item(call: ToolCall, status: str) -> dict[str, Any]:
    own = {"id": f"fc_{call.id.removeprefix('call_')}", "call_id": call.id}
    return {"type": "function_call", **own, "name": call.name, "arguments": call.arguments, "status": status}


def _part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

"""Open Responses: their bodies as ``GenerateRequest``, and events as their responses and streams.

Nothing is stored: a conversation travels in ``input``.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mmserve.core.events import Delta, Event, Finished
from mmserve.errors import InvalidArgument, MMServeError
from mmserve.http import media
from mmserve.http.api import Asked, Neutral, own_fields, required, sse, take_neutral
from mmserve.http.constraints import constrain, format_of
from mmserve.http.content import message, role_of, text_part
from mmserve.http.errors import openai_error
from mmserve.http.fields import Fields, copy_fields, merge_own, typed
from mmserve.v1 import generation_pb2 as pb

SAMPLING = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "seed": "sampling.seed",
    "max_output_tokens": "sampling.max_new_tokens",
}
NAMES = {path: name for name, path in SAMPLING.items()} | {
    "messages": "input",
    "constraint": "text.format",
    "diffusion": "mmserve.diffusion",
    "vision": "mmserve.vision",
    "kv_reduction": "mmserve.kv_reduction",
    "image_reuse": "mmserve.image_reuse",
}
_PENALTY = "is not supported; use repetition_penalty"
NEUTRAL: Neutral = {
    "frequency_penalty": ((0, 0.0), _PENALTY),
    "presence_penalty": ((0, 0.0), _PENALTY),
    "top_logprobs": ((0,), "is not supported"),
    "tools": (([],), "is not supported"),
    "tool_choice": (("none", "auto"), "is not supported"),
    "parallel_tool_calls": ((True, False), "must be true or false"),
    "max_tool_calls": ((), "is not supported"),
    "store": ((False, True), "must be true or false; nothing is stored either way"),
    "background": ((False,), "is not supported"),
    "include": (([],), "is not supported"),
    "previous_response_id": ((), "is not supported: nothing is stored; send the conversation in input"),
    "conversation": ((), "is not supported: nothing is stored; send the conversation in input"),
    "prompt": ((), "is not supported"),
    "truncation": (("disabled", "auto"), "must be 'disabled' or 'auto'"),
    "service_tier": (("auto", "default"), "must be 'auto' or 'default'"),
    "reasoning": (({}, {"effort": "none"}), "is not supported: no model here reasons apart from its answer"),
}
LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
#: Fields of a response that repeat those of the request, and their values without one.
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": False,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 0.0,
    "tool_choice": "none",
    "top_p": 1.0,
    "truncation": "disabled",
}
#: Fields that have one value here.
_FIXED: dict[str, Any] = {
    "background": False,
    "error": None,
    "frequency_penalty": 0.0,
    "max_tool_calls": None,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "reasoning": None,
    "service_tier": "default",
    "store": False,
    "tools": [],
    "top_logprobs": 0,
}


class Responses:
    """``/v1/responses``."""

    def read(self, body: dict[str, Any]) -> Asked:
        """As of ``Api.read``."""
        fields, found = Fields(body), pb.GenerateRequest()
        found.model = required(fields, "model", str, "is required; GET /v1/models lists the names")
        if (instructions := fields.take("instructions", str)) is not None:
            found.messages.append(message("system", instructions, "instructions", {}))
        found.messages.extend(_input(fields))
        copy_fields(fields, found, SAMPLING)
        stream = found.stream.deltas = fields.take("stream", bool, False)
        options = fields.nested("stream_options") or Fields({}, "stream_options")
        options.take("include_obfuscation", bool)
        options.end()
        text = _text(fields, found)
        constrain(fields, found)
        merge_own(fields, found)
        take_neutral(fields, NEUTRAL, LABELS)
        fields.take("metadata", dict)
        fields.end()
        echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
        return Asked(found, stream, _Reply(found.model, {**_FIXED, **echoed, "text": text}))

    def error(self, error: MMServeError) -> dict[str, Any]:
        """As of ``Api.error``."""
        return openai_error(error, NAMES)

    def error_line(self, error: MMServeError) -> str:
        """As of ``Api.error_line``; its number is the first, as the stream ends with it."""
        return sse({"type": "error", "sequence_number": 0, **self.error(error)}, "error")


def _input(fields: Fields) -> list[pb.ChatMessage]:
    given = fields.any("input")
    if isinstance(given, str):
        return [message("user", given, "input", {})]
    found = []
    for i, item in enumerate(typed(given, list, "input")):
        each = Fields(typed(item, dict, f"input[{i}]"), f"input[{i}]")
        if each.take("type", str, "message") != "message":
            raise InvalidArgument.of(each.path("type"), "must be 'message'")
        role = role_of(each, ("system", "developer", "user", "assistant"))
        for name in ("id", "status", "phase"):
            each.take(name, str)
        readers = {"input_text": text_part, "output_text": _output, "text": text_part, "input_image": _image}
        found.append(message(role, each.any("content"), each.path("content"), readers))
        each.end()
    return found


def _output(fields: Fields) -> pb.ContentPart:
    fields.take("annotations", list)
    fields.take("logprobs", list)
    return text_part(fields)


def _image(fields: Fields) -> pb.ContentPart:
    if fields.take("detail", str, "auto") != "auto":
        raise InvalidArgument.of(fields.path("detail"), "must be 'auto'; set mmserve.vision for other sizes")
    return media.image(fields.take("image_url", str, ""), fields.path("image_url"))


def _text(fields: Fields, found: pb.GenerateRequest) -> dict[str, Any]:
    """Take ``text``, the format of the answer; the same as a response has it."""
    text = fields.nested("text")
    if text is None:
        return {"format": {"type": "text"}}
    if text.take("verbosity", str, "medium") != "medium":
        raise InvalidArgument.of("text.verbosity", "must be 'medium'")
    given = text.take("format", dict)
    text.end()
    if given is None:
        return {"format": {"type": "text"}}
    described = Fields(given, "text.format")
    constraint = format_of(described, described)
    described.end()
    if constraint is not None:
        found.constraint.CopyFrom(constraint)
    return {"format": {"description": None, "strict": True, **given} if "schema" in given else given}


class _Reply:
    """The answer to one response request."""

    def __init__(self, model: str, fields: dict[str, Any]) -> None:
        self._id, self._item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._common = {"id": self._id, "object": "response", "created_at": int(time.time()), "model": model, **fields}

    def whole(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """As of ``Reply.whole``."""
        (one,) = finished
        status = "incomplete" if one.reason == "length" else "completed"
        usage = {
            "input_tokens": one.usage.prompt_tokens,
            "output_tokens": one.usage.completion_tokens,
            "total_tokens": one.usage.prompt_tokens + one.usage.completion_tokens,
            "input_tokens_details": {"cached_tokens": one.usage.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            **self._common,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._message(status, [_part(one.text)])],
            "usage": usage,
            "mmserve": own_fields(finished),
        }

    async def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """The events of a response with one message of one part, numbered."""
        numbers = itertools.count()
        begun = {**self._common, "status": "in_progress", "completed_at": None, "incomplete_details": None}
        begun |= {"output": [], "usage": None}

        def line(event: str, **fields: Any) -> str:
            return sse({"type": event, "sequence_number": next(numbers), **fields}, event)

        item = {"output_index": 0}
        at = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield line("response.created", response=begun)
        yield line("response.in_progress", response=begun)
        yield line("response.output_item.added", **item, item=self._message("in_progress", []))
        yield line("response.content_part.added", **at, part=_part(""))
        async for event in events:
            if isinstance(event, Delta):
                yield line("response.output_text.delta", **at, delta=event.text, logprobs=[])
            elif isinstance(event, Finished):
                whole = self.whole([event])
                yield line("response.output_text.done", **at, text=event.text, logprobs=[])
                yield line("response.content_part.done", **at, part=_part(event.text))
                yield line("response.output_item.done", **item, item=whole["output"][0])
                yield line(f"response.{whole['status']}", response=whole)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item, "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

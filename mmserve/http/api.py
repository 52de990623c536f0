"""The common parts of the HTTP APIs: reading bodies, and writing responses and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmserve.core.events import Draft, Event, Finished, Prefilled
from mmserve.core.request import TextPart, TokensPart
from mmserve.errors import InvalidArgument, MMServeError
from mmserve.http.fields import Fields
from mmserve.v1 import generation_pb2 as pb

#: Sampling fields with the same name in all APIs, with their field of ``GenerateRequest``. ``top_k``, ``min_p``,
#: ``repetition_penalty`` and ``ignore_eos`` are vLLM's.
SAMPLING = {
    **{n: f"sampling.{n}" for n in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")},
    "ignore_eos": "sampling.ignore_end",
}
#: The same for OpenAI's APIs only.
PENALTIES = {name: f"sampling.{name}" for name in ("frequency_penalty", "presence_penalty")}
#: The field ``template_options`` of ``GenerateRequest``, with its name in bodies.
TEMPLATE_OPTIONS = "chat_template_kwargs"
#: Hints about the length of reasoning and of answers, which no model here uses.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
#: Service tiers of OpenAI's APIs; this server has only one.
TIERS = ("auto", "default", "flex", "priority", "scale")
#: Accepted values by name, with the error for others.
Neutral = Mapping[str, tuple[tuple[Any, ...], str]]


#: vLLM's fields of chats and completions with their default values, which clients may send.
VLLM: Neutral = {
    "min_tokens": ((0,), "is not supported"),
    "stop_token_ids": (([],), "is not supported; use stop"),
    "bad_words": (([],), "is not supported; use logit_bias"),
    "include_stop_str_in_output": ((False,), "is not supported"),
    "skip_special_tokens": ((True,), "must be true: an answer has no special tokens"),
    "spaces_between_special_tokens": ((True, False), "must be true or false"),
    "use_beam_search": ((False,), "is not supported"),
    "length_penalty": ((1.0,), "is not supported"),
    "return_tokens_as_token_ids": ((False,), "is not supported"),
    "priority": ((0,), "is not supported: the priority is that of the tenant"),
}


class Reply(Protocol):
    """Formats the response to one request."""

    def whole(self, finished: Sequence[Finished], prompts: Sequence[Prefilled] = ()) -> dict[str, Any]:
        """The JSON object of a response with the samples ``finished``, in order; ``prompts``: those of its samples, if
        requested."""
        ...

    def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """The same response as server-sent events; each string is one write, with all events that are available
        together."""
        ...

    def failed(self, body: dict[str, Any]) -> str:
        """The event of an error during a stream; ``body``: that of a response with the error."""
        ...


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed body."""

    message: pb.GenerateRequest
    stream: bool
    reply: Reply
    #: Names of fields of ``message`` in this body, if they differ from those of its API.
    names: Mapping[str, str] = field(default_factory=dict)
    #: The location of each message in the body, and of its parts that are elsewhere (``errors.renamed``).
    places: Mapping[str, str] = field(default_factory=dict)
    #: Whether more new tokens than the model's context or ``max_canvas`` are reduced to it.
    fits: bool = False
    #: Additional prompts, each a separate request that is otherwise equal to ``message``.
    prompts: Sequence[TextPart | TokensPart] = ()


class Api(Protocol):
    """One API: its body, response and error formats."""

    @property
    def names(self) -> Mapping[str, str]:
        """Names in bodies of fields of ``GenerateRequest``."""
        ...

    def read(self, body: dict[str, Any]) -> ParsedRequest:
        """The request in ``body``; raises ``InvalidArgument`` with its invalid fields."""
        ...

    def error(self, error: MMServeError) -> dict[str, Any]:
        """The body of a response with ``error``."""
        ...


def sse(data: Mapping[str, Any], event: str = "") -> str:
    """A server-sent event with JSON; ``event``: its name, if it has one."""
    line = f"data: {json.dumps(data)}\n\n"
    return f"event: {event}\n{line}" if event else line


def draft_line(draft: Draft) -> str:
    """A draft as an event of that name, the same in all APIs; an alternative has an id, a text and a probability."""
    names = ("index", "id", "text", "state", "confidence", "alternatives")
    positions = [dict(zip(names, row, strict=True)) for row in draft.rows]
    found = {"sample": draft.sample, "forwards": draft.forwards, "total": draft.total, "positions": positions}
    return sse(found, "draft")


def names_in_errors(sampling: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Names in errors of fields of ``GenerateRequest``, for bodies with ``sampling``; ``own``: those of this API."""
    names = {path: name for name, path in sampling.items()} | {"template_options": TEMPLATE_OPTIONS}
    names |= {"required_tool": "tool_choice"}
    return names | {n: f"mmserve.{n}" for n in ("diffusion", "vision", "kv_reduction", "image_reuse")} | dict(own)


def names_of_messages(calls: Mapping[str, str], **media: str) -> dict[str, str]:
    """Names in errors of fields of messages: those of ``calls``, and of an image and a video in the content."""
    found = {"messages[].parts": "@[].content", "messages[].tool_calls": "@[].tool_calls"}
    found |= {f"messages[].tool_calls[].{own}": f"@[].tool_calls[].{name}" for own, name in calls.items()}
    for kind, name in media.items():
        for source in ("", ".data", ".media_id"):
            found[f"messages[].parts[].{kind}{source}"] = f"@[].content[].{name}"
    return found


def names_of_tools(function: str, schema: str) -> dict[str, str]:
    """Names in errors of fields of tools: ``function`` is the prefix of their fields, ``schema`` the name of the
    arguments' schema."""
    return {
        "tools[].name": f"tools[].{function}name",
        "tools[].parameters_json_schema": f"tools[].{function}{schema}",
    }


def take_neutral(fields: Fields, neutral: Neutral, labels: Sequence[str]) -> None:
    """Accept fields whose values in ``neutral`` have no effect, and ``labels``, which are strings of the caller.

    Raises ``InvalidArgument`` for other values.
    """
    for name, (accepted, why) in neutral.items():
        value = fields.any(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in accepted):
            raise InvalidArgument.of(fields.path(name), why)
    for name in labels:
        fields.take(name, str)


def one_of(accepted: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """An entry of ``Neutral`` for strings."""
    return tuple(accepted), f"must be one of {', '.join(map(repr, accepted))}"


def own_fields(finished: Sequence[Finished]) -> dict[str, Any]:
    """Fields that other servers do not have: forward passes, times (ms, of the slowest sample), edited tokens, whether
    a constrained answer was shortened to end within its budget, and warnings about constraints and policies."""
    times = max((one.times for one in finished), key=lambda each: each.total)
    return {
        "forwards": sum(one.forwards for one in finished),
        "edits": sum(one.edits for one in finished),
        "closed_by_budget": any(one.closed_by_budget for one in finished),
        "times": {name: round(value, 3) for name, value in vars(times).items()},
        "warnings": list(dict.fromkeys(warning for one in finished for warning in one.warnings)),
    }


def model_in(fields: Fields) -> str:
    """The name of the model, which must not be empty: a response repeats it."""
    name: str = fields.take("model", str, "")
    if not name:
        raise InvalidArgument.of("model", "is required; GET /v1/models lists the names")
    return name


def required(fields: Fields, name: str, kind: type, why: str = "is required") -> Any:
    """The value of ``name``; raises ``InvalidArgument`` if it is absent."""
    value = fields.take(name, kind)
    if value is None:
        raise InvalidArgument.of(fields.path(name), why)
    return value

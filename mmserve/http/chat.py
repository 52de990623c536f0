"""OpenAI's chat completions: their bodies as ``GenerateRequest``, and events as their responses and chunks."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from mmserve.core.events import CommittedToken, Delta, Event, Finished
from mmserve.errors import InvalidArgument
from mmserve.http import media
from mmserve.http.fields import Fields, copy_fields, merge_own, typed
from mmserve.rpc.roles import role_number
from mmserve.v1 import generation_pb2 as pb

#: JSON field to field of ``GenerateRequest``. ``max_tokens`` is the older name of ``max_completion_tokens``; ``top_k``,
#: ``min_p`` and ``repetition_penalty`` are vLLM's additions.
SAMPLING = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "seed": "sampling.seed",
    "n": "sampling.n",
    "max_tokens": "sampling.max_new_tokens",
    "max_completion_tokens": "sampling.max_new_tokens",
}
#: The names of ``GenerateRequest``'s fields in errors.
NAMES = {path: name for name, path in SAMPLING.items()} | {
    "sampling.stop": "stop",
    "constraint": "response_format",
    "diffusion": "mmserve.diffusion",
    "vision": "mmserve.vision",
    "kv_reduction": "mmserve.kv_reduction",
    "image_reuse": "mmserve.image_reuse",
}
#: Fields that change nothing here at these values, and are refused at others: name to accepted values, and why.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0, 0.0), "is not supported; use repetition_penalty"),
    "presence_penalty": ((0, 0.0), "is not supported; use repetition_penalty"),
    "logit_bias": (({},), "is not supported"),
    "top_logprobs": ((0,), "is not supported above 0: only chosen tokens have log-probabilities"),
    "tools": (([],), "is not supported"),
    "tool_choice": (("none", "auto"), "is not supported"),
    "parallel_tool_calls": ((True, False), "must be true or false"),
    "functions": (([],), "is not supported"),
    "store": ((False,), "is not supported: nothing is stored"),
    "service_tier": (("auto", "default"), "must be 'auto' or 'default'"),
    "modalities": ((["text"],), "must be ['text']"),
    "reasoning_effort": (("none",), "must be 'none': no model here reasons apart from its answer"),
}
#: Strings that name the caller or the request; they change no answer.
LABELS = ("user", "safety_identifier", "prompt_cache_key")
_ROLES = {"developer": "system"}
_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Asked:
    """A chat completion: the request, and what its response must have."""

    message: pb.GenerateRequest
    stream: bool
    usage_chunk: bool


def asked(body: dict[str, Any]) -> Asked:
    """The request in ``body``; raises ``InvalidArgument`` with the wrong fields."""
    fields, message = Fields(body), pb.GenerateRequest()
    message.model = fields.take("model", str, "")
    if not message.model:
        raise InvalidArgument.of("model", "is required; GET /v1/models lists the names")
    chats = fields.take("messages", list, [])
    message.messages.extend(_chat(chat, f"messages[{i}]") for i, chat in enumerate(chats))
    if {"max_tokens", "max_completion_tokens"} <= {name for name, value in body.items() if value is not None}:
        raise InvalidArgument.of("max_tokens", "and max_completion_tokens are the same: set one of them")
    copy_fields(fields, message, SAMPLING)
    message.sampling.stop.extend(_stops(fields))
    stream = fields.take("stream", bool, False)
    options = fields.nested("stream_options")
    usage_chunk = False
    if options is not None:
        if not stream:
            raise InvalidArgument.of("stream_options", "is only for stream = true")
        usage_chunk = options.take("include_usage", bool, False)
        options.take("include_obfuscation", bool)
        options.end()
    message.stream.deltas = stream
    message.stream.tokens = fields.take("logprobs", bool, False)
    constrain(fields, message)
    merge_own(fields, message)
    for name, (accepted, why) in NEUTRAL.items():
        value = fields.any(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in accepted):
            raise InvalidArgument.of(name, why)
    for name in LABELS:
        fields.take(name, str)
    fields.take("metadata", dict)
    fields.end()
    return Asked(message, stream, usage_chunk)


def _chat(chat: Any, path: str) -> pb.ChatMessage:
    fields = Fields(typed(chat, dict, path), path)
    role = fields.take("role", str, "")
    if role not in ("system", "developer", "user", "assistant"):
        raise InvalidArgument.of(fields.path("role"), "must be 'system', 'developer', 'user' or 'assistant'")
    content = fields.any("content")
    fields.take("name", str)
    fields.take("refusal", str)
    fields.end("is no supported field of a message")
    parts = [pb.ContentPart(text=content)] if isinstance(content, str) else None
    if isinstance(content, list):
        parts = [_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    if parts is None:
        raise InvalidArgument.of(f"{path}.content", "must be a string or an array of parts")
    return pb.ChatMessage(role=pb.Role.Name(role_number(_ROLES.get(role, role))), parts=parts)


def _part(part: Any, path: str) -> pb.ContentPart:
    fields = Fields(typed(part, dict, path), path)
    kind = fields.take("type", str, "")
    if kind == "text":
        found = pb.ContentPart(text=fields.take("text", str, ""))
    elif kind in ("image_url", "video_url"):
        source = fields.nested(kind) or Fields({}, f"{path}.{kind}")
        read = media.image if kind == "image_url" else media.video
        found = read(source.take("url", str, ""), f"{path}.{kind}.url")
        if source.take("detail", str, "auto") != "auto":
            raise InvalidArgument.of(f"{path}.{kind}.detail", "must be 'auto'; set mmserve.vision for other sizes")
        source.end()
    else:
        raise InvalidArgument.of(f"{path}.type", "must be 'text', 'image_url' or 'video_url'")
    fields.end()
    return found


def _stops(fields: Fields) -> list[str]:
    value = fields.any("stop")
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else typed(value, list, "stop")
    return [typed(stop, str, f"stop[{i}]") for i, stop in enumerate(stops)]


def constrain(fields: Fields, message: pb.GenerateRequest) -> None:
    """Take the constraint of ``response_format``, vLLM's ``structured_outputs`` or its older ``guided_*`` fields."""
    found = [*_response_format(fields), *_structured(fields), *_guided(fields)]
    if len(found) > 1:
        raise InvalidArgument.of(found[1][0], f"cannot be combined with {found[0][0]}")
    for _name, constraint in found:
        message.constraint.CopyFrom(constraint)


def _response_format(fields: Fields) -> Iterator[tuple[str, pb.Constraint]]:
    given = fields.nested("response_format")
    if given is None:
        return
    kind = given.take("type", str, "")
    if kind == "json_object":
        yield "response_format", pb.Constraint(json_schema='{"type": "object"}')
    elif kind == "json_schema":
        described = given.nested("json_schema") or Fields({}, "response_format.json_schema")
        described.take("name", str)
        described.take("description", str)
        strict = described.take("strict", bool, True)
        mode = pb.CONSTRAINT_MODE_STRICT if strict else pb.CONSTRAINT_MODE_VALIDATE
        schema = _schema(described.any("schema"), described.path("schema"))
        yield "response_format", pb.Constraint(json_schema=schema, mode=mode)
        described.end()
    elif kind != "text":
        raise InvalidArgument.of("response_format.type", "must be 'text', 'json_object' or 'json_schema'")
    given.end()


def _structured(fields: Fields) -> Iterator[tuple[str, pb.Constraint]]:
    given = fields.nested("structured_outputs")
    if given is None:
        return
    for name in ("json", "json_object", "regex", "choice", "grammar"):
        value = given.any(name)
        if value is not None and value is not False:
            yield f"structured_outputs.{name}", _vllm(name, value, f"structured_outputs.{name}")
    given.end("is not supported")


def _guided(fields: Fields) -> Iterator[tuple[str, pb.Constraint]]:
    for name in ("json", "regex", "choice", "grammar"):
        value = fields.any(f"guided_{name}")
        if value is not None:
            yield f"guided_{name}", _vllm(name, value, f"guided_{name}")


def _vllm(name: str, value: Any, path: str) -> pb.Constraint:
    if name == "json":
        return pb.Constraint(json_schema=value if isinstance(value, str) else _schema(value, path))
    if name == "json_object":
        typed(value, bool, path)
        return pb.Constraint(json_schema='{"type": "object"}')
    if name == "regex":
        return pb.Constraint(regex=typed(value, str, path))
    if name == "choice":
        options = [typed(one, str, f"{path}[{i}]") for i, one in enumerate(typed(value, list, path))]
        return pb.Constraint(choice=pb.Choice(options=options))
    text = typed(value, str, path)
    return pb.Constraint(gbnf=text) if "::=" in text else pb.Constraint(lark=text)


def _schema(value: Any, path: str) -> str:
    if not isinstance(value, dict | bool):
        raise InvalidArgument.of(path, "must be a JSON schema")
    return json.dumps(value)


class Response:
    """What the client receives of one completion; ``model`` is the name it asked for."""

    def __init__(self, model: str, label: str) -> None:
        self._common = {"id": f"chatcmpl-{label}", "created": int(time.time()), "model": model}

    def whole(self, finished: list[Finished], *, logprobs: bool) -> dict[str, Any]:
        """The response of all samples."""
        choices: list[dict[str, Any]] = [
            {
                "index": one.sample,
                "message": {"role": "assistant", "content": one.text, "refusal": None, "annotations": []},
                "logprobs": _logprobs(one.tokens) if logprobs else None,
                "finish_reason": _REASONS[one.reason],
            }
            for one in sorted(finished, key=lambda one: one.sample)
        ]
        return {
            **self._common,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(finished),
            "mmserve": _own(finished),
        }

    async def chunks(
        self, events: AsyncIterator[Event], samples: int, *, logprobs: bool, usage_chunk: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream: roles, text as it becomes final, an end for each sample, the usage on request."""
        for sample in range(samples):
            yield self._chunk(sample, {"role": "assistant", "content": "", "refusal": None}, None, usage_chunk)
        finished = []
        async for event in events:
            if isinstance(event, Delta):
                yield self._chunk(event.sample, {"content": event.text}, None, usage_chunk)
            elif isinstance(event, Finished):
                finished.append(event)
                chunk = self._chunk(event.sample, {}, _REASONS[event.reason], usage_chunk)
                if logprobs:
                    chunk["choices"][0]["logprobs"] = _logprobs(event.tokens)
                if len(finished) == samples:
                    chunk["mmserve"] = _own(finished)
                yield chunk
        if usage_chunk:
            yield {**self._common, "object": "chat.completion.chunk", "choices": [], "usage": usage(finished)}

    def _chunk(self, sample: int, delta: dict[str, Any], reason: str | None, usage_chunk: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": sample, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._common, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if usage_chunk else chunk


def usage(finished: list[Finished]) -> dict[str, Any]:
    """Tokens of the prompt, which all samples share, and of all answers."""
    prompt = max(one.usage.prompt_tokens for one in finished)
    completion = sum(one.usage.completion_tokens for one in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(one.usage.cached_tokens for one in finished)},
    }


def _own(finished: list[Finished]) -> dict[str, Any]:
    """What OpenAI's fields have no place for: forward passes, and warnings about constraints and policies."""
    return {
        "forwards": sum(one.forwards for one in finished),
        "warnings": list(dict.fromkeys(warning for one in finished for warning in one.warnings)),
    }


def _logprobs(tokens: tuple[CommittedToken, ...]) -> dict[str, Any]:
    content = [
        {
            "token": token.text,
            "logprob": token.log_probability,
            "bytes": list(token.text.encode("utf-8", errors="surrogateescape")),
            "top_logprobs": [],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}

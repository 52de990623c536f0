"""OpenAI's chat completions: their bodies as ``GenerateRequest``, and events as their responses and chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mmserve.core.events import CommittedToken, Delta, Event, Finished
from mmserve.errors import InvalidArgument, MMServeError
from mmserve.http import media
from mmserve.http.api import Asked, Neutral, own_fields, required, sse, take_neutral
from mmserve.http.constraints import constrain
from mmserve.http.content import message, role_of, text_part
from mmserve.http.errors import openai_error
from mmserve.http.fields import Fields, copy_fields, merge_own, stops, typed
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
NEUTRAL: Neutral = {
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
_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


class Chat:
    """``/v1/chat/completions``."""

    def read(self, body: dict[str, Any]) -> Asked:
        """As of ``Api.read``."""
        fields, found = Fields(body), pb.GenerateRequest()
        found.model = required(fields, "model", str, "is required; GET /v1/models lists the names")
        for i, chat in enumerate(fields.take("messages", list, [])):
            found.messages.append(_message(chat, f"messages[{i}]"))
        if {"max_tokens", "max_completion_tokens"} <= {name for name, value in body.items() if value is not None}:
            raise InvalidArgument.of("max_tokens", "and max_completion_tokens are the same: set one of them")
        copy_fields(fields, found, SAMPLING)
        found.sampling.stop.extend(stops(fields, "stop"))
        stream = found.stream.deltas = fields.take("stream", bool, False)
        options = fields.nested("stream_options") or Fields({}, "stream_options")
        if body.get("stream_options") is not None and not stream:
            raise InvalidArgument.of("stream_options", "is only for stream = true")
        usage_chunk = options.take("include_usage", bool, False)
        options.take("include_obfuscation", bool)
        options.end()
        found.stream.tokens = fields.take("logprobs", bool, False)
        constrain(fields, found)
        merge_own(fields, found)
        take_neutral(fields, NEUTRAL, LABELS)
        fields.take("metadata", dict)
        fields.end()
        return Asked(found, stream, _Reply(found, usage_chunk=usage_chunk))

    def error(self, error: MMServeError) -> dict[str, Any]:
        """As of ``Api.error``."""
        return openai_error(error, NAMES)

    def error_line(self, error: MMServeError) -> str:
        """As of ``Api.error_line``."""
        return sse(self.error(error))


def _message(chat: Any, path: str) -> pb.ChatMessage:
    fields = Fields(typed(chat, dict, path), path)
    role = role_of(fields, ("system", "developer", "user", "assistant"))
    content = fields.any("content")
    fields.take("name", str)
    fields.take("refusal", str)
    fields.end("is no supported field of a message")
    return message(role, content, f"{path}.content", {"text": text_part, "image_url": _image, "video_url": _video})


def _image(fields: Fields) -> pb.ContentPart:
    source = fields.nested("image_url") or Fields({}, fields.path("image_url"))
    if source.take("detail", str, "auto") != "auto":
        raise InvalidArgument.of(source.path("detail"), "must be 'auto'; set mmserve.vision for other sizes")
    found = media.image(source.take("url", str, ""), source.path("url"))
    source.end()
    return found


def _video(fields: Fields) -> pb.ContentPart:
    source = fields.nested("video_url") or Fields({}, fields.path("video_url"))
    found = media.video(source.take("url", str, ""), source.path("url"))
    source.end()
    return found


class _Reply:
    """The answer to one chat completion."""

    def __init__(self, asked: pb.GenerateRequest, *, usage_chunk: bool) -> None:
        self._samples, self._logprobs, self._usage_chunk = asked.sampling.n or 1, asked.stream.tokens, usage_chunk
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}

    def whole(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """As of ``Reply.whole``."""
        choices: list[dict[str, Any]] = [
            {
                "index": one.sample,
                "message": {"role": "assistant", "content": one.text, "refusal": None, "annotations": []},
                "logprobs": _logprobs(one.tokens) if self._logprobs else None,
                "finish_reason": _REASONS[one.reason],
            }
            for one in finished
        ]
        own = {"usage": usage(finished), "mmserve": own_fields(finished)}
        return {**self._common, "object": "chat.completion", "choices": choices, **own}

    async def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """Chunks: roles, text as it becomes final, an end for each sample, the usage on request."""
        finished: list[Finished] = []
        for sample in range(self._samples):
            yield self._chunk(sample, {"role": "assistant", "content": "", "refusal": None}, None)
        async for event in events:
            if isinstance(event, Delta):
                yield self._chunk(event.sample, {"content": event.text}, None)
            elif isinstance(event, Finished):
                finished.append(event)
                own = {"mmserve": own_fields(finished)} if len(finished) == self._samples else {}
                tokens = event.tokens if self._logprobs else None
                yield self._chunk(event.sample, {}, _REASONS[event.reason], tokens, **own)
        if self._usage_chunk:
            yield sse({**self._common, "object": "chat.completion.chunk", "choices": [], "usage": usage(finished)})
        yield "data: [DONE]\n\n"

    def _chunk(
        self,
        sample: int,
        delta: dict[str, Any],
        reason: str | None,
        tokens: tuple[CommittedToken, ...] | None = None,
        **own: Any,
    ) -> str:
        logprobs = None if tokens is None else _logprobs(tokens)
        choice = {"index": sample, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage_field = {"usage": None} if self._usage_chunk else {}
        return sse({**self._common, "object": "chat.completion.chunk", "choices": [choice], **usage_field, **own})


def usage(finished: Sequence[Finished]) -> dict[str, Any]:
    """Tokens of the prompt, which all samples share, and of all answers."""
    prompt = max(one.usage.prompt_tokens for one in finished)
    completion = sum(one.usage.completion_tokens for one in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(one.usage.cached_tokens for one in finished)},
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

"""OpenAI's chat completions: bodies to ``GenerateRequest``, and events to responses and chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmserve.core.events import CommittedToken, Delta, Draft, Event, Finished, Prefilled, ToolCallDelta
from mmserve.errors import InvalidArgument, MMServeError
from mmserve.http import api, media
from mmserve.http.api import Neutral, ParsedRequest, draft_line, model_in, own_fields, sse, take_neutral
from mmserve.http.constraints import constrain
from mmserve.http.content import Placed, add_messages, message, refusal_part, role_of, text_part
from mmserve.http.errors import openai_error
from mmserve.http.fields import Fields, copy_fields, merge_own, stops, typed
from mmserve.http.logprobs import content_logprobs, prompt_logprobs
from mmserve.http.tools import take_chat_tools
from mmserve.http.vllm import take_template_options, take_xargs
from mmserve.v1 import generation_pb2 as pb

#: Fields of ``GenerateRequest`` by JSON field. ``max_tokens`` is the older name of ``max_completion_tokens``.
SAMPLING = {
    **api.SAMPLING,
    **api.PENALTIES,
    "n": "sampling.n",
    "max_tokens": "sampling.max_new_tokens",
    "max_completion_tokens": "sampling.max_new_tokens",
}
#: Names in errors of fields of ``GenerateRequest``.
NAMES = api.names_in_errors(
    SAMPLING,
    {
        "sampling.stop": "stop",
        "sampling.logit_bias": "logit_bias",
        "stream.alternatives": "top_logprobs",
        "stream.prompt_tokens": "prompt_logprobs",
        "stream.prompt_alternatives": "prompt_logprobs",
        "constraint": "response_format",
        "allowed_tools": "tool_choice.allowed_tools.tools",
        **api.names_of_tools("function.", "parameters"),
        **api.names_of_messages(
            {"name": "function.name", "arguments": "function.arguments"}, image="image_url.url", video="video_url.url"
        ),
    },
)
NEUTRAL: Neutral = {
    **api.VLLM,
    "add_special_tokens": ((False,), "must be false: the chat template has them"),
    "include_reasoning": ((True, False), "must be true or false; no model here has a separate reasoning phase"),
    "functions": (([],), "is not supported; use tools"),
    "function_call": (("none", "auto"), "is not supported; use tool_choice"),
    "store": ((False, True), "must be true or false; nothing is stored either way"),
    "service_tier": api.one_of(api.TIERS),
    "modalities": ((["text"],), "must be ['text']"),
    "reasoning_effort": api.one_of(api.EFFORTS),
    "verbosity": api.one_of(api.VERBOSITIES),
}
#: Strings that identify the caller or the request, without effect on the answer.
LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id")
#: Maximum number of digits of a token id.
_DIGITS = 10
_REASONS = {"end": "stop", "stop": "stop", "length": "length", "tool_calls": "tool_calls"}


class OpenAI:
    """Errors of OpenAI's completions; ``names``: names in bodies of fields of ``GenerateRequest``."""

    names: Mapping[str, str] = NAMES

    def error(self, error: MMServeError) -> dict[str, Any]:
        return openai_error(error, self.names)


class Chat(OpenAI):
    """``/v1/chat/completions``."""

    def read(self, body: dict[str, Any]) -> ParsedRequest:
        fields, found = Fields(body), pb.GenerateRequest()
        found.model = model_in(fields)
        places = add_messages(found, (chat_message(each) for each in fields.each("messages")))
        take_continuation(fields, found)
        echoed = _last_text(found) if fields.take("echo", bool, False) else ""
        older, newer = body.get("max_tokens"), body.get("max_completion_tokens")
        if older is not None and newer is not None and older != newer:
            raise InvalidArgument.of("max_tokens", "and max_completion_tokens are the same: set one of them")
        copy_fields(fields, found, SAMPLING)
        found.sampling.stop.extend(stops(fields, "stop"))
        take_bias(fields, found)
        stream, usage_chunk = take_stream(fields, body, found)
        logprobs, ids = take_logprobs(fields, found), take_ids(fields, found)
        of_prompt = take_prompt_logprobs(fields, found)
        names = constrain(fields, found)
        take_chat_tools(fields, found)
        take_template_options(fields, found)
        names |= take_xargs(fields, found)
        names |= {} if older is None else {"sampling.max_new_tokens": "max_tokens"}
        names |= merge_own(fields, found)
        take_neutral(fields, NEUTRAL, LABELS)
        fields.take("metadata", dict)
        fields.take("prediction", dict)  # predicted output: would only affect speed
        fields.end()
        parts = ResponseParts(usage_chunk=usage_chunk, logprobs=logprobs, ids=ids, prompt_logprobs=of_prompt)
        return ParsedRequest(found, stream, _Reply(found, parts, echoed), names, places)


def _last_text(found: pb.GenerateRequest) -> str:
    """The text of the last message, if it is the assistant's: vLLM's ``echo`` returns it before the answer."""
    if not found.messages or found.messages[-1].role != pb.ROLE_ASSISTANT:
        return ""
    return "".join(part.text for part in found.messages[-1].parts)


def take_continuation(fields: Fields, found: pb.GenerateRequest) -> None:
    """Read vLLM's ``continue_final_message``, and ``add_generation_prompt``, which must be its opposite."""
    found.continue_final_message = fields.take("continue_final_message", bool, False)
    if fields.take("add_generation_prompt", bool, not found.continue_final_message) == found.continue_final_message:
        raise InvalidArgument.of("add_generation_prompt", "must be true, and false with continue_final_message")


def take_stream(fields: Fields, body: dict[str, Any], found: pb.GenerateRequest) -> tuple[bool, bool]:
    """Read ``stream`` and its options. Returns whether to stream, and whether to end with a chunk of the usage."""
    stream = found.stream.deltas = fields.take("stream", bool, False)
    with fields.within("stream_options") as options:
        if body.get("stream_options") is not None and not stream:
            raise InvalidArgument.of("stream_options", "is only for stream = true")
        usage_chunk = options.take("include_usage", bool, False)
        options.take("include_obfuscation", bool)
        options.take("continuous_usage_stats", bool)  # of vLLM; the usage is in the last chunk
    return stream, usage_chunk


def take_logprobs(fields: Fields, found: pb.GenerateRequest) -> bool:
    """Read ``logprobs``, which is returned, and ``top_logprobs``, the number of alternatives of each token."""
    asked: bool = fields.take("logprobs", bool, False)
    found.stream.tokens |= asked
    others = fields.any("top_logprobs")
    if others is not None:
        if typed(others, int, "top_logprobs") and not asked:
            raise InvalidArgument.of("top_logprobs", "is only for logprobs = true")
        copy_fields(Fields({"top_logprobs": others}), found, {"top_logprobs": "stream.alternatives"})
    return asked


def take_ids(fields: Fields, found: pb.GenerateRequest) -> bool:
    """Read vLLM's ``return_token_ids``, which is returned: whether a response has the ids of prompt and answer."""
    asked: bool = fields.take("return_token_ids", bool, False)
    found.stream.tokens |= asked
    found.stream.prompt |= asked
    return asked


def take_prompt_logprobs(fields: Fields, found: pb.GenerateRequest) -> int | None:
    """Read vLLM's ``prompt_logprobs``, which is returned: the number of alternatives of each token of the prompt."""
    if not fields.has("prompt_logprobs"):
        return None
    if found.stream.deltas:
        raise InvalidArgument.of("prompt_logprobs", "is only for stream = false")
    copy_fields(fields, found, {"prompt_logprobs": "stream.prompt_alternatives"})
    found.stream.prompt_tokens = True
    return found.stream.prompt_alternatives


def take_bias(fields: Fields, found: pb.GenerateRequest) -> None:
    """Read ``logit_bias``: numbers by token ids."""
    for token, bias in fields.take("logit_bias", dict, {}).items():
        if len(token) > _DIGITS or not token.isascii() or not token.isdigit() or int(token) >= 1 << 32:
            raise InvalidArgument.of("logit_bias", "must have ids of tokens as its names")
        found.sampling.logit_bias[int(token)] = typed(bias, float, f"logit_bias.{token}")


def chat_message(fields: Fields) -> Placed:
    """A message of a chat."""
    role = role_of(fields, ("system", "developer", "user", "assistant", "tool"))
    content, calls = fields.any("content"), list(fields.each("tool_calls"))
    call_id = fields.take("tool_call_id", str, "")
    if role == "tool" and not call_id:
        raise InvalidArgument.of(fields.path("tool_call_id"), "must be the id of the call that the message answers")
    refusal = fields.take("refusal", str)
    for label in ("name", "reasoning", "reasoning_content"):  # the latter two: in other servers' responses
        fields.take(label, str)
    fields.take("annotations", list)
    fields.end("is not a supported field of a message")
    if content in (None, "") and role == "assistant":
        content = [] if calls else content if refusal is None else refusal
    readers = {"text": text_part, "image_url": _image, "video_url": _video, "refusal": refusal_part}
    found = message(role, content, fields.path("content"), readers)
    found.tool_calls.extend(map(_call, calls))
    found.tool_call_id = call_id
    return Placed(found, fields.path(""))


def _call(fields: Fields) -> pb.ToolCall:
    with fields, fields.within("function") as function:
        if fields.take("type", str, "function") != "function":
            raise InvalidArgument.of(fields.path("type"), "must be 'function'")
        fields.take("index", int)  # in deltas of a stream
        own, name = fields.take("id", str, ""), function.take("name", str, "")
        return pb.ToolCall(id=own, name=name, arguments=function.take("arguments", str, "") or "{}")


def _image(fields: Fields) -> pb.ContentPart:
    if isinstance(url := fields.any("image_url"), str):  # as in Mistral's API
        return media.image(url, fields.path("image_url"))
    with Fields.of(url or {}, fields.path("image_url")) as source:
        media.take_detail(source)
        return media.image(source.take("url", str, ""), source.path("url"))


def _video(fields: Fields) -> pb.ContentPart:
    with fields.within("video_url") as source:
        return media.video(source.take("url", str, ""), source.path("url"))


@dataclass(frozen=True, kw_only=True)
class ResponseParts:
    """Optional parts of a response: a last chunk with the usage, log-probabilities, ids of prompt and answer, and
    ``prompt_logprobs`` with so many alternatives."""

    usage_chunk: bool
    logprobs: bool
    ids: bool
    prompt_logprobs: int | None = None


class Chunks:
    """The common part of OpenAI's completion responses: their fields, and chunks of ``kind`` with their end.

    ``prompts``: number of prompts, each with as many samples as in ``asked``.
    """

    def __init__(
        self, asked: pb.GenerateRequest, prefix: str, kind: str, parts: ResponseParts, *, prompts: int = 1
    ) -> None:
        self._each = asked.sampling.n or 1  # samples per prompt
        self._samples, self._logprobs, self._ids = self._each * prompts, parts.logprobs, parts.ids
        self._prompt_alternatives = parts.prompt_logprobs
        self._kind, self._usage_chunk = kind, parts.usage_chunk
        self._common = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}

    def failed(self, body: dict[str, Any]) -> str:
        """See ``Reply.failed``."""
        return sse(body)

    def _chunk_of(self, choice: dict[str, Any], own: Mapping[str, Any]) -> str:
        usage_field = {"usage": None} if self._usage_chunk else {}
        return sse({**self._common, "object": self._kind, "choices": [choice], **usage_field, **own})

    def _usage(self, finished: Sequence[Finished]) -> dict[str, Any]:
        return usage(finished, self._each)

    def _token_ids(self, tokens: Sequence[CommittedToken]) -> dict[str, list[int]]:
        """The ids of ``tokens`` as a field of a choice, if requested."""
        return {"token_ids": [token.id for token in tokens]} if self._ids else {}

    def _of_prompt(self, event: Event | None) -> dict[str, Any]:
        """The ids of the prompt, and vLLM's ``prompt_logprobs``, as fields of a response or choice, if requested and if
        ``event`` has them."""
        if not isinstance(event, Prefilled):
            return {}
        found: dict[str, Any] = {"prompt_token_ids": list(event.prompt_ids)} if self._ids else {}
        if self._prompt_alternatives is not None:
            found["prompt_logprobs"] = prompt_logprobs(event.prompt_tokens, self._prompt_alternatives)
        return found

    def _end(self, finished: Sequence[Finished]) -> str:
        """The lines after the end of the last sample."""
        found = {**self._common, "object": self._kind, "choices": [], "usage": self._usage(finished)}
        return (sse(found) if self._usage_chunk else "") + "data: [DONE]\n\n"


class _Reply(Chunks):
    """The response of one chat completion, whose texts begin with ``echoed``."""

    def __init__(self, asked: pb.GenerateRequest, parts: ResponseParts, echoed: str) -> None:
        super().__init__(asked, "chatcmpl", "chat.completion.chunk", parts)
        self._echoed = echoed

    def whole(self, finished: Sequence[Finished], prompts: Sequence[Prefilled] = ()) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": one.sample,
                "message": _answer(one, self._echoed),
                "logprobs": content_logprobs(one.tokens) if self._logprobs else None,
                **ended(one, _REASONS),
                **self._token_ids(one.tokens),
            }
            for one in finished
        ]
        own = {"usage": self._usage(finished), "mmserve": own_fields(finished)}
        own |= self._of_prompt(next(iter(prompts), None))
        return {**self._common, "object": "chat.completion", "choices": choices, **own}

    async def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """Chunks: roles, text as it becomes final, the end of each sample, and the usage if requested."""
        finished: list[Finished] = []
        role, begun = {"role": "assistant", "content": "", "refusal": None}, False
        async for event in events:
            line = ""
            if not begun:
                line = "".join(self._chunk(sample, role, **self._of_prompt(event)) for sample in range(self._samples))
                if self._echoed:
                    echoed = {"content": self._echoed}
                    line += "".join(self._chunk(sample, echoed) for sample in range(self._samples))
                begun = True
            if isinstance(event, Draft):
                line += draft_line(event)
            elif isinstance(event, Delta):
                line += self._chunk(event.sample, {"content": event.text})
            elif isinstance(event, ToolCallDelta):
                line += self._chunk(event.sample, {"tool_calls": [_call_delta(event)]})
            elif isinstance(event, Finished):
                finished.append(event)
                last = len(finished) == self._samples
                own = {"mmserve": own_fields(finished)} if last else {}
                line += self._chunk(event.sample, {}, event, **own)
                line += self._end(finished) if last else ""
            if line:
                yield line

    def _chunk(self, sample: int, delta: dict[str, Any], last: Finished | None = None, **own: Any) -> str:
        """A chunk of a sample, the last one if it has the end ``last``; ``own``: fields besides the choice."""
        logprobs = None if last is None or not self._logprobs else content_logprobs(last.tokens)
        ids = {} if last is None else self._token_ids(last.tokens)
        return self._chunk_of(
            {"index": sample, "delta": delta, "logprobs": logprobs, **ended(last, _REASONS), **ids}, own
        )


def ended(last: Finished | None, reasons: Mapping[str, str]) -> dict[str, Any]:
    """The end of a choice, with vLLM's ``stop_reason``, the stop string; None before the end."""
    if last is None:
        return {"finish_reason": None}
    return {"finish_reason": reasons[last.reason], "stop_reason": last.stop or None}


def _answer(one: Finished, echoed: str) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in (*one.tool_calls, *([] if one.cut_call is None else [one.cut_call]))
    ]
    text = echoed + one.text
    content = None if calls and not text else text
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    return {**found, "tool_calls": calls} if calls else found


def _call_delta(event: ToolCallDelta) -> dict[str, Any]:
    if event.id:
        function = {"name": event.name, "arguments": event.arguments}
        return {"index": event.index, "id": event.id, "type": "function", "function": function}
    return {"index": event.index, "function": {"arguments": event.arguments}}


def usage(finished: Sequence[Finished], samples: int) -> dict[str, Any]:
    """Token counts of all answers, and of their prompts, which have ``samples`` samples each."""
    by_cached = sorted(finished, key=lambda one: one.usage.cached_tokens)
    prompts = {one.sample // samples: one.usage for one in by_cached}  # with the most cached tokens of each prompt
    prompt = sum(each.prompt_tokens for each in prompts.values())
    completion = sum(one.usage.completion_tokens for one in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts.values())},
    }

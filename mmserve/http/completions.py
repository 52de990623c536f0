"""Text completions, and fill-in-the-middle: OpenAI's completions, and Mistral's FIM API.

The suffix is fixed: a diffusion model's canvas contains it from the start, and an autoregressive answer is constrained
to end with it. ``max_tokens`` limits the text before it.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mmserve.core.events import CommittedToken, Delta, Draft, Event, Finished
from mmserve.core.request import TextPart, TokensPart
from mmserve.errors import InvalidArgument
from mmserve.http import api
from mmserve.http.api import Asked, Neutral, draft_line, own_fields, required, take_neutral
from mmserve.http.chat import NAMES as CHAT_NAMES
from mmserve.http.chat import SAMPLING as CHAT_SAMPLING
from mmserve.http.chat import Chunks, OpenAI, content_logprobs, shown, take_bias, take_stream
from mmserve.http.constraints import constrain
from mmserve.http.fields import Fields, copy_fields, merge_own, stops
from mmserve.http.vllm import take_xargs
from mmserve.v1 import generation_pb2 as pb

SAMPLING = {name: path for name, path in CHAT_SAMPLING.items() if name != "max_completion_tokens"}
NAMES = {
    **CHAT_NAMES,
    "sampling.max_new_tokens": "max_tokens",
    "messages": "prompt",
    "constraint": "suffix",
    "stream.alternatives": "logprobs",
}
NEUTRAL: Neutral = {
    **api.VLLM,
    "echo": ((False,), "is not supported"),
    "best_of": ((1,), "is not supported; use n"),
}
LABELS = ("user",)
#: OpenAI's default.
DEFAULT_TOKENS = 16
_UINT32_MAX = (1 << 32) - 1
_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


class Completions(OpenAI):
    """``/v1/completions``, and with ``fim`` ``/v1/fim/completions``, whose responses are those of chat completions."""

    names = NAMES

    def __init__(self, *, fim: bool = False) -> None:
        self._fim = fim

    def read(self, body: dict[str, Any]) -> Asked:
        fields, found = Fields(body), pb.GenerateRequest(raw=True)
        found.model = required(fields, "model", str, "is required; GET /v1/models lists the names")
        first, *others = _prompts(fields, one=self._fim)
        part = found.messages.add(role=pb.ROLE_USER).parts.add()
        if isinstance(first, TextPart):
            part.text = first.text
        else:
            part.tokens.ids.extend(first.ids)
        copy_fields(fields, found, {**SAMPLING, **({"random_seed": "sampling.seed"} if self._fim else {})})
        if not found.sampling.HasField("max_new_tokens"):
            found.sampling.max_new_tokens = DEFAULT_TOKENS
        found.sampling.stop.extend(stops(fields, "stop"))
        take_bias(fields, found)
        stream, usage_chunk = take_stream(fields, body, found)
        found.stream.tokens = body.get("logprobs") is not None
        copy_fields(fields, found, {"logprobs": "stream.alternatives"})
        names = constrain(fields, found)
        suffix = fields.take("suffix", str, "")
        if suffix:
            _pin(found, suffix)
        names |= take_xargs(fields, found)
        names |= merge_own(fields, found)
        take_neutral(fields, NEUTRAL, LABELS)
        fields.end()
        reply = _Reply(found, suffix, usage_chunk=usage_chunk, fim=self._fim, prompts=1 + len(others))
        return Asked(found, stream, reply, names, prompts=others)


def _prompts(fields: Fields, *, one: bool) -> list[TextPart | TokensPart]:
    """The prompts in ``prompt``: a text, an array of token ids, or an array of these; ``one``: exactly one."""
    given = fields.any("prompt")
    several = isinstance(given, list) and not (given and _is_number(given[0]))
    prompts = given if several else [given]
    if not prompts:
        raise InvalidArgument.of("prompt", "must hold at least one text or array of token ids")
    if one and len(prompts) > 1:
        raise InvalidArgument.of("prompt", "must be one text or array of token ids")
    return [_prompt(each, f"prompt[{i}]" if several else "prompt") for i, each in enumerate(prompts)]


def _prompt(given: Any, path: str) -> TextPart | TokensPart:
    if isinstance(given, str) and given:
        return TextPart(given)
    if isinstance(given, list) and given and all(_is_number(each) and 0 <= each <= _UINT32_MAX for each in given):
        return TokensPart(tuple(given))
    raise InvalidArgument.of(path, "must be a text or an array of token ids, and not empty")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _pin(found: pb.GenerateRequest, suffix: str) -> None:
    """Constrain the answer to end with ``suffix``; ``max_tokens`` limits the text before it."""
    if found.HasField("constraint"):
        raise InvalidArgument.of("suffix", "cannot be combined with a constraint")
    room = found.sampling.max_new_tokens
    found.constraint.template.parts.add(hole=pb.Hole(max_tokens=room))
    found.constraint.template.parts.add(text=suffix)
    found.sampling.max_new_tokens = min(room + len(suffix.encode()), _UINT32_MAX)  # at most one token per byte


class _Reply(Chunks):
    """The response to one body, with the samples of all its prompts."""

    def __init__(self, asked: pb.GenerateRequest, suffix: str, *, usage_chunk: bool, fim: bool, prompts: int) -> None:
        kind = "chat.completion.chunk" if fim else "text_completion"
        super().__init__(asked, "cmpl", kind, usage_chunk=usage_chunk, prompts=prompts)
        self._suffix, self._fim = suffix, fim

    def whole(self, finished: Sequence[Finished]) -> dict[str, Any]:
        choices = [self._choice(one, self._text(one), _REASONS[one.reason]) for one in finished]
        own = {"usage": self._usage(finished), "mmserve": own_fields(finished)}
        kind = "chat.completion" if self._fim else "text_completion"
        return {**self._common, "object": kind, "choices": choices, **own}

    async def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """Chunks of text as it becomes final; with a suffix, all of it at the end."""
        finished: list[Finished] = []
        async for event in events:
            if isinstance(event, Draft):
                yield draft_line(event)
            elif isinstance(event, Delta) and not self._suffix:
                yield self._chunk(event.sample, event.text, None)
            elif isinstance(event, Finished):
                finished.append(event)
                text = self._text(event) if self._suffix else ""
                last = len(finished) == self._samples
                own = {"mmserve": own_fields(finished)} if last else {}
                line = self._chunk(event.sample, text, _REASONS[event.reason], self._tokens(event), **own)
                yield line + (self._end(finished) if last else "")

    def _text(self, one: Finished) -> str:
        """The text before the suffix, or before a stop string."""
        return one.holes[0] if one.holes else one.text.removesuffix(self._suffix)

    def _tokens(self, one: Finished) -> Sequence[CommittedToken]:
        """The tokens of the text before the suffix, if log-probabilities are requested."""
        if not self._suffix or not self._logprobs:
            return one.tokens
        left, own = len(self._text(one).encode()), []
        for token in one.tokens:
            if left <= 0:
                break
            own.append(token)
            left -= len(token.text_bytes)
        return own

    def _choice(self, one: Finished, text: str, reason: str) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self._fim else {"text": text}
        logprobs = self._given(self._tokens(one)) if self._logprobs else None
        return {"index": one.sample, **content, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(
        self, sample: int, text: str, reason: str | None, tokens: Sequence[CommittedToken] = (), **own: Any
    ) -> str:
        content = {"delta": {"role": "assistant", "content": text}} if self._fim else {"text": text}
        logprobs = self._given(tokens) if self._logprobs and tokens else None
        return self._chunk_of({"index": sample, **content, "logprobs": logprobs, "finish_reason": reason}, own)

    def _given(self, tokens: Sequence[CommittedToken]) -> dict[str, Any]:
        """``tokens`` in the API's format of log-probabilities: that of chats for fill-in-the-middle."""
        return content_logprobs(tokens) if self._fim else _logprobs(tokens)


def _logprobs(tokens: Sequence[CommittedToken]) -> dict[str, Any]:
    """Log-probabilities of ``tokens``; ``text_offset`` counts complete characters before a token."""
    whole = getincrementaldecoder("utf-8")("replace")
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(whole.decode(token.text_bytes))
    return {
        "tokens": [shown(token.text_bytes) for token in tokens],
        "token_logprobs": [token.log_probability for token in tokens],
        "top_logprobs": [
            {shown(other.text_bytes): other.log_probability for other in token.alternatives} for token in tokens
        ],
        "text_offset": offsets,
    }

"""Text completions, and fill-in-the-middle: OpenAI's completions, and Mistral's FIM API.

The suffix is fixed: a diffusion model's canvas contains it from the start, and an autoregressive answer is constrained
to end with it. ``max_tokens`` limits the text before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mmserve.core.events import CommittedToken, Delta, Draft, Event, Finished, Prefilled, PromptToken
from mmserve.core.request import TextPart, TokensPart
from mmserve.errors import InvalidArgument
from mmserve.http import api
from mmserve.http.api import Neutral, ParsedRequest, draft_line, model_in, own_fields, take_neutral
from mmserve.http.chat import NAMES as CHAT_NAMES
from mmserve.http.chat import SAMPLING as CHAT_SAMPLING
from mmserve.http.chat import (
    Chunks,
    OpenAI,
    ResponseParts,
    ended,
    take_bias,
    take_ids,
    take_prompt_logprobs,
    take_stream,
)
from mmserve.http.constraints import constrain
from mmserve.http.fields import Fields, copy_fields, merge_own, stops
from mmserve.http.logprobs import completion_logprobs, content_logprobs
from mmserve.http.vllm import take_xargs
from mmserve.rpc.violations import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
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
    "add_special_tokens": ((True,), "must be true"),
    "best_of": ((1,), "is not supported; use n"),
}
#: The same for fill-in-the-middle only.
FIM_NEUTRAL: Neutral = {
    **dict.fromkeys(("echo", "return_token_ids"), ((False,), "is not supported")),
    "prompt_logprobs": ((), "is not supported"),
}
LABELS = ("user", "request_id")
#: OpenAI's default.
DEFAULT_TOKENS = 16
_UINT32_MAX = (1 << 32) - 1
_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


class Completions(OpenAI):
    """``/v1/completions``, and with ``fim`` ``/v1/fim/completions``, whose responses are those of chat completions."""

    names = NAMES

    def __init__(self, *, fim: bool = False) -> None:
        self._fim = fim

    def read(self, body: dict[str, Any]) -> ParsedRequest:
        fields, found = Fields(body), pb.GenerateRequest(raw=True)
        found.model = model_in(fields)
        first, *others = _prompts(fields, one=self._fim)
        part = found.messages.add(role=pb.ROLE_USER).parts.add()
        if isinstance(first, TextPart):
            part.text = first.text
        else:
            part.tokens.ids.extend(first.ids)
        copy_fields(fields, found, {**SAMPLING, **({"random_seed": "sampling.seed"} if self._fim else {})})
        if not found.sampling.HasField("max_new_tokens"):
            found.sampling.max_new_tokens = DEFAULT_TOKENS
        stop, suffix = stops(fields, "stop"), fields.take("suffix", str, "")
        found.sampling.stop.extend(stop)
        take_bias(fields, found)
        stream, usage_chunk = take_stream(fields, body, found)
        logprobs = found.stream.tokens = body.get("logprobs") is not None
        copy_fields(fields, found, {"logprobs": "stream.alternatives"})
        if self._fim:
            take_neutral(fields, FIM_NEUTRAL, ())
        ids, of_prompt = take_ids(fields, found), take_prompt_logprobs(fields, found)
        echo: bool = fields.take("echo", bool, False)
        names = _echo(found, body) if echo else {}
        _check_room(found, body)
        names |= constrain(fields, found)
        gap = _pin(found, suffix) if suffix else 0
        names |= take_xargs(fields, found)
        names |= merge_own(fields, found)
        take_neutral(fields, NEUTRAL, LABELS)
        fields.end()
        parts = ResponseParts(usage_chunk=usage_chunk, logprobs=logprobs, ids=ids, prompt_logprobs=of_prompt)
        within = _stops_of_gap(found, suffix) if suffix else ()
        reply = _Reply(found, suffix, gap, within, parts, fim=self._fim, prompts=[first, *others], echo=echo)
        return ParsedRequest(found, stream, reply, names, prompts=others)


def _echo(found: pb.GenerateRequest, body: dict[str, Any]) -> dict[str, str]:
    """Request the prompt that a choice begins with, with log-probabilities if it has them. Returns the names in errors
    of fields of ``found``."""
    if body.get("suffix"):
        raise InvalidArgument.of("echo", "cannot be combined with suffix")
    found.stream.prompt = True
    if not found.stream.tokens or body.get("logprobs") is None:
        return {}
    found.stream.prompt_tokens = True
    found.stream.prompt_alternatives = max(found.stream.prompt_alternatives, found.stream.alternatives)
    if body.get("prompt_logprobs") is not None:
        return {}
    return {"stream.prompt_tokens": "echo", "stream.prompt_alternatives": "logprobs"}


def _check_room(found: pb.GenerateRequest, body: dict[str, Any]) -> None:
    """Raises ``InvalidArgument`` for an answer without tokens of which nothing else is returned."""
    returned = (found.stream.prompt or found.stream.prompt_tokens) and not body.get("suffix")
    if not found.sampling.max_new_tokens and not returned:
        why = "must be at least 1, or 0 with echo, prompt_logprobs or return_token_ids, and without suffix"
        raise InvalidArgument.of("max_tokens", why)


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


def _pin(found: pb.GenerateRequest, suffix: str) -> int:
    """Constrain the answer to end with ``suffix``; ``max_tokens``, which is returned, limits the text before it."""
    if found.HasField("constraint"):
        raise InvalidArgument.of("suffix", "cannot be combined with a constraint")
    room = found.sampling.max_new_tokens
    found.constraint.template.parts.add(hole=pb.Hole(max_tokens=room))
    found.constraint.template.parts.add(text=suffix)
    found.sampling.max_new_tokens = min(room + len(suffix.encode()), _UINT32_MAX)  # at most one token per byte
    found.stream.tokens = True
    return room


def _stops_of_gap(found: pb.GenerateRequest, suffix: str) -> Sequence[str]:
    """Remove from ``found`` the stop strings that could occur in the answer but not in its gap, and return them: those
    within ``suffix``, and those that begin before it and end in it. The others end the decoding.

    A stop string with which the suffix begins is left: the text before it is the gap.
    """
    stop = [*found.sampling.stop]
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(one) <= MAX_STOP_CHARACTERS for one in stop):
        return ()  # the request is refused; comparing longer ones would block the event loop
    across = [one for one in stop if any(suffix.startswith(one[i:]) for i in range(1, len(one)))]
    held = [one for one in stop if one in across or suffix.find(one) > 0]
    found.sampling.stop[:] = [one for one in stop if one not in held]
    return held


class _Reply(Chunks):
    """The response to one body, with the samples of all its prompts.

    ``stops``: the stop strings that are applied to the gap when it is complete.
    """

    def __init__(
        self,
        asked: pb.GenerateRequest,
        suffix: str,
        gap: int,
        stops: Sequence[str],
        parts: ResponseParts,
        *,
        fim: bool,
        prompts: Sequence[TextPart | TokensPart],
        echo: bool,
    ) -> None:
        kind = "chat.completion.chunk" if fim else "text_completion"
        super().__init__(asked, "cmpl", kind, parts, prompts=len(prompts))
        self._suffix, self._gap, self._stops, self._fim = suffix, gap, stops, fim
        self._alternatives = asked.stream.alternatives
        self._echo_tokens = echo and parts.logprobs
        texts = [part.text if isinstance(part, TextPart) else None for part in prompts]
        self._echoed = texts if echo and not parts.ids else []  # with ids as in vLLM

    def whole(self, finished: Sequence[Finished], prompts: Sequence[Prefilled] = ()) -> dict[str, Any]:
        of_sample = {prompt.sample: prompt for prompt in prompts}
        choices = [self._choice(one, of_sample.get(one.sample)) for one in finished]
        own = {"usage": self._usage(finished), "mmserve": own_fields(finished)}
        kind = "chat.completion" if self._fim else "text_completion"
        return {**self._common, "object": kind, "choices": choices, **own}

    async def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """Chunks of text as it becomes final; with a suffix, all of it at the end."""
        finished: list[Finished] = []
        lengths: dict[int, int] = {}  # of the echoed tokens' texts, by sample
        async for event in events:
            if isinstance(event, Draft):
                yield draft_line(event)
            elif isinstance(event, Prefilled):
                own = {"logprobs": self._completion_logprobs(event.prompt_tokens)} if self._echo_tokens else {}
                lengths[event.sample] = _length(event.prompt_tokens)
                yield self._chunk(event.sample, self._echo(event), **own, **self._of_prompt(event))
            elif isinstance(event, Delta) and not self._suffix:
                yield self._chunk(event.sample, event.text)
            elif isinstance(event, Finished):
                finished.append(event)
                text = self._text(event) if self._suffix else ""
                last = len(finished) == self._samples
                own = {"mmserve": own_fields(finished)} if last else {}
                of_tokens = self._of_tokens(event, start=lengths.get(event.sample, 0))
                line = self._chunk(event.sample, text, own, **self._ended(event), **of_tokens)
                yield line + (self._end(finished) if last else "")

    def _ended(self, one: Finished) -> dict[str, Any]:
        """The end of a choice: of a gap that has as many tokens as are allowed it is ``length``."""
        found = ended(one, _REASONS)
        if (stop := self._cut(one)[1]) is not None:
            return {"finish_reason": "stop", "stop_reason": stop}
        return {"finish_reason": "length", "stop_reason": None} if self._is_full(one) else found

    def _is_full(self, one: Finished) -> bool:
        """Whether the suffix follows a gap that has as many tokens as are allowed; the suffix may begin with the stop
        string that ended the decoding."""
        if not self._suffix or not (
            one.reason == "end" or (one.reason == "stop" and self._suffix.startswith(one.stop))
        ):
            return False
        tokens, size = self._tokens(one), len(self._text(one).encode())
        return len(tokens) >= self._gap and sum(len(token.text_bytes) for token in tokens) <= size

    def _text(self, one: Finished) -> str:
        """The text before the suffix, or before a stop string."""
        return self._cut(one)[0]

    def _cut(self, one: Finished) -> tuple[str, str | None]:
        """The text before the suffix, cut before the first of ``stops`` in it, and that stop string, if any."""
        text = one.holes[0] if one.holes else one.text
        if not one.holes and one.reason != "stop":
            text = text.removesuffix(self._suffix)
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return text, None
        at, stop = min(found)
        return text[:at], stop

    def _tokens(self, one: Finished) -> Sequence[CommittedToken]:
        """The tokens of the text before the suffix."""
        if not self._suffix:
            return one.tokens
        left, own = len(self._text(one).encode()), []
        for token in one.tokens:
            if left <= 0:
                break
            own.append(token)
            left -= len(token.text_bytes)
        return own

    def _echo(self, prompt: Prefilled) -> str:
        """The text of the ``prompt`` of a sample, if it is part of the response."""
        if not self._echoed:
            return ""
        given = self._echoed[prompt.sample // self._each]
        return prompt.prompt_text if given is None else given

    def _completion_logprobs(self, tokens: Sequence[CommittedToken | PromptToken], start: int = 0) -> dict[str, Any]:
        return completion_logprobs(tokens, self._alternatives, start)

    def _of_tokens(self, one: Finished, before: Sequence[PromptToken] = (), *, start: int = 0) -> dict[str, Any]:
        """The fields of a choice with the tokens of its text, if requested, after those ``before`` it; ``start``: the
        length of the text sent before."""
        tokens = self._tokens(one) if self._logprobs or self._ids else ()
        end = [one.end_token] if self._echo_tokens and one.end_token is not None else []
        given = content_logprobs(tokens) if self._fim else self._completion_logprobs([*before, *tokens, *end], start)
        return {"logprobs": given if self._logprobs else None, **self._token_ids(tokens)}

    def _choice(self, one: Finished, prompt: Prefilled | None) -> dict[str, Any]:
        text = ("" if prompt is None else self._echo(prompt)) + self._text(one)
        content = {"message": {"role": "assistant", "content": text}} if self._fim else {"text": text}
        before = prompt.prompt_tokens if prompt is not None and self._echo_tokens else ()
        of_tokens = self._of_tokens(one, before)
        return {"index": one.sample, **content, **of_tokens, **self._of_prompt(prompt), **self._ended(one)}

    def _chunk(self, sample: int, text: str, own: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> str:
        """A chunk of a sample; ``own``: fields of the chunk besides the choice, ``more``: those of the choice."""
        content = {"delta": {"role": "assistant", "content": text}} if self._fim else {"text": text}
        return self._chunk_of({"index": sample, **content, "logprobs": None, **ended(None, _REASONS), **more}, own)


def _length(tokens: Sequence[PromptToken]) -> int:
    """The length of the text of ``tokens``."""
    return len(b"".join(token.text_bytes for token in tokens).decode(errors="replace"))

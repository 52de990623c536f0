"""Log-probabilities in responses, in the formats of OpenAI's APIs; those of a prompt also in vLLM's."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from mmserve.core.events import Alternative, CommittedToken, PromptToken

#: A token with its alternatives.
_Token = CommittedToken | PromptToken


def content_logprobs(tokens: Sequence[CommittedToken]) -> dict[str, Any]:
    """``tokens`` in the format of a choice's ``logprobs``."""
    return {"content": token_logprobs(tokens), "refusal": None}


def token_logprobs(tokens: Sequence[CommittedToken]) -> list[dict[str, Any]]:
    """Log-probabilities of ``tokens`` and of their alternatives."""
    return [{**_logprob(token), "top_logprobs": [_logprob(other) for other in token.alternatives]} for token in tokens]


def _logprob(token: CommittedToken | Alternative) -> dict[str, Any]:
    data = token.text_bytes
    return {"token": _token_text(data), "logprob": _finite(token.log_probability), "bytes": list(data)}


def _finite(log_probability: float) -> float:
    """``log_probability``, or -9999 for less, as in OpenAI's API: JSON has no infinities."""
    return max(log_probability, -9999.0)


def _token_text(data: bytes) -> str:
    r"""The text of a token with the bytes ``data``; if it is not valid UTF-8, as ``bytes:\xe2\x80``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}" for b in data)


def completion_logprobs(tokens: Sequence[_Token], alternatives: int, start: int = 0) -> dict[str, Any]:
    """``tokens`` in the format of completions, with at most so many ``alternatives``; null for one without a
    log-probability. ``text_offset`` counts complete characters before a token, from ``start``."""
    whole = getincrementaldecoder("utf-8")("replace")
    offsets, at = [], start
    for token in tokens:
        offsets.append(at)
        at += len(whole.decode(token.text_bytes))
    return {
        "tokens": [_token_text(token.text_bytes) for token in tokens],
        "token_logprobs": [_known(token) for token in tokens],
        "top_logprobs": [_most_probable(token, alternatives) for token in tokens],
        "text_offset": offsets,
    }


def _known(token: _Token | Alternative) -> float | None:
    return None if token.log_probability is None else _finite(token.log_probability)


def _most_probable(token: _Token, alternatives: int) -> dict[str, float | None] | None:
    """Log-probabilities of the alternatives of ``token``, and of itself, as in OpenAI's API."""
    if token.log_probability is None:
        return None
    both = (token, *token.alternatives[:alternatives])
    return {_token_text(one.text_bytes): _known(one) for one in both}


def prompt_logprobs(tokens: Sequence[PromptToken], alternatives: int) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: by token id, each token of the prompt and the most probable ones of its position."""
    return [None if token.log_probability is None else _ranked(token, alternatives) for token in tokens]


def _ranked(token: PromptToken, alternatives: int) -> dict[str, Any]:
    others = enumerate(token.alternatives[:alternatives], 1)
    return {str(token.id): _entry(token, token.rank), **{str(other.id): _entry(other, rank) for rank, other in others}}


def _entry(token: PromptToken | Alternative, rank: int) -> dict[str, Any]:
    return {"logprob": _known(token), "rank": rank, "decoded_token": token.text}

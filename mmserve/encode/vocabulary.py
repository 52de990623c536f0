"""Tokens of a model's vocabulary for clients: the ids of prompts, the names of tokens, and their text."""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.core.request import Request
from mmserve.encode.prompts import prompt_of
from mmserve.errors import InvalidArgument
from mmserve.models.base import EncoderModel


def ids_of(model: EncoderModel, request: Request, special_tokens: bool, generation_prompt: bool) -> list[int]:
    """Token ids of the prompt of ``request``, which is text; arguments as in ``prompt_of``."""
    found = prompt_of(model, request, special_tokens=special_tokens, generation_prompt=generation_prompt)
    return [int(each) for each in found.tolist()]


def token_strs(model: EncoderModel, ids: Sequence[int]) -> list[str]:
    """The names of tokens in the vocabulary; empty for placeholders of media that are not in it."""
    return [name or "" for name in model.tokenizer.convert_ids_to_tokens(list(ids))]


def detokenized(model: EncoderModel, ids: Sequence[int]) -> str:
    """The text of tokens, with special tokens.

    Raises ``InvalidArgument`` for ids that are not in the vocabulary, to which placeholders of media belong without a
    row in the embedding.
    """
    size = max(model.vocab_size, len(model.tokenizer))
    if not all(0 <= each < size for each in ids):
        raise InvalidArgument.of("tokens", f"must hold token ids from 0 to {size - 1}")
    return str(model.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

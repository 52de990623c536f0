"""The tokens that a grammar is proved with: plain data, and the trie that llguidance makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST = 32  # bytes; much longer ones make llguidance panic while it builds its trie


@dataclass(frozen=True)
class Vocabulary:
    """``tokens``: the bytes of each id, empty for ids without text; ``end``: the id that ends an answer, and ``ends``
    all that do, where there are several."""

    tokens: tuple[bytes, ...]
    end: int
    ends: tuple[int, ...] = ()

    def fingerprint(self) -> str:
        """A text that two vocabularies share just when they are equal (SHA-256)."""
        digest = hashlib.sha256(str([self.end, *self.ends]).encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "big") + token)
        return digest.hexdigest()


#: One token a byte, and an end.
BYTES = Vocabulary((*(bytes([code]) for code in range(256)), b""), end=256)


def trie_of(vocabulary: Vocabulary) -> Any:
    """llguidance's ``LLTokenizer`` over ``vocabulary``; tokens of more than 32 bytes are never allowed by it."""
    from llguidance import LLTokenizer, TokenizerWrapper  # the child process alone pays for this

    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))


class _Tokens:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end
        self.tokens: Sequence[bytes] = [
            b"\xff<end>" if index == vocabulary.end else token if len(token) <= _LONGEST else b""
            for index, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = [vocabulary.end]
        self._ids = {token: index for index, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._ids]

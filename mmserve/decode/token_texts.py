"""The bytes and the text of single tokens."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedTokenizerBase

from mmserve.models.spelling import Spelling


class _Tokens:
    """Cached bytes and texts of one tokenizer's tokens; decoding one takes tens of microseconds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._spelling = Spelling.of(tokenizer.backend_tokenizer)
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self.bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}

    def learn(self, tokenizer: PreTrainedTokenizerBase, token: int) -> None:
        name = tokenizer.backend_tokenizer.id_to_token(token)
        spelled = None if name is None else self._spelling.bytes_of(name, added=token in self._added)
        self.bytes[token] = _alone(tokenizer, token).encode() if spelled is None else spelled
        self.texts[token] = self.bytes[token].decode(errors="replace")


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, _Tokens] = WeakKeyDictionary()


def token_bytes(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray) -> list[list[bytes]]:
    """The bytes that each of ``tokens`` (int64 ``[n, k]``) adds to a text, if it is not at the beginning; for a special
    token, its name."""
    rows = tokens.tolist()
    known = _known(tokenizer, rows).bytes
    return [[known[token] for token in row] for row in rows]


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray) -> list[list[str]]:
    """The text of each token; incomplete characters are U+FFFD. Arguments as in ``token_bytes``."""
    rows = tokens.tolist()
    known = _known(tokenizer, rows).texts
    return [[known[token] for token in row] for row in rows]


def beginning(tokenizer: PreTrainedTokenizerBase, token: int, spelled: bytes) -> bytes:
    """``spelled``, the bytes of ``token``, at the beginning of a text: SentencePiece's decoders drop a space there."""
    dropped = spelled.startswith(b" ") and _alone(tokenizer, token).encode() == spelled[1:]
    return spelled[1:] if dropped else spelled


def _known(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> _Tokens:
    known = _KNOWN.get(tokenizer)
    if known is None:
        known = _KNOWN[tokenizer] = _Tokens(tokenizer)
    for token in {token for row in rows for token in row} - known.texts.keys():
        known.learn(tokenizer, token)
    return known


def _alone(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token], clean_up_tokenization_spaces=False))

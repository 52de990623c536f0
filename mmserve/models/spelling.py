"""The bytes that a tokenizer's tokens add to a text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Self

from tokenizers import Tokenizer

#: Names of single bytes in SentencePiece vocabularies.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (b for b in range(256) if b not in _PRINTABLE)
#: The alphabet of byte-level BPE, as in GPT-2 (``openai/gpt-2``, ``src/encoder.py``): printable bytes are unchanged,
#: the others are code points from 256 on.
_ALPHABET = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary represents bytes; ``kinds``: the decoder's steps, by their names in tokenizers."""

    kinds: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The spelling of ``tokenizer``."""
        decoder: dict[str, Any] = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        return cls(frozenset(part["type"] for part in (decoder, *decoder.get("decoders", ())) if part))

    @property
    def whole(self) -> bool:
        """Whether all byte sequences can be represented."""
        return bool(self.kinds & {"ByteLevel", "ByteFallback"})

    def bytes_of(self, token: str, *, added: bool = False) -> bytes | None:
        """The bytes of ``token``; ``added``: whether it was added to the vocabulary, so that characters unknown to the
        decoder are plain text.

        None if it has no text, or if the decoder is of an unsupported kind.
        """
        if "ByteFallback" in self.kinds and _BYTE.fullmatch(token):
            return bytes.fromhex(token[3:5])
        if "ByteLevel" in self.kinds and all(c in _ALPHABET for c in token):
            return bytes(_ALPHABET[c] for c in token)
        if self.kinds & {"ByteFallback", "Metaspace"}:
            return token.replace("▁", " ").encode()
        return token.encode() if added else None

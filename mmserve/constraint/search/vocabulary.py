"""A model's tokens as bytes, and as the token trie of llguidance."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

#: Longest token, in bytes, that a constrained text may have: the trie of llguidance 1.9 panics at very long ones.
LONGEST = 32

#: Characters of a JSON string that stand for themselves.
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
#: Tokens that llguidance decides on all at once where a text may hold any of them, those of the first expression that
#: matches them first. Steps of length are for texts with little room left, words for names, addresses and URIs: of
#: 126,000 tokens, masks take a third of what they take with llguidance's own. It judges by form: words must be written
#: as they are here, what they stand in begin with what repeats, and none overlap as words and digits would with words.
_SLICES = (
    *(rf"[A-Za-z][A-Za-z]{{0,{longest - 1}}}" for longest in (4, 8, 12, 20)),
    r"[\x20\x0A\x0D\x09]+",
    *(rf"{_PLAIN}{{1,{longest}}}" for longest in (4, 8, 12, 16, 20, LONGEST)),
    rf"{_PLAIN}+",
)


#: Tokens that are asked for one by one: to ask for their next bytes first takes longer.
_MANY = 16


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of one model for constrained decoding; build it once, then share it between requests."""

    token_bytes: tuple[bytes, ...]  # of each id; empty for ids that no constrained text may hold
    end_ids: frozenset[int]
    trie: LLTokenizer
    content: frozenset[int] = field(repr=False)  # ids that a constrained text may hold
    _ids: dict[bytes, list[int]] = field(repr=False)  # several tokens may have the same bytes
    _sorted: list[bytes] = field(repr=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, end_ids: Collection[int], *, size: int = 0) -> Vocabulary:
        """The tokens of a byte-level or byte-fallback BPE ``tokenizer`` (``fast.backend_tokenizer`` of transformers).

        Args:
            end_ids: tokens that end a text, one at least.
            size: rows of the model's logits, where there are more of them than tokens.

        Raises:
            ValueError: the tokenizer's decoder is of another kind, or there is no end token.
        """
        spelled = spell(tokenizer)
        spelled += [b""] * (size - len(spelled))
        return cls.spelled(spelled, end_ids, tokenizer)

    @classmethod
    def spelled(
        cls, token_bytes: Sequence[bytes], end_ids: Collection[int], tokenizer: Tokenizer | None = None
    ) -> Vocabulary:
        """A vocabulary from the bytes of its tokens; forced text is split by ``tokenizer``, or into bytes without one.

        Tokens of more than ``LONGEST`` bytes, and the end tokens, have no bytes in it.
        """
        if not end_ids:
            raise ValueError("constrained decoding needs a token that ends the text")
        content = tuple(b"" if i in end_ids or len(b) > LONGEST else b for i, b in enumerate(token_bytes))
        wrapped = TokenizerWrapper(_Source(content, sorted(end_ids), tokenizer))
        trie = LLTokenizer(wrapped, n_vocab=len(content), eos_token=sorted(end_ids), slices=list(_SLICES))
        ids: dict[bytes, list[int]] = {}
        for i, b in enumerate(content):
            if b:
                ids.setdefault(b, []).append(i)
        return cls(
            content, frozenset(end_ids), trie, frozenset(i for i, b in enumerate(content) if b), ids, sorted(ids)
        )

    def within(self, text: bytes, *, whole: bool = False) -> list[int]:
        """Tokens that ``text`` begins with; itself only if ``whole``."""
        ends = range(1, min(len(text) + whole, LONGEST + 1))
        return [token for end in ends for token in self._ids.get(text[:end], ())]

    def beginning_with(self, text: bytes, follows: Callable[[list[int]], bool]) -> list[int]:
        """Tokens that begin with ``text``, of those for whose next byte ``follows`` says yes.

        It is asked once a byte, of tokens of one byte each that spell ``text`` and that byte; where there are no such
        tokens, or few that begin with ``text``, the answer counts as yes.
        """
        at, found, size = bisect_left(self._sorted, text), list[int](), len(text)
        end = bisect_left(self._sorted, text + b"\xff" * LONGEST)
        known, wanted = -1, True
        many = end - at > _MANY
        while at < end:
            spelled = self._sorted[at]
            if many and len(spelled) > size and spelled[size] != known:
                known, single = spelled[size], [self._ids.get(spelled[i : i + 1], [])[:1] for i in range(size + 1)]
                wanted = not all(single) or follows([token for tokens in single for token in tokens])
            if len(spelled) == size or wanted:
                found += self._ids[spelled]
                at += 1
            else:  # no token with that byte there
                at = bisect_left(self._sorted, spelled[: size + 1] + b"\xff" * LONGEST)
        return found


class _Source:
    """What llguidance asks of a tokenizer."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: list[int], tokenizer: Tokenizer | None) -> None:
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        # 0xFF stands in no UTF-8 text: it marks a token as special, whose name is then spelled out
        self.tokens = [b or b"\xff[%d]" % i for i, b in enumerate(token_bytes)]
        self.special_token_ids = [i for i, b in enumerate(token_bytes) if not b]
        self._special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizer
        self._singles = {b: i for i, b in enumerate(token_bytes) if len(b) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids that spell ``text``, none of them special."""
        raw = text if isinstance(text, bytes) else text.encode()
        if self._tokenizer is not None:
            ids: list[int] = self._tokenizer.encode(raw.decode(errors="replace"), add_special_tokens=False).ids
            if not self._special.intersection(ids):
                return ids
        return [self._singles[b] for b in (raw[i : i + 1] for i in range(len(raw))) if b in self._singles]


def spell(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each id, empty for special tokens and for ids without a token.

    The alphabet of byte-level BPE is that of GPT-2 (``openai/gpt-2``, ``src/encoder.py``): printable bytes stand for
    themselves, the others for code points from 256 on.
    """
    plain: dict[str, Any] = json.loads(tokenizer.to_str())
    special = {added["id"]: added for added in plain["added_tokens"]}
    kinds = _kinds(plain["decoder"])
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise ValueError("only byte-level and byte-fallback tokenizers can be constrained")
    alphabet = _byte_alphabet()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    spelled = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        if i in special:
            spelled[i] = b"" if special[i]["special"] else token.encode()
        elif "ByteLevel" in kinds:
            spelled[i] = bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else b""
        elif len(token) == 6 and token.startswith("<0x"):
            spelled[i] = bytes([int(token[3:5], 16)])
        else:
            spelled[i] = token.replace("▁", " ").encode()
    return spelled


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """The kinds of a decoder and of the parts of it."""
    parts = [decoder, *decoder.get("decoders", [])] if decoder else []
    return {part["type"] for part in parts}


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}

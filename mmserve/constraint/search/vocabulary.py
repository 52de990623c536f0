"""A model's vocabulary: the bytes of its tokens, llguidance's token trie, token bitmasks, and minimal tokenisations.

A bitmask is a set of tokens in llguidance's layout: uint32 words ``[⌈V / 32⌉]``, the lowest bit of a word first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from mmserve.constraint.compile.wire import TokenTable
from mmserve.models.spelling import Spelling

#: The value of each bit of a word.
_BITS = tuple(np.uint32(1 << i) for i in range(32))
#: Number of tokens up to which a Python loop is faster than numpy.
_FEW = 16


def mask_of(tokens: Collection[int], size: int) -> np.ndarray:
    """The bitmask of ``tokens``, for a vocabulary of ``size`` tokens."""
    words = np.zeros((size + 31) // 32, np.uint32)
    add_tokens(words, tokens)
    return words


def add_tokens(words: np.ndarray, tokens: Collection[int]) -> None:
    """Add ``tokens`` to the set ``words``, in place."""
    if len(tokens) <= _FEW:
        for token in tokens:
            words[token >> 5] |= _BITS[token & 31]
        return
    ids = np.fromiter(tokens, np.int64, len(tokens))
    np.bitwise_or.at(words, ids >> 5, np.left_shift(1, ids & 31).astype(np.uint32))


def remove_tokens(words: np.ndarray, tokens: Collection[int]) -> None:
    """Remove ``tokens``, a few, from the set ``words``, in place."""
    for token in tokens:
        words[token >> 5] &= ~_BITS[token & 31]


def in_mask(words: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Bool, in the shape of ``tokens`` (int64): which of them are in the set."""
    return (words[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 > 0


def tokens_of(words: np.ndarray) -> np.ndarray:
    """The tokens of the set (int64, ascending)."""
    held = np.flatnonzero(words)  # most sets are nearly empty, and unpacking a whole large one takes 0.5 ms
    if len(held) <= _FEW:
        few = zip(held.tolist(), words[held].tolist(), strict=True)
        return np.array([32 * n + bit for n, word in few for bit in range(32) if word >> bit & 1], np.int64)
    bits = np.unpackbits(words[held].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return (held[:, None] * 32 + np.arange(32))[bits.astype(bool)]


def few_tokens_of(words: np.ndarray, most: int) -> np.ndarray | None:
    """As ``tokens_of``; None if there are more than ``most``, which takes a tenth of the time."""
    if np.count_nonzero(words) > most:
        return None
    found = tokens_of(words)
    return found if len(found) <= most else None


def flags_of(words: np.ndarray, size: int) -> np.ndarray:
    """Bool ``[size]``: whether each token is in the set."""
    return np.unpackbits(words.view(np.uint8), count=size, bitorder="little").view(bool)


#: Maximum token length in bytes for constrained texts: the trie of llguidance 1.9 panics at very long ones.
LONGEST = 32

#: Characters that need no escape in a JSON string.
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
#: Slices: sets of tokens that llguidance accepts all at once if a text may contain any of them; each token is in the
#: slice of the first expression that matches it. Length steps are for texts with little budget left, words for names,
#: addresses and URIs: for 126,000 tokens, masks take a third of the time with llguidance's own slices. llguidance
#: compares expressions by form: words must be written as they are here, an expression must begin with its repeated
#: part, and none may overlap.
_SLICES = (
    *(rf"[A-Za-z][A-Za-z]{{0,{longest - 1}}}" for longest in (4, 8, 12, 20)),
    r"[\x20\x0A\x0D\x09]+",
    *(rf"{_PLAIN}{{1,{longest}}}" for longest in (4, 8, 12, 16, 20, LONGEST)),
    rf"{_PLAIN}+",
)
#: Texts that are tried first for a short completion: closers of JSON values, then the shortest values.
_CLOSERS = ('"', "}", "]", ",", "0", "null", "true", '""', "[]", "{}", "{", "[", ":", "1", "-", ".", "a", " ", "e")
#: Bytes that numbers consist of.
_NUMERIC = b"0123456789+-.eE"
#: Maximum length in bytes, and number, of texts whose tokens are cached.
_BRIEF, _KNOWN = 32, 4096
#: Number of candidates up to which each is validated individually; more are first filtered by their next byte.
_MANY = 16


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of one model for constrained decoding; build it once, then share it between requests."""

    token_bytes: tuple[bytes, ...]  # by id; empty for ids that may not be in a constrained text
    end_ids: frozenset[int]
    trie: LLTokenizer
    content: frozenset[int] = field(repr=False)  # ids that may be in a constrained text
    _ids: dict[bytes, list[int]] = field(repr=False)  # several tokens may have the same bytes
    _sorted: list[bytes] = field(repr=False)

    @classmethod
    def spelled(
        cls, token_bytes: Sequence[bytes], end_ids: Collection[int], tokenizer: Tokenizer | None = None
    ) -> Vocabulary:
        """The vocabulary of tokens with the bytes ``token_bytes``, by id; empty for tokens without text (``spell``).

        Tokens of more than ``LONGEST`` bytes, and the end tokens, have no bytes in it.

        Args:
            end_ids: tokens that end a text, at least one.
            tokenizer: splits forced text; without one, it is split into bytes.

        Raises:
            ValueError: there is no end token.
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

    @classmethod
    def of(cls, table: TokenTable) -> Vocabulary:
        """The vocabulary of ``table``; forced text is split into bytes."""
        return cls.spelled(table.tokens, table.ends)

    def within(self, text: bytes, *, whole: bool = False) -> list[int]:
        """Tokens that are prefixes of ``text``; the whole ``text`` only if ``whole``."""
        ends = range(1, min(len(text) + whole, LONGEST + 1))
        return [token for end in ends for token in self._ids.get(text[:end], ())]

    def beginning_with(self, text: bytes, follows: Callable[[list[int]], bool]) -> list[int]:
        """Tokens that begin with ``text`` and for whose next byte ``follows`` returns true.

        ``follows`` is called once for each byte, with single-byte tokens for ``text`` and that byte. Tokens are not
        filtered if there are no single-byte tokens, or if few tokens begin with ``text``.
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
            else:  # no single-byte token
                at = bisect_left(self._sorted, spelled[: size + 1] + b"\xff" * LONGEST)
        return found


class _Source:
    """Adapter of a tokenizer for llguidance's ``TokenizerWrapper``."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: list[int], tokenizer: Tokenizer | None) -> None:
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        # 0xFF is in no UTF-8 text: llguidance takes tokens that begin with it as special
        self.tokens = [b or b"\xff[%d]" % i for i, b in enumerate(token_bytes)]
        self.special_token_ids = [i for i, b in enumerate(token_bytes) if not b]
        self._special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizer
        self._singles = {b: i for i, b in enumerate(token_bytes) if len(b) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids that spell ``text``, without special tokens."""
        raw = text if isinstance(text, bytes) else text.encode()
        if self._tokenizer is not None:
            ids: list[int] = self._tokenizer.encode(raw.decode(errors="replace"), add_special_tokens=False).ids
            if not self._special.intersection(ids):
                return ids
        return [self._singles[b] for b in (raw[i : i + 1] for i in range(len(raw))) if b in self._singles]


def spell(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each id; empty for special tokens and for ids without a token.

    Raises:
        ValueError: ``tokenizer`` is neither a byte-level nor a byte-fallback BPE one.
    """
    spelling = Spelling.of(tokenizer)
    if not spelling.whole:
        raise ValueError("only byte-level and byte-fallback tokenizers can be constrained")
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    spelled = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        if not (i in added and added[i].special):
            spelled[i] = spelling.bytes_of(token, added=i in added) or b""
    return spelled


@dataclass(frozen=True)
class Scalars:
    """The roles of tokens in JSON's strings and numbers."""

    quotes: tuple[int, ...]  # tokens that begin with a quote, shortest first
    digits: tuple[int, ...]  # single bytes of numbers
    opening: np.ndarray  # bitmask: a quote, followed by more bytes without a quote
    numeric: np.ndarray  # bitmask: several bytes, all of them of a number
    counting: np.ndarray  # bool [V]: tokens that begin with a byte of a number
    after_strings: tuple[bytes, ...]  # bytes that tokens have after a quote
    after_numbers: tuple[bytes, ...]  # bytes after the number in tokens that begin with a number

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> Scalars:
        """The scalars of a vocabulary with ``token_bytes`` by id; empty for special tokens."""
        opening, numeric, counting = (np.zeros(len(token_bytes), bool) for _ in range(3))
        quotes, digits = list[int](), list[int]()
        after_strings, after_numbers = set[bytes](), set[bytes]()
        for i, b in enumerate(token_bytes):
            rest = b.lstrip(_NUMERIC)
            counting[i] = len(rest) < len(b)
            if rest and counting[i]:
                after_numbers.add(rest)
            elif counting[i]:
                numeric[i] = len(b) > 1
                digits += [i] * (len(b) == 1)
            if b'"' in b:
                after_strings.update(b[n + 1 :] for n in range(len(b) - 1) if b[n : n + 1] == b'"')
                if b[:1] == b'"':
                    quotes.append(i)
                    opening[i] = len(b) > 1 and b.count(b'"') == 1
        quotes.sort(key=lambda i: len(token_bytes[i]))
        return cls(
            tuple(quotes),
            tuple(digits),
            mask_of(np.flatnonzero(opening).tolist(), len(token_bytes)),
            mask_of(np.flatnonzero(numeric).tolist(), len(token_bytes)),
            counting,
            tuple(sorted(after_strings)),
            tuple(sorted(after_numbers)),
        )


@dataclass(frozen=True)
class Lexicon:
    """The tokens of a vocabulary by their bytes; created once for a model."""

    ids: dict[bytes, int]
    content: frozenset[int] = field(repr=False)  # tokens with bytes
    spelled: Sequence[bytes]  # by id; empty for special tokens
    prefixes: frozenset[bytes]  # of all tokens
    closers: np.ndarray  # int64: single bytes and short texts, closers of JSON values first
    fillers: np.ndarray  # int64: long tokens of letters and digits, longest first, for texts that must be long
    scalars: Scalars = field(repr=False)
    _known: dict[bytes, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> Lexicon:
        """The lexicon of a vocabulary with ``token_bytes`` by id; empty for special tokens."""
        ids: dict[bytes, int] = {}
        for i, spelled in enumerate(token_bytes):
            if spelled:
                ids.setdefault(spelled, i)
        first = [text.encode() for text in _CLOSERS]
        printable = [bytes([b]) for b in (*range(0x20, 0x7F), *range(0x20), *range(0x7F, 0x100))]
        order = dict.fromkeys(b for b in (*first, *printable) if b in ids)
        closers = np.array([ids[b] for b in order], np.int64)
        # one token of each length and kind is enough
        long = {(len(b), b.isdigit(), b.islower()): i for b, i in ids.items() if len(b) > 1 and b.isalnum()}
        fillers = [long[key] for key in sorted(long, reverse=True)]
        prefixes = frozenset(b[:n] for b in ids for n in range(1, len(b) + 1))
        content = frozenset(i for i, spelled in enumerate(token_bytes) if spelled)
        return cls(ids, content, token_bytes, prefixes, closers, np.array(fillers, np.int64), Scalars.of(token_bytes))

    def text(self, tokens: Sequence[int]) -> bytes:
        """The bytes of ``tokens``."""
        return b"".join([self.spelled[token] for token in tokens])

    def cover(self, text: bytes) -> list[int] | None:
        """The tokenisation of ``text`` with the fewest tokens; None if there is none."""
        if not text:
            return []
        if len(text) > _BRIEF:
            return self._covered(text)
        known = self._known.get(text)  # a search uses the same few texts repeatedly
        if known is None:
            known = self._covered(text)
            if known is None:
                return None
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[text] = known
        return known.copy()

    def _covered(self, text: bytes) -> list[int] | None:
        size = len(text)
        costs, start_of = [0] + [size + 1] * size, [0] * (size + 1)
        for start in range(size):
            cost = costs[start] + 1
            for end in range(start + 1, size + 1):
                piece = text[start:end]
                if piece not in self.prefixes:
                    break
                if cost < costs[end] and piece in self.ids:
                    costs[end], start_of[end] = cost, start
        if costs[size] > size:
            return None
        tokens: list[int] = []
        end = size
        while end:
            tokens.append(self.ids[text[start_of[end] : end]])
            end = start_of[end]
        return tokens[::-1]

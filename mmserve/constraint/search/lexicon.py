"""Tokens by their bytes: the fewest tokens that spell a text, and tokens that are likely to complete one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mmserve.constraint.search import bitmask

#: Texts tried first for a short completion: what closes JSON values, then the shortest values.
_CLOSERS = ('"', "}", "]", ",", "0", "null", "true", '""', "[]", "{}", "{", "[", ":", "1", "-", ".", "a", " ", "e")
#: Bytes that numbers consist of.
_NUMERIC = b"0123456789+-.eE"
#: Length in bytes and number of texts whose tokens are cached.
_BRIEF, _KNOWN = 32, 4096


@dataclass(frozen=True)
class Scalars:
    """The roles of tokens in JSON's strings and numbers."""

    quotes: tuple[int, ...]  # tokens that begin with a quote, the shortest first
    digits: tuple[int, ...]  # single bytes of numbers
    opening: np.ndarray  # a ``bitmask``: a quote, more after it, and no other quote
    numeric: np.ndarray  # a ``bitmask``: several bytes of a number and nothing else
    counting: np.ndarray  # bool [V]: tokens that begin with a byte of a number
    behind_strings: tuple[bytes, ...]  # what tokens hold after a quote
    behind_numbers: tuple[bytes, ...]  # what tokens that begin as numbers do hold after the number

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> Scalars:
        """Those of a vocabulary: ``token_bytes`` of each id, empty for special tokens."""
        opening, numeric, counting = (np.zeros(len(token_bytes), bool) for _ in range(3))
        quotes, digits = list[int](), list[int]()
        behind_strings, behind_numbers = set[bytes](), set[bytes]()
        for i, b in enumerate(token_bytes):
            rest = b.lstrip(_NUMERIC)
            counting[i] = len(rest) < len(b)
            if rest and counting[i]:
                behind_numbers.add(rest)
            elif counting[i]:
                numeric[i] = len(b) > 1
                digits += [i] * (len(b) == 1)
            if b'"' in b:
                behind_strings.update(b[n + 1 :] for n in range(len(b) - 1) if b[n : n + 1] == b'"')
                if b[:1] == b'"':
                    quotes.append(i)
                    opening[i] = len(b) > 1 and b.count(b'"') == 1
        quotes.sort(key=lambda i: len(token_bytes[i]))
        return cls(
            tuple(quotes),
            tuple(digits),
            bitmask.of(np.flatnonzero(opening).tolist(), len(token_bytes)),
            bitmask.of(np.flatnonzero(numeric).tolist(), len(token_bytes)),
            counting,
            tuple(sorted(behind_strings)),
            tuple(sorted(behind_numbers)),
        )


@dataclass(frozen=True)
class Lexicon:
    """The tokens of a vocabulary by their bytes; built once for a model."""

    ids: dict[bytes, int]
    content: frozenset[int] = field(repr=False)  # tokens with bytes
    spelled: Sequence[bytes]  # of each id; empty for special tokens
    prefixes: frozenset[bytes]  # of all tokens
    closers: np.ndarray  # int64: single bytes and short texts, those that close JSON first
    fillers: np.ndarray  # int64: long tokens of letters and digits, longest first, for texts that must be long
    scalars: Scalars = field(repr=False)
    _known: dict[bytes, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> Lexicon:
        """The lexicon of a vocabulary: ``token_bytes`` of each id, empty for special tokens."""
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
        """The fewest tokens that spell ``text``; None where none do."""
        if not text:
            return []
        if len(text) > _BRIEF:
            return self._covered(text)
        known = self._known.get(text)  # a search asks for the same few texts again and again
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

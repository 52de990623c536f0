"""Token bitmasks, as llguidance fills them: uint32 words ``[⌈V / 32⌉]``, the lowest bit of a word first."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

#: Of each bit of a word.
_BITS = tuple(np.uint32(1 << i) for i in range(32))
#: Number of tokens up to which a Python loop is faster than numpy.
_FEW = 16


def of(tokens: Collection[int], size: int) -> np.ndarray:
    """The set of ``tokens``, of a vocabulary of ``size``."""
    words = np.zeros((size + 31) // 32, np.uint32)
    add(words, tokens)
    return words


def add(words: np.ndarray, tokens: Collection[int]) -> None:
    """Add ``tokens`` to the set ``words``, in place."""
    if len(tokens) <= _FEW:
        for token in tokens:
            words[token >> 5] |= _BITS[token & 31]
        return
    ids = np.fromiter(tokens, np.int64, len(tokens))
    np.bitwise_or.at(words, ids >> 5, np.left_shift(1, ids & 31).astype(np.uint32))


def remove(words: np.ndarray, tokens: Collection[int]) -> None:
    """Remove ``tokens``, a few, from the set ``words``, in place."""
    for token in tokens:
        words[token >> 5] &= ~_BITS[token & 31]


def has(words: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Bool, of the shape of ``tokens`` (int64): which of them are in the set."""
    return (words[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 > 0


def ids(words: np.ndarray) -> np.ndarray:
    """The tokens of the set (int64, ascending)."""
    held = np.flatnonzero(words)  # most sets are nearly empty, and unpacking all of a large one takes 0.5 ms
    if len(held) <= _FEW:
        few = zip(held.tolist(), words[held].tolist(), strict=True)
        return np.array([32 * n + bit for n, word in few for bit in range(32) if word >> bit & 1], np.int64)
    bits = np.unpackbits(words[held].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return (held[:, None] * 32 + np.arange(32))[bits.astype(bool)]


def few(words: np.ndarray, most: int) -> np.ndarray | None:
    """As ``ids``; None where there are more than ``most``, which takes a tenth of the time to find out."""
    if np.count_nonzero(words) > most:
        return None
    found = ids(words)
    return found if len(found) <= most else None


def flags(words: np.ndarray, size: int) -> np.ndarray:
    """Bool ``[size]``: whether each token is in the set."""
    return np.unpackbits(words.view(np.uint8), count=size, bitorder="little").view(bool)

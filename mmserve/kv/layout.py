"""A batch in plain arrays: which rows are attended to together, over which pages, before any of it is on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Piece:
    """Rows of one request that are attended to together: how many, over how many positions, on which pages."""

    rows: int
    length: int
    table: np.ndarray


@dataclass(frozen=True)
class Layout:
    """A batch as ``Ragged`` has it, in plain arrays (int64); ``cascade``: how those of its rows are read that share
    pages."""

    row_counts: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    page_tables: tuple[np.ndarray, ...]
    slots: np.ndarray
    kv_limit: np.ndarray | None
    window_end: np.ndarray | None = None
    cascade: Cascade | None = None

    @classmethod
    def of(cls, pieces: Sequence[Piece], slots: np.ndarray, kv_limit: np.ndarray | None) -> Layout:
        """``pieces`` in the order of their rows."""
        counts, lengths = tuple(p.rows for p in pieces), tuple(p.length for p in pieces)
        return cls(counts, lengths, tuple(p.table for p in pieces), slots, kv_limit)


@dataclass(frozen=True)
class Cascade:
    """Attention in two parts of the requests of a batch whose first pages are the same: over those pages, which are
    read once for the rows of all of them, and over each one's own.

    Hydragen (arXiv 2402.05099) reads shared prefixes so; log-sum-exps tell how much each part counts. ``others`` and
    ``branches`` (int64) are the rows of the batch without and with shared pages, ``apart`` and ``own`` what is read of
    them. ``shared`` is read for the rows ``together`` (int64): those of ``branches`` are at ``places`` (int64) there.
    """

    others: np.ndarray
    apart: Layout
    branches: np.ndarray
    own: Layout
    together: np.ndarray
    places: np.ndarray
    shared: Layout


def by_page(whole: Piece, limits: np.ndarray, own: np.ndarray | None, page_size: int) -> list[Piece]:
    """Rows whose sight ends in one page by themselves, up to that page's end, as if they were a request; with
    their ``own`` positions, those that also stand in one page.

    Sums over another number of keys come out with other last bits. So none of a row's bits depends on how much
    of its request is run with it, and a page's K/V do not depend on the request. It costs little: 1008 rows
    of 8 heads of 32 took 14.9 ms in pages of 16, and 14.1 as one request.
    """
    last = (limits - 1) // page_size
    apart = np.diff(last) != 0
    if own is not None:
        apart |= np.diff(own // page_size) != 0
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), whole.rows]
    return [
        Piece(b - a, min(whole.length, (page + 1) * page_size), whole.table[: page + 1])
        for a, b in pairwise(cuts)
        for page in last[a : a + 1].tolist()
    ]


def cascade_of(
    requests: Sequence[Sequence[Piece]], whole: Layout, shared: Sequence[int], page_size: int, fewest: int
) -> Cascade | None:
    """How the ``requests`` of the ``whole`` batch are read; None where none shares pages.

    ``shared``: with how many pages each begins that those next to it begin with as well; such a request is one piece.

    At least ``fewest`` rows are read together: some more than once where there are fewer.
    """
    if not any(shared):
        return None
    counts = [sum(piece.rows for piece in pieces) for pieces in requests]
    rows = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    own, groups = list[Piece](), list[tuple[np.ndarray, list[np.ndarray]]]()
    for [piece], pages, at in (each for each in zip(requests, shared, rows, strict=True) if each[1]):
        own.append(Piece(piece.rows, piece.length - pages * page_size, piece.table[pages:]))
        first = piece.table[:pages]
        if not groups or not np.array_equal(groups[-1][0], first):
            groups.append((first, []))
        groups[-1][1].append(at)
    branches = np.concatenate([at for at, pages in zip(rows, shared, strict=True) if pages])
    before = np.concatenate([np.full(n, pages) for n, pages in zip(counts, shared, strict=True) if pages]) * page_size
    others = np.concatenate([np.zeros(0, np.int64), *(at for at, n in zip(rows, shared, strict=True) if not n)])
    apart = [piece for pieces, pages in zip(requests, shared, strict=True) if not pages for piece in pieces]
    together = [np.concatenate(members) for _first, members in groups]
    together = [np.pad(at, (0, max(0, fewest - len(at))), mode="edge") for at in together]
    read = [Piece(len(at), len(pages) * page_size, pages) for at, (pages, _m) in zip(together, groups, strict=True)]
    limit = whole.kv_limit
    joined = np.concatenate(together)
    return Cascade(
        others,
        Layout.of(apart, whole.slots[others], None if limit is None else limit[others]),
        branches,
        Layout.of(own, whole.slots[branches], None if limit is None else limit[branches] - before),
        joined,
        np.searchsorted(joined, branches),
        Layout.of(read, whole.slots[joined], None),
    )

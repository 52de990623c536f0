"""What ``cached_attention`` is asked: whose rows are whose, and where each request's keys and values lie.

Shapes in names: T query rows of all requests, S positions a page; R requests of a batch of fixed size, W pages of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from mmserve_kernels.cached_attention.pieces import Piece, pieces, triangle


@dataclass(frozen=True, eq=False)
class LoneRows:
    """Where each of R rows looks (int64): its first ``lengths [R]`` positions, on the pages from ``starts [R]`` of
    ``pages`` on."""

    pages: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True, eq=False)
class Ragged:
    """Which rows of a batch are whose, and where each request's keys and values lie.

    Rows are laid request after request; ``row_counts[r]`` of them belong to request r, whose ``kv_lengths[r]``
    positions fill the pages ``page_tables[r]`` (int64 ``[ceil(kv_length / S)]``) in order. ``slots`` (int64 ``[T]``)
    gives the slot of each row's own key and value: page × S + offset. ``kv_limit`` (int64 ``[T]``) bounds what a
    row may look at: positions below its limit; None = all of its request. ``window_end`` (int64 ``[T]``): where a
    row's sliding window ends, before its limit, which it then sees as well; None = at the limit.
    """

    row_counts: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    page_tables: tuple[Tensor, ...]
    slots: Tensor
    kv_limit: Tensor | None = None
    window_end: Tensor | None = None

    @cached_property
    def runs(self) -> tuple[int | None, ...]:
        """First page of each request whose pages lie one after another in a CPU's memory; None of others."""
        if self.slots.device.type != "cpu":
            return (None,) * len(self.page_tables)
        return tuple(_first_of_run(table.numpy()) for table in self.page_tables)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What is attended to together. A GPU is not asked what rows see: there, their limits are looked up."""
        limits = self.kv_limit
        known = limits is None or limits.device.type == "cpu"
        on_host = limits.numpy() if limits is not None and known else None
        return pieces(self.row_counts, self.kv_lengths, on_host, known=known)

    @cached_property
    def piece_rows(self) -> list[int]:
        """Rows of each piece."""
        return [piece.rows for piece in self.pieces]

    @cached_property
    def lone_rows(self) -> LoneRows | None:
        """Where each row looks, if each is a piece by itself whose sight is known; None where that is not so."""
        if len(self.pieces) < len(self.slots) or not all(p.rows == 1 and p.reach for p in self.pieces):
            return None
        tables = [self.page_tables[piece.request].numpy() for piece in self.pieces]
        return LoneRows(
            np.concatenate(tables),
            np.cumsum([0, *(len(table) for table in tables[:-1])]),
            np.array([piece.reach for piece in self.pieces]),
        )

    @cached_property
    def triangle(self) -> tuple[int, int, int]:
        """Rows and columns of the mask that those pieces share whose rows see one position more each."""
        return triangle(self.pieces)


def _first_of_run(pages: np.ndarray) -> int | None:
    count = len(pages)
    if not count or int(pages[-1]) - int(pages[0]) != count - 1 or not (pages[1:] > pages[:-1]).all():
        return None
    return int(pages[0])


@dataclass(frozen=True, eq=False)
class FixedBatch:
    """A batch in tensors of fixed shapes: what is in them may change between two runs of the same recorded work.

    All int64, on one device. Rows are laid as in ``Ragged``: ``row_counts [R]`` of them belong to each request, whose
    ``kv_lengths [R]`` positions fill the first pages of its row of ``page_tables [R, W]``. Rows past the last request's
    see nothing. ``slots [T]`` and ``kv_limit [T]`` are as in ``Ragged``; the limit is always there, at most the
    request's length. Entries of ``page_tables`` that hold nothing name any page of the store.
    """

    row_counts: Tensor
    kv_lengths: Tensor
    page_tables: Tensor
    slots: Tensor
    kv_limit: Tensor

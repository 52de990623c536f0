"""Inputs of ``cached_attention``: the requests' rows, and the pages of each request's keys and values.

Shapes in names: T query rows of all requests, S positions a page; R requests of a batch of fixed size, W pages of
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from mmserve_kernels.cached_attention.pieces import Piece, pieces, triangle


@dataclass(frozen=True, eq=False)
class LoneRows:
    """Visible positions of each of R rows (int64): the first ``lengths [R]`` positions on the pages of ``pages`` that
    begin at index ``starts [R]``."""

    pages: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged batch: the rows of each request, and the pages of its keys and values.

    Rows are concatenated request after request; ``row_counts[r]`` of them belong to request r, whose ``kv_lengths[r]``
    positions fill the pages ``page_tables[r]`` (int64 ``[ceil(kv_length / S)]``) in order. ``slots`` (int64 ``[T]``) is
    the slot of each row's own key and value: page × S + offset. ``kv_limit`` (int64 ``[T]``): a row attends only to
    positions below its limit; None = all of its request. ``window_end`` (int64 ``[T]``): the position at which a row's
    sliding window ends, below its limit; later positions up to the limit are visible as well; None = at the limit.
    """

    row_counts: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    page_tables: tuple[Tensor, ...]
    slots: Tensor
    kv_limit: Tensor | None = None
    window_end: Tensor | None = None

    @cached_property
    def runs(self) -> tuple[int | None, ...]:
        """First page of each request whose pages are contiguous in CPU memory; None for others."""
        if self.slots.device.type != "cpu":
            return (None,) * len(self.page_tables)
        return tuple(_first_of_run(table.numpy()) for table in self.page_tables)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Groups of rows that are attended in one call. Limits on a GPU are not read here (``LOOKED_UP``)."""
        limits = self.kv_limit
        known = limits is None or limits.device.type == "cpu"
        on_host = limits.numpy() if limits is not None and known else None
        return pieces(self.row_counts, self.kv_lengths, on_host, known=known)

    @cached_property
    def piece_rows(self) -> list[int]:
        """Number of rows of each piece."""
        return [piece.rows for piece in self.pieces]

    @cached_property
    def lone_rows(self) -> LoneRows | None:
        """Visible positions of each row, if every row is a separate piece with known visibility; else None."""
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
        """Rows and columns of the mask shared by pieces in which each row sees one position more than the previous
        one."""
        return triangle(self.pieces)


def _first_of_run(pages: np.ndarray) -> int | None:
    count = len(pages)
    if not count or int(pages[-1]) - int(pages[0]) != count - 1 or not (pages[1:] > pages[:-1]).all():
        return None
    return int(pages[0])


@dataclass(frozen=True, eq=False)
class FixedBatch:
    """A batch in tensors of fixed shapes, whose contents may change between replays of a CUDA graph.

    All int64, on one device. Rows are laid out as in ``Ragged``: ``row_counts [R]`` of them belong to each request,
    whose ``kv_lengths [R]`` positions fill the first pages of its row of ``page_tables [R, W]``. Rows after those of
    the last request see no positions. ``slots [T]`` and ``kv_limit [T]`` are as in ``Ragged``; the limit is required,
    at most the request's length. Unused entries of ``page_tables`` hold any valid page id.
    """

    row_counts: Tensor
    kv_lengths: Tensor
    page_tables: Tensor
    slots: Tensor
    kv_limit: Tensor

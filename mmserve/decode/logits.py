"""Logits by the slice: never more rows of them at once than memory is set aside for.

A vocabulary of 126k tokens makes half a megabyte of each row in fp32, and a sampler several such copies. So hidden
states are kept, which are small, and become logits only when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve.kv.on_device import on_device
from mmserve.models.decoder import Decoder
from mmserve.models.lora import Adapted, Adapter, Stacks
from mmserve.models.packed import FEWEST_ROWS

#: Elements of a slice, on a CPU and on a GPU: 33 and 530 rows of LLaDA's vocabulary, 16 and 256 MiB in fp32. The output
#: layer's weights are read once a slice, and requests share one call of the sampler only within one.
SLICE_ELEMENTS, GPU_SLICE_ELEMENTS = 1 << 22, 1 << 26


def padded_rows(rows: int, floor: int, fewest: int = FEWEST_ROWS) -> int:
    """How many rows a product of ``rows`` rows has: a multiple of ``floor``, and one of eight sizes an octave, at least
    ``fewest``.

    oneDNN compiles and keeps a kernel for each number of rows (up to 1,024 kernels, some 200 KiB each).
    """
    if not rows:
        return 0
    rows = max(rows, fewest)
    step = max(floor, 1 << max(0, rows.bit_length() - 4))
    step += -step % floor
    return rows + -rows % step


def slice_rows(vocabulary: int, device: torch.device) -> int:
    """Rows of a slice over ``vocabulary`` tokens on ``device``, at least one."""
    return max(1, (SLICE_ELEMENTS if device.type == "cpu" else GPU_SLICE_ELEMENTS) // vocabulary)


@dataclass(frozen=True)
class RowAdapters:
    """The adapter, if any, of each row of which logits are wanted."""

    rows: Sequence[Adapter | None]
    device: torch.device
    stacks: Stacks

    def only(self, rows: np.ndarray) -> RowAdapters:
        """Those of some of the rows (int64)."""
        return replace(self, rows=[self.rows[row] for row in rows])

    def of(self, start: int, end: int) -> Adapted:
        """What the adapters of rows ``start`` to ``end`` add."""
        return Adapted([1] * (end - start), self.rows[start:end], self.device, self.stacks)


class RowLogits(Protocol):
    """Logits of one request's rows, made slice by slice when they are read, once and in order."""

    def only(self, rows: np.ndarray) -> RowLogits:
        """The logits of some of the rows (int64, ascending): the others are not made."""
        ...

    def slices(self) -> Iterator[Tensor]:
        """Logits ``[rows, V]`` of the next rows, to be changed at will."""
        ...

    def whole(self) -> Tensor:
        """Logits ``[rows, V]`` of all rows at once, fp32: for a few rows only."""
        ...


class Logits:
    """Logits of one request's rows, read once and in order; neighbours in a batch share matrix products."""

    def __init__(self, head: _Head, cuts: Sequence[tuple[int, int, int]], start: int) -> None:
        self._head, self._cuts, self._start = head, cuts, start

    def only(self, rows: np.ndarray) -> Logits:
        """The logits of some of the rows (int64, ascending): the others are not made."""
        return self._head.only(self._start + rows)

    def slices(self) -> Iterator[Tensor]:
        """Logits ``[rows, V]`` of the next rows, in the model's dtype, to be changed at will; where a request is cut
        does not depend on the batch."""
        for product, start, end in self._cuts:
            yield self._head.product(product)[start:end]

    @property
    def product(self) -> int | None:
        """Which of the batch's matrix products holds all of these rows; None where it is not one."""
        return self._cuts[0][0] if len(self._cuts) == 1 else None

    def whole(self) -> Tensor:
        """Logits ``[rows, V]`` of all rows at once, fp32: for a few rows only."""
        made = [part.float() for part in self.slices()]
        return torch.cat(made) if made else self._head.none()


class _Head:
    """Hidden states of a batch, and the latest of the matrix products that make logits of them."""

    def __init__(
        self,
        decoder: Decoder,
        hidden_TD: Tensor,
        floor: int,
        bounds: Sequence[tuple[int, int]],
        adapters: RowAdapters | None,
    ) -> None:
        self._decoder, self._hidden, self._floor, self._bounds = decoder, hidden_TD, floor, bounds
        self._adapters = adapters
        self._index, self._made = -1, hidden_TD[:0]

    def only(self, rows: np.ndarray) -> Logits:
        """The logits of some rows of the batch."""
        hidden = self._hidden[on_device(rows, self._hidden.device)]
        adapters = self._adapters and self._adapters.only(rows)
        return by_slices(self._decoder, hidden, [len(rows)], self._floor, adapters)[0]

    def none(self) -> Tensor:
        """Logits ``[0, V]`` of no row, fp32."""
        return self._hidden.new_zeros(0, self._decoder.config.vocab_size, dtype=torch.float32)

    def product(self, index: int) -> Tensor:
        """Logits ``[rows, V]`` of product ``index``; the one before is given up, so that one is held at a time."""
        if index != self._index:
            self._made = self._hidden[:0]
            start, end = self._bounds[index]
            padding = padded_rows(end - start, self._floor, self._decoder.fewest_rows) - (end - start)
            adapted = None if self._adapters is None else self._adapters.of(start, end)
            self._made = self._decoder.logits(F.pad(self._hidden[start:end], (0, 0, 0, padding)), adapted)
            self._index = index
        return self._made


def by_slices(
    decoder: Decoder, hidden_TD: Tensor, counts: Sequence[int], floor: int, adapters: RowAdapters | None = None
) -> list[Logits]:
    """The logits of requests with ``counts`` rows each of ``hidden_TD``, one after another; ``adapters`` of those rows,
    where one changes the output layer.

    Each request is cut every ``slice_rows``, and as many cuts of one or more requests as fit in a slice go through one
    matrix product, padded to a multiple of ``floor`` rows (see ``row_floor``).
    """
    most = slice_rows(decoder.config.vocab_size, hidden_TD.device)
    bounds: list[tuple[int, int]] = []
    cuts: list[list[tuple[int, int, int]]] = []
    offset, starts = 0, list[int]()
    for count in counts:
        cuts.append([])
        starts.append(offset)
        for start in range(0, count, most):
            begin, end = offset + start, offset + min(start + most, count)
            if bounds and end - bounds[-1][0] <= most:
                bounds[-1] = (bounds[-1][0], end)
            else:
                bounds.append((begin, end))
            first = bounds[-1][0]
            cuts[-1].append((len(bounds) - 1, begin - first, end - first))
        offset += count
    head = _Head(decoder, hidden_TD, floor, bounds, adapters)
    return [Logits(head, own, start) for own, start in zip(cuts, starts, strict=True)]


def slices(logits: Tensor | RowLogits) -> Iterator[Tensor]:
    """Slices of logits that are there, or are yet to be made."""
    if isinstance(logits, Tensor):
        return iter(logits.split(slice_rows(logits.shape[-1], logits.device)))
    return logits.slices()


def joined(parts: Sequence[Logits]) -> Tensor:
    """Logits ``[rows, V]`` of parts of a batch that lie in the same matrix product, one after another, in the model's
    dtype, to be changed at will."""
    cuts = [cut for part in parts for cut in part._cuts]
    if len({product for product, _start, _end in cuts}) != 1:
        raise ValueError("the rows are of several matrix products")
    made = parts[0]._head.product(cuts[0][0])
    if all(one[2] == other[1] for one, other in pairwise(cuts)):
        return made[cuts[0][1] : cuts[-1][2]]
    return torch.cat([made[start:end] for _product, start, end in cuts])

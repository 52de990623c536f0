"""Logits computed in slices, so that their memory is bounded.

With a vocabulary of 126k tokens, one row takes half a megabyte in fp32, and a sampler makes several such copies. So
hidden states are kept, which are small, and logits are computed from them only when they are read.
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

#: Elements of a slice on a CPU and on a GPU: 33 and 530 rows of LLaDA's vocabulary, 16 and 256 MiB in fp32. The output
#: layer's weights are read once for each slice, and requests can share a call of the sampler only within one.
SLICE_ELEMENTS, GPU_SLICE_ELEMENTS = 1 << 22, 1 << 26


def padded_rows(rows: int, floor: int, fewest: int = FEWEST_ROWS) -> int:
    """The padded row count of a matrix product: at least ``fewest``, a multiple of ``floor``, and one of eight sizes an
    octave.

    The number of sizes is limited because oneDNN compiles and caches a kernel for each (up to 1,024 kernels, some 200
    KiB each).
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
    """The adapter, if any, of each row whose logits are wanted."""

    rows: Sequence[Adapter | None]
    device: torch.device
    stacks: Stacks

    def only(self, rows: np.ndarray) -> RowAdapters:
        """The adapters of some of the rows (int64)."""
        return replace(self, rows=[self.rows[row] for row in rows])

    def of(self, start: int, end: int) -> Adapted:
        """The adapter weights of rows ``start`` to ``end``."""
        return Adapted([1] * (end - start), self.rows[start:end], self.device, self.stacks)


class RowLogits(Protocol):
    """Logits of one request's rows, computed in slices when they are read; read once and in order."""

    def only(self, rows: np.ndarray) -> RowLogits:
        """The logits of some of the rows (int64, ascending); the others are not computed."""
        ...

    def slices(self) -> Iterator[Tensor]:
        """Yields logits ``[rows, V]`` of the next rows; the caller may modify them."""
        ...

    def whole(self) -> Tensor:
        """Logits ``[rows, V]`` of all rows at once, fp32; use for few rows only."""
        ...


class Logits:
    """Logits of one request's rows, read once and in order; adjacent requests of a batch share matrix products."""

    def __init__(self, head: _Head, cuts: Sequence[tuple[int, int, int]], start: int) -> None:
        self._head, self._cuts, self._start = head, cuts, start

    def only(self, rows: np.ndarray) -> Logits:
        """The logits of some of the rows (int64, ascending); the others are not computed."""
        return self._head.only(self._start + rows)

    def slices(self) -> Iterator[Tensor]:
        """Yields logits ``[rows, V]`` of the next rows, in the model's dtype; the caller may modify them. The
        boundaries of a request's slices do not depend on the batch."""
        for product, start, end in self._cuts:
            yield self._head.product(product)[start:end]

    @property
    def product(self) -> int | None:
        """The index of the batch's matrix product that has all of these rows; None if they are in several."""
        return self._cuts[0][0] if len(self._cuts) == 1 else None

    def whole(self) -> Tensor:
        """Logits ``[rows, V]`` of all rows at once, fp32; use for few rows only."""
        made = [part.float() for part in self.slices()]
        return torch.cat(made) if made else self._head.none()


class _Head:
    """Hidden states of a batch, and the result of the latest matrix product with the output layer."""

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
        """Empty logits ``[0, V]``, fp32."""
        return self._hidden.new_zeros(0, self._decoder.config.vocab_size, dtype=torch.float32)

    def product(self, index: int) -> Tensor:
        """Logits ``[rows, V]`` of product ``index``; frees the previous product, so that only one is held at a time."""
        if index != self._index:
            self._made = self._hidden[:0]
            start, end = self._bounds[index]
            adapted = None if self._adapters is None else self._adapters.of(start, end)
            padded = padded_rows(end - start, self._floor, self._decoder.fewest_rows)
            rows = self._hidden[start : start + padded]  # what follows these rows pads them
            if len(rows) < padded:
                rows = F.pad(rows, (0, 0, 0, padded - len(rows)))
            self._made = self._decoder.logits(rows, adapted)
            self._index = index
        return self._made


def by_slices(
    decoder: Decoder, hidden_TD: Tensor, counts: Sequence[int], floor: int, adapters: RowAdapters | None = None
) -> list[Logits]:
    """The logits of each request of a batch; ``counts`` are the numbers of rows of ``hidden_TD`` of each, in order;
    rows after those are padding.

    ``adapters``: of these rows, if any changes the output layer. Each request is split every ``slice_rows`` rows; as
    many parts of one or more requests as fit in a slice share one matrix product, padded to a multiple of ``floor``
    rows (see ``row_floor``).
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
    """Yields slices of logits that are computed already, or computes them."""
    if isinstance(logits, Tensor):
        return iter(logits.split(slice_rows(logits.shape[-1], logits.device)))
    return logits.slices()


def joined(parts: Sequence[Logits]) -> Tensor:
    """Logits ``[rows, V]`` of adjacent parts of the same matrix product, in the model's dtype; the caller may modify
    them."""
    cuts = [cut for part in parts for cut in part._cuts]
    if len({product for product, _start, _end in cuts}) != 1:
        raise ValueError("the rows are of several matrix products")
    made = parts[0]._head.product(cuts[0][0])
    if all(one[2] == other[1] for one, other in pairwise(cuts)):
        return made[cuts[0][1] : cuts[-1][2]]
    return torch.cat([made[start:end] for _product, start, end in cuts])

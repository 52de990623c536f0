"""Division of the kernel of ``cached_attention`` into programs; results are bitwise independent of it.

A tile is a number of query rows of one request, each row once for every query head that shares a key/value head. A
split is ``Tiling.split`` positions of a request's keys and values, counted from its position 0. Each split of a tile is
summed separately, and the splits are combined in order, by one program or by several.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmserve_kernels.cached_attention.batch import FixedBatch, Ragged

#: Number of (tile, key/value head) pairs from which on a program processes all splits: enough to fill the GPU.
ENOUGH_PROGRAMS = 128
#: Maximum head size of quantized pages: for larger ones no block sizes without spills were found.
QUANTIZED_HEAD_SIZE = 128


@dataclass(frozen=True)
class Tiling:
    """Block sizes of the kernel. They determine the order of additions, so they do not depend on the batch."""

    block_m: int  # rows of a tile
    block_n: int  # positions of keys and values in a block
    split: int  # positions summed separately: a multiple of ``block_n``
    num_warps: int
    num_stages: int


def tiling(
    dtype: torch.dtype,
    head_size: int,
    *,
    quantized: bool = False,
    backend: str = "cuda",
    lean: bool = False,
    windowed: bool = False,
) -> Tiling:
    """Block sizes for queries of ``dtype`` with ``head_size`` dimensions a head, on a GPU as named by ``gpu_of``.

    All compile without spills in ``kernels/bench/compile_table.py``. ``quantized`` pages take more registers, and their
    many small loads are seldom pipelined; raises ``ValueError`` for head sizes that spill. ``lean``: for a kernel that
    uses fewer registers than ``cached_attention``; ``windowed``: for rows with the ends of sliding windows in
    registers.
    """
    if quantized and head_size > QUANTIZED_HEAD_SIZE:
        raise ValueError(
            f"quantized pages are read for heads of up to {QUANTIZED_HEAD_SIZE} dimensions, not {head_size}"
        )
    if dtype == torch.float32 or quantized:
        block_n = 32 if dtype != torch.float32 and head_size <= 64 else 16
        # With enough shared memory for one more stage, the assembler does not spill registers to run more programs.
        ahead = quantized and dtype == torch.float32 and head_size <= 64 and backend != "hip"
        return Tiling(32, block_n, 1024, 4 if backend == "hip" else 8, 2 if ahead else 1)
    # For small heads four warps would suffice on other NVIDIA GPUs with Triton 3.7; with 3.6 they spill on an sm_80.
    if windowed and head_size > 128 and backend != "hip":
        return Tiling(32, 16, 1024, 4, 2)
    # A matrix product of Hopper has 64 rows and four warps: with eight, weights go through shared memory to the others,
    # which takes twice as long (measured on an H200, where splits of 512 were also faster for single requests).
    if backend == "sm_90" and head_size <= 128 and not windowed:
        return Tiling(64, 64, 512, 4, 3)
    few = 128 if backend == "hip" else 64 if lean else 0
    return Tiling(64, 16 if head_size > 128 else 64, 1024, 4 if head_size <= few else 8, 2)


@lru_cache
def gpu_of(device: torch.device) -> str:
    """The kind of GPU as a key of block sizes: ``hip`` (AMD), ``sm_90`` (Hopper), or ``cuda`` (other NVIDIA)."""
    if torch.version.hip:
        return "hip"
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return "sm_90" if hopper else "cuda"


@dataclass(frozen=True)
class Schedule:
    """Programs of one batch; a record is eight int32.

    ``programs``: first row of the request, its rows, first packed row of the tile, request, positions with K/V, first
    split, end of splits, index of the partial result (-1 = the program finishes the tile). ``folds``: first row, rows,
    first packed row, first partial result, number of them, and three unused. ``table``: int32 ``[requests, most
    pages]``.
    """

    programs: Tensor
    folds: Tensor
    table: Tensor
    partials: int


@lru_cache(maxsize=4)
def schedule(ragged: Ragged, group: int, groups: int, sizes: Tiling) -> Schedule:
    """Programs for ``ragged`` with ``group`` query heads for each of ``groups`` key/value heads.

    A batch passes through every layer of a model, so the last few schedules are cached.
    """
    requests = np.flatnonzero(ragged.row_counts)
    rows = np.asarray(ragged.row_counts, np.int32)[requests]
    lengths = np.asarray(ragged.kv_lengths, np.int32)[requests]
    starts = np.concatenate([[0], np.cumsum(ragged.row_counts)]).astype(np.int32)[requests]
    tiles = -(-rows * group // sizes.block_m)
    splits = -(-lengths // sizes.split)
    whole = tiles.sum() * groups >= ENOUGH_PROGRAMS
    programs, folds, partials = [], [], 0
    for request, start, count, length, tiled, split in zip(requests, starts, rows, lengths, tiles, splits, strict=True):
        for first in range(0, tiled * sizes.block_m, sizes.block_m):
            tile = (start, count, first)
            if whole or split == 1:
                programs.append((*tile, request, length, 0, split, -1))
                continue
            programs += [(*tile, request, length, s, s + 1, partials + s) for s in range(split)]
            folds.append((*tile, partials, split, 0, 0, 0))
            partials += int(split)
    device = ragged.slots.device
    return Schedule(
        torch.tensor(np.array(programs, np.int32).reshape(-1, 8), device=device),
        torch.tensor(np.array(folds, np.int32).reshape(-1, 8), device=device),
        pad_sequence(list(ragged.page_tables), batch_first=True).to(torch.int32),
        partials,
    )


@lru_cache(maxsize=4)
def fixed_schedule(batch: FixedBatch, group: int, groups: int, sizes: Tiling, page: int) -> Schedule:
    """Programs for the maximum number of tiles and splits of ``batch``, with pages of ``page`` positions.

    Computed on its device, from the shapes of its tensors without reading their contents on the host, so that it can be
    captured in a CUDA graph. Unused programs have no rows. A new ``FixedBatch`` must be created for each capture: the
    last few schedules are cached.
    """
    counts, lengths = batch.row_counts, batch.kv_lengths
    requests, pages = batch.page_tables.shape
    tiles = -(-counts * group // sizes.block_m)
    ends = tiles.cumsum(0)
    most = len(batch.slots) * group // sizes.block_m + requests  # each request may have a partial tile
    place = torch.arange(most, device=counts.device)
    owner = torch.searchsorted(ends, place, right=True)
    request = owner.clamp_max(requests - 1)
    start = (counts.cumsum(0) - counts)[request]
    rows = torch.where(owner < requests, counts[request], 0)
    first = (place - (ends - tiles)[request]) * sizes.block_m
    length = lengths[request]
    splits = -(-length // sizes.split)
    most_splits = -(-pages * page // sizes.split)
    nothing = torch.zeros_like(place)
    tile = (start, rows, first)
    table = batch.page_tables.to(torch.int32)
    if most_splits == 1 or most * groups >= ENOUGH_PROGRAMS:
        programs = torch.stack((*tile, request, length, nothing, splits, nothing - 1), 1).to(torch.int32)
        return Schedule(programs, programs[:0], table, 0)
    each = [
        torch.stack((*tile, request, length, nothing + s, splits.clamp_max(s + 1), place * most_splits + s), 1)
        for s in range(most_splits)
    ]
    folds = torch.stack((*tile, place * most_splits, splits, nothing, nothing, nothing), 1)
    return Schedule(torch.cat(each).to(torch.int32), folds.to(torch.int32), table, most * most_splits)

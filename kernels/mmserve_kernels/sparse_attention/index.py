"""The selected blocks of positions of each block of query rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Block lists of a ragged batch.

    A request's rows are divided into blocks of ``q_block`` from its first row on, its positions into blocks of
    ``kv_block`` from position 0 on. Block b of rows (counted over all requests) attends in index head a to
    ``blocks[starts[i] : starts[i + 1]]``, ascending, where i = a · B + b and B is the number of all blocks of rows.
    ``heads``: number of index heads, A; each applies to an equal number of consecutive query heads, which share a
    key/value head. ``starts`` int32 ``[A · B + 1]``, ``blocks`` int32.
    """

    q_block: int
    kv_block: int
    heads: int
    starts: Tensor
    blocks: Tensor

    def row_blocks(self, rows: int) -> int:
        """Number of blocks of a request with ``rows`` rows."""
        return -(-rows // self.q_block)

    def check(self, row_counts: Sequence[int], heads: int, groups: int) -> None:
        """Raise ``ValueError`` if the index does not match these requests, query heads and key/value heads."""
        if self.kv_block < 16 or self.kv_block & (self.kv_block - 1):
            raise ValueError(f"kv_block must be a power of two of at least 16, not {self.kv_block}")
        if heads % self.heads or self.heads % groups:
            raise ValueError(f"{self.heads} index heads fit neither {heads} query heads nor {groups} key/value heads")
        count = self.heads * sum(map(self.row_blocks, row_counts))
        if len(self.starts) != count + 1:
            raise ValueError(f"starts must be [{count + 1}] for these requests, not {list(self.starts.shape)}")


def block_index(masks: Sequence[Tensor], q_block: int = 64, kv_block: int = 64) -> BlockIndex:
    """The index of one boolean mask ``[A, blocks of rows, blocks of positions]`` for each request."""
    widest = max((mask.shape[2] for mask in masks), default=0)
    together = torch.cat([F.pad(mask, (0, widest - mask.shape[2])) for mask in masks], 1)
    counts = together.sum(-1, dtype=torch.int32).flatten()
    starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return BlockIndex(q_block, kv_block, together.shape[0], starts, together.nonzero()[:, 2].to(torch.int32))

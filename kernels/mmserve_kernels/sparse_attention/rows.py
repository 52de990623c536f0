"""The query rows of an index builder, and the blocks visible to them.

Masks are boolean ``[heads, blocks of rows, blocks of positions]``; ``block_index`` joins those of several requests.

Shapes in names: R rows of a request, B blocks of rows, C blocks of positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """A request's query rows: their ``positions`` (int64 ``[R]``, ascending), the ``length`` of the request, and the
    ``limit`` of each row's visible positions (int64 ``[R]``; None = all are visible). ``q_block`` and ``kv_block`` as
    in ``BlockIndex``. Raises ``ValueError`` without rows: such a request's mask has no blocks of rows."""

    positions: Tensor
    length: int
    limit: Tensor | None = None
    q_block: int = 64
    kv_block: int = 64

    def __post_init__(self) -> None:
        if not len(self.positions):
            raise ValueError("a request without rows has nothing to choose: give block_index an empty mask for it")

    def limits(self) -> Tensor:
        """int64 ``[R]``: each row sees the positions below its limit."""
        return torch.full_like(self.positions, self.length) if self.limit is None else self.limit

    def seen_below(self) -> Tensor:
        """int64 ``[B]``: positions below it are visible to some row of the block."""
        return _by_block(self.limits(), self.q_block).amax(1)

    def visible(self) -> Tensor:
        """Boolean ``[B, C]``: whether some row sees some position of the block."""
        return self.block_starts() < self.seen_below()[:, None]

    def seen_by_all(self) -> Tensor:
        """Boolean ``[B, C]``: whether every row sees some position of the block."""
        lowest = _by_block(self.limits(), self.q_block).amin(1)
        return self.block_starts() < lowest[:, None]

    def block_starts(self) -> Tensor:
        """int64 ``[C]``: first position of each block."""
        return torch.arange(0, self.length, self.kv_block, device=self.positions.device)

    def spans(self) -> tuple[Tensor, Tensor]:
        """int64 ``[B]`` each: first and last position of each block of rows."""
        blocks = _by_block(self.positions, self.q_block)
        return blocks.amin(1), blocks.amax(1)


def sink_and_window(rows: Rows, sink: int, window: int) -> Tensor:
    """``[1, B, C]``: the first ``sink`` positions, and those less than ``window`` before a row's own (StreamingLLM,
    arXiv 2309.17453; DuoAttention, arXiv 2410.10819, uses it in some heads)."""
    first, last = rows.spans()
    starts = rows.block_starts()
    near = (starts + rows.kv_block > first[:, None] - window + 1) & (starts < last[:, None] + window)
    return ((starts < sink) | near & (window > 0))[None] & rows.visible()


def _by_block(x_R: Tensor, block: int) -> Tensor:
    """``[blocks, block]`` of values by row, with the last one repeated as padding."""
    return torch.cat([x_R, x_R[-1:].expand(-len(x_R) % block)]).view(-1, block)

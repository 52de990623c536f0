"""Requests for measuring attention, and other implementations on the same keys and values.

Shapes in names: T query rows of all requests, R of one, L its positions, P pages, S positions a page, H query heads,
G key/value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.cached_attention import Ragged

PAGE = 16


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and their size."""

    heads: int
    groups: int
    size: int


#: LLaDA-8B's and Dream-7B's heads, and those of a small model.
LLADA, DREAM, SMALL = Heads(32, 32, 128), Heads(28, 4, 128), Heads(8, 8, 32)


@dataclass(frozen=True, eq=False)
class Requests:
    """A ragged batch over pages, and the same keys and values ``[L, G, K]`` of each request as contiguous tensors."""

    q_THK: Tensor
    k_PSGK: Tensor
    v_PSGK: Tensor
    ragged: Ragged
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def drawn(
        cls,
        counts: Sequence[tuple[int, int]],
        heads: Heads,
        device: torch.device,
        dtype: torch.dtype,
        *,
        causal: bool = False,
        in_order: bool = False,
    ) -> Requests:
        """Random requests of (rows, positions), with rows at the last positions; pages in random order, or
        ``in_order``."""
        draw = torch.Generator(device).manual_seed(0)
        pages = [-(-length // PAGE) for _rows, length in counts]
        order = torch.randperm(sum(pages), generator=draw, device=device)
        tables = (order.sort().values if in_order else order).split(pages)
        queries = (sum(rows for rows, _ in counts), heads.heads, heads.size)
        stored = (sum(pages), PAGE, heads.groups, heads.size)
        q, k, v = (torch.randn(shape, generator=draw, device=device).to(dtype) for shape in (queries, stored, stored))
        places = [torch.arange(length - rows, length, device=device) for rows, length in counts]
        slots = [table[p // PAGE] * PAGE + p % PAGE for table, p in zip(tables, places, strict=True)]
        ragged = Ragged(
            tuple(rows for rows, _ in counts),
            tuple(length for _, length in counts),
            tables,
            torch.cat(slots),
            torch.cat(places) + 1 if causal else None,
        )
        return cls(q, k, v, ragged, *(gathered(x, ragged) for x in (k, v)))

    @property
    def positions_seen(self) -> int:
        """Number of visible positions, summed over rows."""
        if self.ragged.kv_limit is not None:
            return int(self.ragged.kv_limit.sum())
        return sum(rows * length for rows, length in zip(self.ragged.row_counts, self.ragged.kv_lengths, strict=True))

    @property
    def operations(self) -> int:
        """Additions and multiplications of both products of attention."""
        return 4 * self.positions_seen * self.q_THK.shape[1] * self.q_THK.shape[2]

    @property
    def bytes(self) -> int:
        """Minimum memory traffic in bytes: keys, values and queries read once, and the result written."""
        return sum(x.nbytes for x in (*self.keys, *self.values)) + 2 * self.q_THK.nbytes

    def sdpa(self) -> Tensor:
        """``[T, H, K]`` by torch's SDPA, called for each request on contiguous keys and values."""
        return self._sdpa(self.q_THK, self.keys, self.values)

    def sdpa_gathering(self) -> Tensor:
        """The same, with the keys and values gathered from their pages first."""
        return self._sdpa(self.q_THK, *(gathered(x, self.ragged) for x in (self.k_PSGK, self.v_PSGK)))

    def exact(self) -> Tensor:
        """The same in fp32."""
        return self._sdpa(self.q_THK.float(), *([x.float() for x in of] for of in (self.keys, self.values)))

    def flex(self) -> FlexAttention:
        """FlexAttention on the same inputs."""
        return FlexAttention.over(self)

    def _sdpa(self, q_THK: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        out = []
        limits = [None] * len(keys) if self.ragged.kv_limit is None else self.ragged.kv_limit.split(self.counts)
        grouped = q_THK.shape[1] != self.k_PSGK.shape[2]
        for q, k, v, limit in zip(q_THK.split(self.counts), keys, values, limits, strict=True):
            # A square causal mask selects a specialized kernel.
            square = limit is not None and len(q) == len(k)
            mask = None if limit is None or square else torch.arange(len(k), device=q.device) < limit[:, None]
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            made = F.scaled_dot_product_attention(q, k, v, mask, is_causal=square, enable_gqa=grouped)
            out.append(made[0].transpose(0, 1))
        return torch.cat(out)

    @property
    def counts(self) -> list[int]:
        """Rows of each request."""
        return list(self.ragged.row_counts)


@dataclass(frozen=True, eq=False)
class FlexAttention:
    """FlexAttention over concatenated requests, with a block mask that separates them, or over selected blocks of one
    request."""

    q_1HTK: Tensor
    k_1GNK: Tensor
    v_1GNK: Tensor
    block_mask: Any
    attention: Any
    options: Mapping[str, int]

    @classmethod
    def over(cls, requests: Requests, *, compiled: bool = True) -> FlexAttention:
        """FlexAttention for ``requests``; ``compiled=False`` is slow and only for checking results."""
        from torch.nn.attention.flex_attention import create_block_mask

        ragged, device = requests.ragged, requests.q_THK.device
        lengths = torch.tensor(ragged.kv_lengths, device=device)
        ends = lengths.cumsum(0)
        rows = torch.tensor(ragged.row_counts, device=device)
        whose = torch.arange(len(rows), device=device).repeat_interleave(rows)
        first = (ends - lengths)[whose]
        last = ends[whose] if ragged.kv_limit is None else first + ragged.kv_limit

        def seen(_batch: Tensor, _head: Tensor, row: Tensor, position: Tensor) -> Tensor:
            return (position >= first[row]) & (position < last[row])

        mask = create_block_mask(seen, None, None, len(whose), int(ends[-1]), device=str(device))
        return cls._made(requests, mask, compiled, {})

    @classmethod
    def over_blocks(
        cls, requests: Requests, mask_ABC: Tensor, q_block: int, kv_block: int, *, compiled: bool = True
    ) -> FlexAttention:
        """FlexAttention for one request whose blocks of rows attend to the blocks of positions in ``mask_ABC`` (as in
        ``block_index``); blocks that are visible to all of their rows are not masked."""
        from torch.nn.attention.flex_attention import BlockMask

        rows, length = len(requests.q_THK), requests.ragged.kv_lengths[0]
        limit = requests.ragged.kv_limit
        seen_R = torch.full((rows,), length, device=mask_ABC.device) if limit is None else limit
        lowest = torch.stack([part.amin() for part in seen_R.split(q_block)])
        ends = (torch.arange(mask_ABC.shape[2], device=mask_ABC.device) + 1) * kv_block
        mask_HBC = mask_ABC.repeat_interleave(requests.q_THK.shape[1] // len(mask_ABC), 0)
        whole = mask_HBC & (ends <= lowest[:, None])

        def seen(_batch: Tensor, head: Tensor, row: Tensor, position: Tensor) -> Tensor:
            return (position < seen_R[row]) & mask_HBC[head, row // q_block, position // kv_block]

        partly, wholly = (
            (x.sum(-1).int(), x.int().argsort(dim=-1, descending=True, stable=True).int())
            for x in ((mask_HBC & ~whole)[None], whole[None])
        )
        size = (q_block, kv_block)
        made = BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=size, mask_mod=seen, seq_lengths=(rows, length))
        # A GPU's kernel uses tiles of 128 unless the blocks are smaller.
        small = {} if mask_ABC.device.type == "cpu" else {"BLOCK_M": q_block, "BLOCK_N": kv_block}
        return cls._made(requests, made, compiled, small)

    @classmethod
    def _made(cls, requests: Requests, mask: Any, compiled: bool, options: Mapping[str, int]) -> FlexAttention:
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (
            x.transpose(0, 1)[None].contiguous()
            for x in (requests.q_THK, torch.cat(requests.keys), torch.cat(requests.values))
        )
        if compiled:
            # After eight shapes of one function torch would silently run it uncompiled unless `fullgraph` is set.
            torch.compiler.reset()
        attention = torch.compile(flex_attention, dynamic=False, fullgraph=True) if compiled else flex_attention
        return cls(q, k, v, mask, attention, options)

    def __call__(self) -> Tensor:
        """``[T, H, K]``."""
        grouped = self.q_1HTK.shape[1] != self.k_1GNK.shape[1]
        options = dict(self.options) or None
        made: Tensor = self.attention(
            self.q_1HTK,
            self.k_1GNK,
            self.v_1GNK,
            block_mask=self.block_mask,
            enable_gqa=grouped,
            kernel_options=options,
        )
        return made[0].transpose(0, 1)


def gathered(x_PSGK: Tensor, ragged: Ragged) -> tuple[Tensor, ...]:
    """``[L, G, K]`` of each request."""
    return tuple(
        x_PSGK[table].flatten(0, 1)[:length]
        for table, length in zip(ragged.page_tables, ragged.kv_lengths, strict=True)
    )

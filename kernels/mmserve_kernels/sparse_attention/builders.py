"""Which blocks a request's rows need in prefill: a builder gives one request's mask, ``block_index`` joins them.

Masks are boolean ``[heads, blocks of rows, blocks of positions]``, and can be combined with ``|``, ``&`` and, head by
head, ``torch.where``. They are PyTorch on any device: a few rows of attention, and products of block means.

Shapes in names: R rows of a request, L its positions, H query heads, G key/value heads, K head size, B blocks of rows,
C blocks of positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.attention_scores.reference import weights

#: Rows at the end of a prompt that stand for all of them (MInference).
PROBES = 64


@dataclass(frozen=True, eq=False)
class Rows:
    """A request's query rows: their ``positions`` (int64 ``[R]``, ascending), the ``length`` of the request, and what
    each may look at, positions below ``limit`` (int64 ``[R]``; None = all). ``q_block`` and ``kv_block`` as in
    ``BlockIndex``. ValueError without rows: such a request's mask is one of no blocks."""

    positions: Tensor
    length: int
    limit: Tensor | None = None
    q_block: int = 64
    kv_block: int = 64

    def __post_init__(self) -> None:
        if not len(self.positions):
            raise ValueError("a request without rows has nothing to choose: give block_index an empty mask for it")

    def limits(self) -> Tensor:
        """int64 ``[R]``: positions below it are seen."""
        return torch.full_like(self.positions, self.length) if self.limit is None else self.limit

    def seen_below(self) -> Tensor:
        """int64 ``[B]``: positions below it are seen by some row of the block."""
        return _by_block(self.limits(), self.q_block).amax(1)

    def visible(self) -> Tensor:
        """Boolean ``[B, C]``: blocks of which some row sees a position."""
        return self.block_starts() < self.seen_below()[:, None]

    def seen_by_all(self) -> Tensor:
        """Boolean ``[B, C]``: blocks of which every row sees a position."""
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
    """``[1, B, C]``: the first ``sink`` positions, and those less than ``window`` from a row's own (StreamingLLM, arXiv
    2309.17453; DuoAttention, arXiv 2410.10819, gives it to some heads)."""
    first, last = rows.spans()
    starts = rows.block_starts()
    near = (starts + rows.kv_block > first[:, None] - window + 1) & (starts < last[:, None] + window)
    return ((starts < sink) | near & (window > 0))[None] & rows.visible()


def vertical_slash(
    q_RHK: Tensor, k_LGK: Tensor, rows: Rows, *, verticals: int, slashes: int, probes: Tensor | None = None
) -> Tensor:
    """``[H, B, C]``: the columns and diagonals of attention that weigh most, so many of each (MInference, arXiv
    2407.02490).

    ``probes`` (int64) are the rows whose attention is computed to find them; None = the last 64, which in causal
    prefill see everything. Of full attention give rows that are spread over the request: a diagonal right of the last
    row is not to be seen from there.
    """
    columns, diagonals = _lines(*_probed(q_RHK, k_LGK, rows, probes))
    return _touched(_largest(columns, verticals), _largest(diagonals, slashes), rows)


def query_aware(
    q_RHK: Tensor,
    k_LGK: Tensor,
    rows: Rows,
    *,
    share: float = 0.9,
    divergence: float = 0.1,
    probes: Tensor | None = None,
) -> Tensor:
    """``[H, B, C]``: for each head the fewest blocks, or columns and diagonals, whose estimated attention adds up to
    ``share`` (FlexPrefill, arXiv 2502.20766).

    The paper has columns reach the share and diagonals reach it too; here they do so together, which takes fewer.
    Means of blocks of queries and keys say how attention is spread over blocks. Where they say of the probes (see
    ``vertical_slash``) what the probes' own attention says, up to ``divergence`` (root of the Jensen-Shannon divergence
    in nats), blocks are taken by them; in other heads columns and diagonals are. The first block and those of a
    row's own position are always there.
    """
    weights_HRL, positions = _probed(q_RHK, k_LGK, rows, probes)
    lines = _touched(*_lines_by_share(weights_HRL, positions, share), rows)
    means_CGK = _means(k_LGK, rows.kv_block)
    visible = rows.visible()
    estimate_HBC = _estimate(_means(q_RHK, rows.q_block), means_CGK, visible)
    blocks = _by_share(estimate_HBC.flatten(1), share).view_as(estimate_HBC)
    said = estimate_HBC[:, _probe_rows(rows, probes) // rows.q_block].mean(1)
    true = _padded_blocks(weights_HRL.mean(1), rows.kv_block).sum(-1)
    trusted = _jensen_shannon(said, true).sqrt() < divergence
    return torch.where(trusted[:, None, None], blocks, lines) & visible | sink_and_window(rows, 1, 1)


def _by_block(x_R: Tensor, block: int) -> Tensor:
    """``[blocks, block]`` of values by row, the last one again where rows are missing."""
    return torch.cat([x_R, x_R[-1:].expand(-len(x_R) % block)]).view(-1, block)


def _padded_blocks(x_HL: Tensor, block: int) -> Tensor:
    """``[H, blocks, block]``, zeros (or False) where positions are missing."""
    return F.pad(x_HL, (0, -x_HL.shape[1] % block)).unflatten(1, (-1, block))


def _probe_rows(rows: Rows, probes: Tensor | None) -> Tensor:
    last = torch.arange(max(0, len(rows.positions) - PROBES), len(rows.positions), device=rows.positions.device)
    return last if probes is None else probes


def _probed(q_RHK: Tensor, k_LGK: Tensor, rows: Rows, probes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention ``[H, probes, L]`` of the probes, and their positions."""
    at = _probe_rows(rows, probes)
    return weights(q_RHK[at], k_LGK.float(), rows.limits()[at], None), rows.positions[at]


def _diagonals(positions: Tensor, length: int) -> Tensor:
    """int64 ``[R, L]``: number of the diagonal of each of a row's weights, its position - position + L - 1."""
    return positions[:, None] - torch.arange(length, device=positions.device) + length - 1


def _lines(weights_HRL: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over columns ``[H, L]`` and over diagonals ``[H, 2 L - 1]``."""
    heads, _rows, length = weights_HRL.shape
    offsets = _diagonals(positions, length)
    diagonals = weights_HRL.new_zeros(heads, 2 * length - 1).index_add_(1, offsets.flatten(), weights_HRL.flatten(1))
    return weights_HRL.sum(1), diagonals


def _lines_by_share(weights_HRL: Tensor, positions: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Booleans of columns ``[H, L]`` and of diagonals ``[H, 2 L - 1]``: the heaviest, until they hold ``share``."""
    length = weights_HRL.shape[2]
    lines = torch.cat(_lines(weights_HRL, positions), 1)
    rank = lines.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    # A weight is held as soon as its column or its diagonal is.
    held = torch.minimum(rank[:, None, :length], rank[:, length:][:, _diagonals(positions, length)]).flatten(1)
    mass = torch.zeros_like(lines).scatter_add_(1, held, weights_HRL.flatten(1))
    before = mass.cumsum(-1) - mass
    enough = (before < share * mass.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    chosen = (rank < enough) & (lines > 0)
    return chosen[:, :length], chosen[:, length:]


def _touched(columns_HL: Tensor, diagonals_HO: Tensor, rows: Rows) -> Tensor:
    """``[H, B, C]``: blocks that a chosen column or diagonal (booleans, as in ``_lines``) goes through."""
    visible = rows.visible()
    vertical = _padded_blocks(columns_HL, rows.kv_block).any(-1)
    first, last = rows.spans()
    starts = rows.block_starts()
    ends = (starts + rows.kv_block).clamp(max=rows.length) - 1
    low = first[:, None] - ends + rows.length - 1
    high = last[:, None] - starts + rows.length - 1
    before = F.pad(diagonals_HO.cumsum(1), (1, 0))  # chosen diagonals left of each
    slash = before[:, high + 1] > before[:, low]
    return (vertical[:, None] | slash) & visible


def _largest(scores: Tensor, count: int) -> Tensor:
    """Boolean like ``scores [H, n]``: the ``count`` largest of each row that are not 0."""
    at = scores.topk(min(count, scores.shape[1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, at, True) & (scores > 0)


def _by_share(scores: Tensor, share: float) -> Tensor:
    """Boolean like ``scores [H, n]`` (none below 0): the fewest of each row that add up to ``share`` of it."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    chosen = (before < share * ordered.sum(-1, keepdim=True)) & (ordered > 0)
    return torch.zeros_like(chosen).scatter_(1, order, chosen)


def _means(x_RHK: Tensor, block: int) -> Tensor:
    """fp32 ``[blocks, H, K]`` of each block of rows, the last over those it has."""
    sums = F.pad(x_RHK.float(), (0, 0, 0, 0, 0, -len(x_RHK) % block)).unflatten(0, (-1, block)).sum(1)
    counts = torch.full((len(sums), 1, 1), float(block), device=x_RHK.device)
    counts[-1] -= -len(x_RHK) % block
    return sums / counts


def _estimate(q_BHK: Tensor, k_CGK: Tensor, visible_BC: Tensor) -> Tensor:
    """Attention ``[H, B, C]`` among means of blocks."""
    q_GUBK = q_BHK.unflatten(1, (k_CGK.shape[1], -1)).permute(1, 2, 0, 3)
    scores = torch.einsum("gubk,cgk->gubc", q_GUBK, k_CGK).flatten(0, 1) * q_BHK.shape[-1] ** -0.5
    return scores.masked_fill(~visible_BC, -torch.inf).softmax(-1).nan_to_num(0)


def _jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Divergence ``[H]`` in nats of distributions ``[H, C]``."""
    middle = (p + q) / 2
    return (torch.special.entr(middle) - (torch.special.entr(p) + torch.special.entr(q)) / 2).sum(-1).clamp_min(0)

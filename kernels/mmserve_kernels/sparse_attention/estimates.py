"""Index builders: estimates of the attention mass of each block of positions, and selection of the largest blocks.

An estimate is ``[A, blocks of rows, blocks of positions]`` (fp32, non-negative), where A is the query heads, or the
key/value heads that they share; ``densest`` makes a mask of it, up to a density or a share of the total mass.

Shapes in names: R rows of a request, L its positions, H query heads, G key/value heads, U query heads that share one, K
head size, B blocks of rows, C blocks of positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.attention_scores.reference import weights
from mmserve_kernels.sparse_attention.rows import Rows, sink_and_window

#: Rows sampled for the estimate: the last ones of a causal prompt (MInference).
PROBES = 64
#: Weight of the previous layer's estimate in CritiPrefill's.
_BEFORE = 0.25


def densest(estimate_ABC: Tensor, rows: Rows, *, density: float = 1.0, mass: float = 1.0, least: int = 1) -> Tensor:
    """Boolean mask ``[A, B, C]`` of the blocks with the largest estimates: at most ``density`` of those visible to a
    block of rows, rounded up, and the fewest with at least ``mass`` of its estimate (1 = no bound), but at least
    ``least`` blocks.

    Blocks are selected by the estimate only: with few blocks, a fixed one would replace a better one. Only if some row
    would have no visible block, the first block, which every row sees, is added.
    """
    visible = rows.visible()
    order = estimate_ABC.masked_fill(~visible, -1).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)
    chosen = rank < (visible.sum(-1) * density).ceil().clamp_min(least)[:, None]
    if mass < 1:
        held = estimate_ABC.masked_fill(~visible, 0).gather(-1, order)
        before = held.cumsum(-1) - held
        chosen &= (before < mass * held.sum(-1, keepdim=True)).gather(-1, rank) | (rank < least)
    chosen &= visible
    chosen[..., 0] |= ~(chosen & rows.seen_by_all()).any(-1) & visible[:, 0]
    return chosen


def by_lines(q_RHK: Tensor, k_LGK: Tensor, rows: Rows) -> Tensor:
    """``[H, B, C]``: estimated attention of a block from the columns and diagonals through it, as observed in sampled
    rows.

    MInference (arXiv 2407.02490; ``vertical_and_slash_kernel`` of microsoft/MInference) selects, in each head, fixed
    numbers of columns and diagonals determined offline, and always the first columns and the nearest diagonals; here
    blocks are selected by the weight of their lines, up to a density or a share, and none is fixed.

    A weight counts for its column or its diagonal, whichever has the larger mean, and never twice: a first position
    that all rows attend to does not make a diagonal. Every position of a line is assigned the mean weight of the line's
    positions in the sampled rows, and a diagonal that crosses the corner of a block counts for that corner. Columns
    count for all rows of a block, visible or not, which favours a row's own block.
    """
    probes, length = _probes(rows), rows.length
    weights_HRL, positions = _probed(q_RHK, k_LGK, rows, probes)
    seen_RL = torch.arange(length, device=positions.device) < rows.limits()[probes, None]
    number_RL = _diagonals(positions, length)
    of_column, of_diagonal = (x.clamp_min(1) for x in _lines(seen_RL[None].float(), positions))
    columns_HL, diagonals_HO = _lines(weights_HRL, positions)
    vertical = (columns_HL / of_column)[:, None] >= (diagonals_HO / of_diagonal)[:, number_RL]
    columns_HL = _lines(weights_HRL * vertical, positions)[0] / of_column
    diagonals_HO = _lines(weights_HRL * ~vertical, positions)[1] / of_diagonal

    first, last = (x[:, None] for x in rows.spans())
    starts = rows.block_starts()
    ends = (starts + rows.kv_block).clamp(max=length)
    # Prefix sums: of the diagonals of a row through a block, and over the rows. fp64, as differences of them are taken.
    rows_HO = F.pad(F.pad(diagonals_HO.double().cumsum(1), (1, 0)).cumsum(1), (1, 0))

    def over_rows(offset_C: Tensor) -> Tensor:
        return rows_HO[:, last + offset_C + 1] - rows_HO[:, first + offset_C]

    slash_HBC = over_rows(length - starts) - over_rows(length - ends)
    column_HC = _padded_blocks(columns_HL, rows.kv_block).sum(-1)
    return _shares(column_HC[:, None] * (last - first + 1) + slash_HBC.clamp_min(0).float(), rows)


def by_means(q_RHK: Tensor, k_LGK: Tensor, rows: Rows, *, divergence: float = 0.1) -> Tensor:
    """``[H, B, C]``: attention among block means, or ``by_lines`` in heads whose block means approximate it badly.

    The heads are selected as in FlexPrefill (arXiv 2502.20766; ``get_active_blocks`` of bytedance/FlexPrefill): by the
    square root of the Jensen-Shannon divergence of the two for the last rows. FlexPrefill then selects blocks until all
    rows together reach a share, and whole columns and diagonals; here each block of rows has its own share or
    density.
    """
    probes = _probes(rows)
    weights_HRL, _positions = _probed(q_RHK, k_LGK, rows, probes)
    means_CGK = _means(k_LGK, rows.kv_block)
    estimate_HBC = _estimate(_means(q_RHK, rows.q_block), means_CGK, rows.visible())
    estimated = estimate_HBC[:, probes // rows.q_block].mean(1)
    true = _padded_blocks(weights_HRL.mean(1), rows.kv_block).sum(-1)
    trusted = _jensen_shannon(estimated, true).sqrt() < divergence
    return torch.where(trusted[:, None, None], estimate_HBC, by_lines(q_RHK, k_LGK, rows))


def by_segments(q_RHK: Tensor, k_LGK: Tensor, rows: Rows, before_GBC: Tensor | None = None) -> Tensor:
    """``[G, B, C]``: attention among the bounds of query segments and of key blocks (CritiPrefill, arXiv 2409.12490;
    ``cache_profilling`` of 66RING/CritiPrefill).

    A segment is represented by the middle of its largest and smallest channels; its score is the larger one of the
    products with a block's largest and smallest channels, unscaled, and averaged over the heads that share keys. A
    quarter of the estimate is ``before_GBC``, the previous layer's, if given. A segment's own blocks are always
    selected and have at least half of the estimate.
    """
    middle_BHK = torch.stack(_bounds(q_RHK, rows.q_block)).mean(0)
    middle_GUBK = middle_BHK.transpose(0, 1).unflatten(0, (k_LGK.shape[1], -1))
    high, low = (middle_GUBK @ x.permute(1, 2, 0)[:, None] for x in _bounds(k_LGK, rows.kv_block))
    own_BC = sink_and_window(rows, 0, 1)[0]
    others_GBC = torch.maximum(high, low).mean(1).masked_fill(~rows.visible() | own_BC, -torch.inf).softmax(-1)
    estimate_GBC = (own_BC + others_GBC.nan_to_num(0)) / 2
    return estimate_GBC if before_GBC is None else _BEFORE * before_GBC + (1 - _BEFORE) * estimate_GBC


def by_bounds(q_RHK: Tensor, low_CGK: Tensor, high_CGK: Tensor, rows: Rows) -> Tensor:
    """``[G, B, C]``: upper bound of a row's attention to a page, from the channel-wise minimum and maximum of its keys
    (Quest, arXiv 2406.10774; ``evaluation/quest_attention.py`` of mit-han-lab/Quest).

    Quest selects in each query head, and leaves the first two layers dense; here the rows of a block and the query
    heads that share keys select together, in every layer.
    """
    q_GMK = _by_group(q_RHK, low_CGK.shape[1])
    up, down = q_GMK.clamp_min(0), q_GMK.clamp_max(0)
    most_GMC = up @ high_CGK.float().permute(1, 2, 0) + down @ low_CGK.float().permute(1, 2, 0)
    return _over_rows(most_GMC, rows, q_RHK)


def by_channels(q_RHK: Tensor, k_LGK: Tensor, rows: Rows, *, channels: int) -> Tensor:
    """``[G, B, C]``: attention computed from the ``channels`` with the largest mean products of queries and keys.

    DoubleSparse (arXiv 2408.07092; andy-yang-1/DoubleSparse) fixes these channels offline with a calibration set
    (``config/offline_calibration.py``) and then selects single tokens in each query head; here the channels are
    determined from the request's own rows and their visible keys, and blocks are selected for the heads that share
    keys.
    """
    groups = k_LGK.shape[1]
    q_GMK = _by_group(q_RHK, groups)
    share = q_RHK.shape[1] // groups
    queries_GBK = _sum_of_blocks(q_GMK.abs().unflatten(1, (-1, share)).sum(2), rows.q_block)
    places = torch.arange(rows.length, device=k_LGK.device)
    seen_BL = (places < rows.seen_below()[:, None]).float()
    sizes = queries_GBK * (seen_BL @ k_LGK.float().abs().transpose(0, 1))
    kept = sizes.topk(min(channels, sizes.shape[-1]), -1).indices
    heavy_GBK = torch.zeros_like(sizes).scatter_(-1, kept, 1.0)
    reduced = q_GMK * heavy_GBK.repeat_interleave(rows.q_block * share, 1)[:, : q_GMK.shape[1]]
    return _attention(reduced, k_LGK, rows, q_RHK)


def by_attention(q_RHK: Tensor, k_LGK: Tensor, rows: Rows) -> Tensor:
    """``[G, B, C]``: the exact attention, as in the layers of TidalDecode (arXiv 2410.05076; DerrickYLJ/TidalDecode)
    that select for later layers; TidalDecode selects single tokens in each query head, this selects blocks of them for
    the heads that share keys."""
    return _attention(_by_group(q_RHK, k_LGK.shape[1]), k_LGK, rows, q_RHK)


def by_distance(rows: Rows) -> Tensor:
    """``[1, B, C]``: the first block and the rows' own, then blocks by increasing distance (StreamingLLM, arXiv
    2309.17453)."""
    first, last = rows.spans()
    starts = rows.block_starts()
    away = (first[:, None] - starts - rows.kv_block + 1).clamp_min(0) + (starts - last[:, None]).clamp_min(0)
    away[:, 0] = 0
    return _shares(1.0 / (1 + away)[None], rows)


def at_random(rows: Rows, seed: int) -> Tensor:
    """``[1, B, C]``: the rows' own blocks, then random ones: the baseline of all builders."""
    own = sink_and_window(rows, 0, 1)
    drawn = torch.rand(own.shape, generator=torch.Generator().manual_seed(seed)).to(own.device)
    return _shares(drawn + own, rows)


def _probes(rows: Rows) -> Tensor:
    """Sampled rows: the last ones if attention is causal, else evenly spaced ones."""
    count = len(rows.positions)
    if rows.limit is not None:
        return torch.arange(max(0, count - PROBES), count, device=rows.positions.device)
    spread = torch.linspace(0, count - 1, min(count, PROBES), device=rows.positions.device)
    return spread.round().long()


def _shares(x_ABC: Tensor, rows: Rows) -> Tensor:
    """Each block's share of the total over visible blocks."""
    seen = x_ABC.masked_fill(~rows.visible(), 0)
    return seen / seen.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def _bounds(x_RHK: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """fp32 ``[blocks, H, K]`` each: minimum and maximum of each channel, with the last row repeated as padding."""
    missing = -len(x_RHK) % block
    blocks = torch.cat([x_RHK, x_RHK[-1:].expand(missing, -1, -1)]).float().unflatten(0, (-1, block))
    return blocks.amax(1), blocks.amin(1)


def _by_group(q_RHK: Tensor, groups: int) -> Tensor:
    """fp32 ``[G, R · U, K]``, with the query heads of a row as consecutive rows."""
    return q_RHK.float().unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)


def _sum_of_blocks(x_GRC: Tensor, block: int) -> Tensor:
    return F.pad(x_GRC, (0, 0, 0, -x_GRC.shape[1] % block)).unflatten(1, (-1, block)).sum(2)


def _over_rows(scores_GMC: Tensor, rows: Rows, q_RHK: Tensor) -> Tensor:
    """Attention over pages from scores of pages, summed over the rows of a block ``[G, B, C]``."""
    share = scores_GMC.shape[1] // len(q_RHK)
    seen = rows.block_starts() < rows.limits()[:, None]
    scores = (scores_GMC * q_RHK.shape[-1] ** -0.5).unflatten(1, (-1, share)).masked_fill(~seen[:, None], -torch.inf)
    return _sum_of_blocks(scores.softmax(-1).nan_to_num(0).sum(2), rows.q_block)


def _attention(q_GMK: Tensor, k_LGK: Tensor, rows: Rows, q_RHK: Tensor) -> Tensor:
    """Attention over blocks ``[G, B, C]``, for queries with any number of channels."""
    q = q_GMK.unflatten(1, (len(q_RHK), -1)).transpose(0, 1).flatten(1, 2)
    weights_HRL = weights(q, k_LGK.float(), rows.limits(), None)
    weights_GRL = weights_HRL.unflatten(0, (k_LGK.shape[1], -1)).sum(1)
    blocks_GRC = F.pad(weights_GRL, (0, -rows.length % rows.kv_block)).unflatten(-1, (-1, rows.kv_block)).sum(-1)
    return _sum_of_blocks(blocks_GRC, rows.q_block)


def _probed(q_RHK: Tensor, k_LGK: Tensor, rows: Rows, at: Tensor) -> tuple[Tensor, Tensor]:
    """Attention ``[H, probes, L]`` of the rows ``at`` (int64), and their positions."""
    return weights(q_RHK[at], k_LGK.float(), rows.limits()[at], None), rows.positions[at]


def _diagonals(positions: Tensor, length: int) -> Tensor:
    """int64 ``[R, L]``: index of the diagonal of each weight of a row, key position - row position + L - 1."""
    return positions[:, None] - torch.arange(length, device=positions.device) + length - 1


def _lines(weights_HRL: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over columns ``[H, L]`` and over diagonals ``[H, 2 L - 1]``."""
    heads, _rows, length = weights_HRL.shape
    offsets = _diagonals(positions, length)
    diagonals = weights_HRL.new_zeros(heads, 2 * length - 1).index_add_(1, offsets.flatten(), weights_HRL.flatten(1))
    return weights_HRL.sum(1), diagonals


def _padded_blocks(x_HL: Tensor, block: int) -> Tensor:
    """``[H, blocks, block]``, padded with zeros (or False)."""
    return F.pad(x_HL, (0, -x_HL.shape[1] % block)).unflatten(1, (-1, block))


def _means(x_RHK: Tensor, block: int) -> Tensor:
    """fp32 ``[blocks, H, K]``: the mean of each block of rows, the last one over its actual rows."""
    sums = F.pad(x_RHK.float(), (0, 0, 0, 0, 0, -len(x_RHK) % block)).unflatten(0, (-1, block)).sum(1)
    counts = torch.full((len(sums), 1, 1), float(block), device=x_RHK.device)
    counts[-1] -= -len(x_RHK) % block
    return sums / counts


def _estimate(q_BHK: Tensor, k_CGK: Tensor, visible_BC: Tensor) -> Tensor:
    """Attention ``[H, B, C]`` among block means."""
    q_GUBK = q_BHK.unflatten(1, (k_CGK.shape[1], -1)).permute(1, 2, 0, 3)
    scores = torch.einsum("gubk,cgk->gubc", q_GUBK, k_CGK).flatten(0, 1) * q_BHK.shape[-1] ** -0.5
    return scores.masked_fill(~visible_BC, -torch.inf).softmax(-1).nan_to_num(0)


def _jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence ``[H]`` in nats of distributions ``[H, C]``."""
    middle = (p + q) / 2
    return (torch.special.entr(middle) - (torch.special.entr(p) + torch.special.entr(q)) / 2).sum(-1).clamp_min(0)

"""How much of the attention each block of positions holds, as index builders see it, and the blocks that hold most.

An estimate is ``[A, blocks of rows, blocks of positions]`` (fp32, none below 0), where A is the query heads, or the
key/value heads that they share; ``densest`` makes a mask of it, to any density or share of the whole.

Shapes in names: R rows of a request, L its positions, H query heads, G key/value heads, U query heads that share one,
K head size, B blocks of rows, C blocks of positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.attention_scores.reference import weights
from mmserve_kernels.sparse_attention.rows import Rows, sink_and_window

#: Rows sampled for the estimate: of a causal prompt the last ones (MInference).
PROBES = 64
#: How much of CritiPrefill's estimate is that of the layer before.
_BEFORE = 0.25


def densest(estimate_ABC: Tensor, rows: Rows, *, density: float = 1.0, mass: float = 1.0, least: int = 1) -> Tensor:
    """Boolean mask ``[A, B, C]`` of the blocks with the largest estimates: at most ``density`` of those that a block of
    rows sees, rounded up, and the fewest that hold ``mass`` of its estimate (1 = no bound), but ``least`` of them.

    The estimate alone selects them: of few blocks, one that is always there takes the place of a better one. Only
    where some row would see none of them, the first block is there too, which every row sees.
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
    """``[H, B, C]``: the attention expected of a block by the columns and diagonals through it, as some rows show them.

    MInference (arXiv 2407.02490; ``vertical_and_slash_kernel`` of microsoft/MInference) takes, in each head, numbers of
    columns and of diagonals that were found ahead of time, and always the first columns and the nearest diagonals; here
    blocks are taken by what their lines weigh, to a density or a share, and none is always taken.

    A weight is its column's or its diagonal's, whichever has the larger mean, so that none counts twice: a first
    position that everyone looks at is no diagonal. Every position of a line is expected to weigh what the line's
    positions in those rows weigh on average, however many they are, and a diagonal that cuts a corner of a block counts
    for that corner. Columns count for all rows of a block, whether they see them or not, which favours a row's own.
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
    # Sums of sums: of a row's diagonals through a block, and of those over the rows. fp64: they are taken apart again.
    rows_HO = F.pad(F.pad(diagonals_HO.double().cumsum(1), (1, 0)).cumsum(1), (1, 0))

    def over_rows(offset_C: Tensor) -> Tensor:
        return rows_HO[:, last + offset_C + 1] - rows_HO[:, first + offset_C]

    slash_HBC = over_rows(length - starts) - over_rows(length - ends)
    column_HC = _padded_blocks(columns_HL, rows.kv_block).sum(-1)
    return _shares(column_HC[:, None] * (last - first + 1) + slash_HBC.clamp_min(0).float(), rows)


def by_means(q_RHK: Tensor, k_LGK: Tensor, rows: Rows, *, divergence: float = 0.1) -> Tensor:
    """``[H, B, C]``: attention among means of blocks, or ``by_lines`` in heads in which that is far from the attention.

    Which heads is decided as in FlexPrefill (arXiv 2502.20766; ``get_active_blocks`` of bytedance/FlexPrefill): by the
    root of the Jensen-Shannon divergence of the two for the last rows. FlexPrefill then takes blocks until all rows
    together hold a share, and whole columns and diagonals; here each block of rows has its own share or density.
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
    """``[G, B, C]``: attention among the bounds of segments of queries and of blocks of keys (CritiPrefill, arXiv
    2409.12490; ``cache_profilling`` of 66RING/CritiPrefill).

    Of a segment the middle of its largest and smallest channels counts, by its product with a block's largest or
    smallest channels, whichever is larger; unscaled, and averaged over the heads that share keys. A quarter of the
    estimate is ``before_GBC``, that of the layer before, where it is given. A segment's own blocks are always taken and
    have half of the estimate or more.
    """
    middle_BHK = torch.stack(_bounds(q_RHK, rows.q_block)).mean(0)
    middle_GUBK = middle_BHK.transpose(0, 1).unflatten(0, (k_LGK.shape[1], -1))
    high, low = (middle_GUBK @ x.permute(1, 2, 0)[:, None] for x in _bounds(k_LGK, rows.kv_block))
    own_BC = sink_and_window(rows, 0, 1)[0]
    others_GBC = torch.maximum(high, low).mean(1).masked_fill(~rows.visible() | own_BC, -torch.inf).softmax(-1)
    estimate_GBC = (own_BC + others_GBC.nan_to_num(0)) / 2
    return estimate_GBC if before_GBC is None else _BEFORE * before_GBC + (1 - _BEFORE) * estimate_GBC


def by_bounds(q_RHK: Tensor, low_CGK: Tensor, high_CGK: Tensor, rows: Rows) -> Tensor:
    """``[G, B, C]``: the most that a row may attend to a page, by the smallest and the largest of its keys, channel by
    channel (Quest, arXiv 2406.10774; ``evaluation/quest_attention.py`` of mit-han-lab/Quest).

    Quest chooses in each query head, and leaves the first two layers dense; here the rows of a block and the query
    heads that share keys choose together, in every layer.
    """
    q_GMK = _by_group(q_RHK, low_CGK.shape[1])
    up, down = q_GMK.clamp_min(0), q_GMK.clamp_max(0)
    most_GMC = up @ high_CGK.float().permute(1, 2, 0) + down @ low_CGK.float().permute(1, 2, 0)
    return _over_rows(most_GMC, rows, q_RHK)


def by_channels(q_RHK: Tensor, k_LGK: Tensor, rows: Rows, *, channels: int) -> Tensor:
    """``[G, B, C]``: attention computed from the ``channels`` with the largest mean products of queries and keys.

    DoubleSparse (arXiv 2408.07092; andy-yang-1/DoubleSparse) fixes these channels ahead of time from a calibration set
    (``config/offline_calibration.py``) and then takes single tokens in each query head; here the channels are those of
    the request's own rows and of the keys that they see, and blocks are taken by the heads that share keys.
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
    """``[G, B, C]``: the attention itself, as in the layers of TidalDecode (arXiv 2410.05076; DerrickYLJ/TidalDecode)
    that choose for those after them; TidalDecode takes single tokens in each query head, this takes blocks of them by
    the heads that share keys."""
    return _attention(_by_group(q_RHK, k_LGK.shape[1]), k_LGK, rows, q_RHK)


def by_distance(rows: Rows) -> Tensor:
    """``[1, B, C]``: the first block and the rows' own, then near ones before far ones (StreamingLLM, arXiv
    2309.17453)."""
    first, last = rows.spans()
    starts = rows.block_starts()
    away = (first[:, None] - starts - rows.kv_block + 1).clamp_min(0) + (starts - last[:, None]).clamp_min(0)
    away[:, 0] = 0
    return _shares(1.0 / (1 + away)[None], rows)


def at_random(rows: Rows, seed: int) -> Tensor:
    """``[1, B, C]``: the rows' own blocks, then random ones: what every builder must be better than."""
    own = sink_and_window(rows, 0, 1)
    drawn = torch.rand(own.shape, generator=torch.Generator().manual_seed(seed)).to(own.device)
    return _shares(drawn + own, rows)


def _probes(rows: Rows) -> Tensor:
    """The last rows where attention is causal, otherwise some that are spread over all."""
    count = len(rows.positions)
    if rows.limit is not None:
        return torch.arange(max(0, count - PROBES), count, device=rows.positions.device)
    spread = torch.linspace(0, count - 1, min(count, PROBES), device=rows.positions.device)
    return spread.round().long()


def _shares(x_ABC: Tensor, rows: Rows) -> Tensor:
    """Of what is seen, each block's share of the whole."""
    seen = x_ABC.masked_fill(~rows.visible(), 0)
    return seen / seen.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def _bounds(x_RHK: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """fp32 ``[blocks, H, K]`` each: largest and smallest of each channel, the last row again where rows are missing."""
    missing = -len(x_RHK) % block
    blocks = torch.cat([x_RHK, x_RHK[-1:].expand(missing, -1, -1)]).float().unflatten(0, (-1, block))
    return blocks.amax(1), blocks.amin(1)


def _by_group(q_RHK: Tensor, groups: int) -> Tensor:
    """fp32 ``[G, R · U, K]``, a row's query heads one after another."""
    return q_RHK.float().unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)


def _sum_of_blocks(x_GRC: Tensor, block: int) -> Tensor:
    return F.pad(x_GRC, (0, 0, 0, -x_GRC.shape[1] % block)).unflatten(1, (-1, block)).sum(2)


def _over_rows(scores_GMC: Tensor, rows: Rows, q_RHK: Tensor) -> Tensor:
    """What scores of pages make of attention over pages, summed over the rows of a block ``[G, B, C]``."""
    share = scores_GMC.shape[1] // len(q_RHK)
    seen = rows.block_starts() < rows.limits()[:, None]
    scores = (scores_GMC * q_RHK.shape[-1] ** -0.5).unflatten(1, (-1, share)).masked_fill(~seen[:, None], -torch.inf)
    return _sum_of_blocks(scores.softmax(-1).nan_to_num(0).sum(2), rows.q_block)


def _attention(q_GMK: Tensor, k_LGK: Tensor, rows: Rows, q_RHK: Tensor) -> Tensor:
    """Attention over blocks ``[G, B, C]`` of queries that may have lost channels."""
    q = q_GMK.unflatten(1, (len(q_RHK), -1)).transpose(0, 1).flatten(1, 2)
    weights_HRL = weights(q, k_LGK.float(), rows.limits(), None)
    weights_GRL = weights_HRL.unflatten(0, (k_LGK.shape[1], -1)).sum(1)
    blocks_GRC = F.pad(weights_GRL, (0, -rows.length % rows.kv_block)).unflatten(-1, (-1, rows.kv_block)).sum(-1)
    return _sum_of_blocks(blocks_GRC, rows.q_block)


def _probed(q_RHK: Tensor, k_LGK: Tensor, rows: Rows, at: Tensor) -> tuple[Tensor, Tensor]:
    """Attention ``[H, probes, L]`` of the rows ``at`` (int64), and their positions."""
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


def _padded_blocks(x_HL: Tensor, block: int) -> Tensor:
    """``[H, blocks, block]``, zeros (or False) where positions are missing."""
    return F.pad(x_HL, (0, -x_HL.shape[1] % block)).unflatten(1, (-1, block))


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

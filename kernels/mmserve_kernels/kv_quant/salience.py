"""Which tokens to keep at full precision: those that the others look at most."""

from __future__ import annotations

from torch import Tensor


def salient_by_share(column_sums: Tensor, viewers: Tensor, share: float) -> Tensor:
    """Positions (int64, ascending) of the ``share`` of tokens with the most attention a viewer (ZipCache, 2405.14256).

    ``column_sums [L]``: attention that each position gets from all rows; ``viewers [L]``: how many rows may look at it,
    without which causal attention would favour the first. ``ValueError`` unless ``share`` is between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be between 0 and 1, not {share}")
    score = column_sums / viewers
    return score.topk(round(share * len(score))).indices.sort().values


def salient_by_mass(column_sums: Tensor, mass: float) -> Tensor:
    """Fewest positions (int64, ascending) that hold ``mass`` of all attention (ZipVL, arXiv 2410.08584).

    ``column_sums [L]``: attention that each position gets from all rows. ``ValueError`` unless ``mass`` is between 0
    and 1.
    """
    if not 0 <= mass <= 1:
        raise ValueError(f"mass must be between 0 and 1, not {mass}")
    ordered = column_sums.sort(descending=True)
    before = ordered.values.cumsum(0) - ordered.values
    return ordered.indices[before < mass * column_sums.sum()].sort().values

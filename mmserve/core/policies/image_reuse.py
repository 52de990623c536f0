"""Reuse of images' K/V with selective recomputation: which positions are recomputed in a new prompt."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.values import SHARE, at_least, value, within


@dataclass(frozen=True)
class Blend:
    """CacheBlend (arXiv 2405.16444): the positions whose keys and values this prompt changes most."""

    recompute: float = value(0.15, SHARE, "share of all images' positions that is recomputed; 1 = no reuse")
    layers: int = value(2, at_least(2), "decoder layers that run on the whole prompt; the last one selects positions")


@dataclass(frozen=True)
class KvShare:
    """KVShare (arXiv 2503.16525): the positions whose values this prompt changes most, weighted by the attention that
    they receive, and further ones in each decode step."""

    recompute: float = value(0.15, SHARE, "share of all images' positions that is recomputed; 1 = no reuse")
    layers: int = value(2, at_least(2), "decoder layers that run on the whole prompt; the last one selects positions")
    each_step: int = value(3, within(0, 64), "positions recomputed in each decode step")


@dataclass(frozen=True)
class LegoLink:
    """EPIC (arXiv 2410.15332): the first positions of each image."""

    recompute: float = value(0.15, SHARE, "share of each image's positions that is recomputed; 1 = no reuse")


@dataclass(frozen=True)
class RandomReuse:
    """A baseline: random positions, by the request's seed."""

    recompute: float = value(0.15, SHARE, "share of all images' positions that is recomputed; 1 = no reuse")


ImageReuse = Blend | KvShare | LegoLink | RandomReuse

__all__ = ["Blend", "KvShare", "LegoLink", "RandomReuse"]

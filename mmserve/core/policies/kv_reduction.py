"""K/V eviction: which K/V positions an autoregressive model keeps while it decodes."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.values import SHARE, at_least, value, within


@dataclass(frozen=True)
class HeavyHitters:
    """H2O (arXiv 2306.14048): the latest positions, and those that received the most attention."""

    budget: int = value(within=at_least(1), meaning="K/V positions to keep")
    recent: float = value(0.5, SHARE, "share of the budget for the latest positions")


@dataclass(frozen=True)
class ExpectedAttention:
    """The first positions, and those that future queries are expected to attend to most (arXiv 2510.00636)."""

    budget: int = value(within=at_least(1), meaning="K/V positions to keep")
    sinks: int = value(4, at_least(0), "first positions, which are always kept")
    future: int = value(512, within(1, 1 << 16), "number of future positions whose queries are estimated")


@dataclass(frozen=True)
class SinkWindow:
    """StreamingLLM (arXiv 2309.17453): the first positions and the latest."""

    budget: int = value(within=at_least(1), meaning="K/V positions to keep")
    sinks: int = value(4, at_least(0), "first positions, which are always kept")


@dataclass(frozen=True)
class VisualCache:
    """All text positions, and the visual positions that the first answer tokens attended to most (MustDrop, arXiv
    2411.10803)."""

    budget: int = value(within=at_least(1), meaning="visual K/V positions to keep")
    outputs: int = value(4, at_least(1), "number of first answer tokens whose attention is used")


KvReduction = HeavyHitters | ExpectedAttention | SinkWindow | VisualCache

__all__ = ["ExpectedAttention", "HeavyHitters", "SinkWindow", "VisualCache"]

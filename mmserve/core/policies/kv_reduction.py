"""K/V eviction: which K/V positions an autoregressive model keeps while it decodes."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.values import SHARE, at_least, value, within


@dataclass(frozen=True)
class HeavyHitters:
    """H2O (arXiv 2306.14048): the latest positions, and those that drew the most attention."""

    budget: int = value(within=at_least(1), meaning="K/V positions to keep")
    recent: float = value(0.5, SHARE, "share of them that are the latest")


@dataclass(frozen=True)
class ExpectedAttention:
    """The first positions, and those that queries to come are expected to attend to most (arXiv 2510.00636)."""

    budget: int = value(within=at_least(1), meaning="K/V positions to keep")
    sinks: int = value(4, at_least(0), "first positions, which always stay")
    future: int = value(512, within(1, 1 << 16), "next positions that queries are expected at")


@dataclass(frozen=True)
class SinkWindow:
    """StreamingLLM (arXiv 2309.17453): the first positions and the latest."""

    budget: int = value(within=at_least(1), meaning="K/V positions to keep")
    sinks: int = value(4, at_least(0), "first positions, which always stay")


@dataclass(frozen=True)
class VisualCache:
    """Of the visual positions those that the first answer tokens attended to most, and all others (MustDrop, arXiv
    2411.10803)."""

    budget: int = value(within=at_least(1), meaning="visual K/V positions to keep")
    outputs: int = value(4, at_least(1), "answer tokens whose attention decides")


KvReduction = HeavyHitters | ExpectedAttention | SinkWindow | VisualCache

__all__ = ["ExpectedAttention", "HeavyHitters", "SinkWindow", "VisualCache"]

"""Recompute policies: their names and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmserve.core.values import SHARE, at_least, value


@dataclass(frozen=True)
class DkvDecode:
    """dKV-Cache-Decode (arXiv 2505.15781)."""

    refresh: int = value(8, at_least(1), "steps between full passes (the paper's R); 1 = no cache")


@dataclass(frozen=True)
class DkvGreedy:
    """dKV-Cache-Greedy (arXiv 2505.15781), for ``commit="random"``."""

    refresh: int = value(2, at_least(1), "steps between full passes; 1 = no cache")
    window: int = value(4, at_least(0), "masked neighbours that run with each selected position")


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """dLLM-Cache (arXiv 2506.06295) with one choice of positions for all layers.

    The prompt and the response run at intervals; in the steps between, the share of the response whose values changed
    most at the second layer.
    """

    prompt_refresh: int = value(100, at_least(1), "steps between passes over the prompt (K_p)")
    response_refresh: int = value(7, at_least(1), "steps between passes over the whole response (K_r)")
    ratio: float = value(0.25, SHARE, "share of the response that runs in other steps (rho)")


Recompute = (
    Literal["none", "prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache", "adaptive", "block", "last"]
    | DkvDecode
    | DkvGreedy
    | Adaptive
)

__all__ = [
    "Adaptive",
    "DkvDecode",
    "DkvGreedy",
]

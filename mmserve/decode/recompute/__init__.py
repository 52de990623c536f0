"""Recompute policies by name."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.decode.recompute.base import Recompute
from mmserve.decode.recompute.dkv_decode import DkvDecode
from mmserve.decode.recompute.last import Last
from mmserve.decode.recompute.none import NoCache

RECOMPUTE: dict[str, Callable[..., Recompute]] = {
    "none": NoCache,
    "dkv_decode": DkvDecode,
    "last": Last,
}
#: Policies that make sense for masked diffusion, and for next-token models; the first is the default.
FULL_ATTENTION = ("none", "dkv_decode")
CAUSAL_ATTENTION = ("last", "none")

__all__ = ["CAUSAL_ATTENTION", "FULL_ATTENTION", "RECOMPUTE", "Recompute"]

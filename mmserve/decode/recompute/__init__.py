"""Recompute policies by name."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.decode.recompute.adaptive import Adaptive
from mmserve.decode.recompute.base import Recompute
from mmserve.decode.recompute.block import Block
from mmserve.decode.recompute.dkv_decode import DkvDecode
from mmserve.decode.recompute.dkv_greedy import DkvGreedy
from mmserve.decode.recompute.dual import Dual
from mmserve.decode.recompute.free_cache import FreeCache
from mmserve.decode.recompute.last import Last
from mmserve.decode.recompute.none import NoCache
from mmserve.decode.recompute.prefix import Prefix

RECOMPUTE: dict[str, Callable[..., Recompute]] = {
    "none": NoCache,
    "prefix": Prefix,
    "dual": Dual,
    "dkv_decode": DkvDecode,
    "dkv_greedy": DkvGreedy,
    "free_cache": FreeCache,
    "adaptive": Adaptive,
    "last": Last,
    "block": Block,
}
#: Recompute policies for masked diffusion, block diffusion, and next-token models; the first is the default.
FULL_ATTENTION = ("none", "prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache", "adaptive")
BLOCK_CAUSAL_ATTENTION = ("block", "none", "dual")
CAUSAL_ATTENTION = ("last", "none")
#: Policies that never run a finished block of the prompt again if attention is block-causal: its pages can be shared by
#: several requests.
KEEPS_PROMPT = ("last", "block", "dual")
#: With random tokens at open positions: the canvas, and the previous canvas once more when it is final.
RENOISING = ("block",)

__all__ = [
    "BLOCK_CAUSAL_ATTENTION",
    "CAUSAL_ATTENTION",
    "FULL_ATTENTION",
    "KEEPS_PROMPT",
    "RECOMPUTE",
    "RENOISING",
    "Recompute",
]

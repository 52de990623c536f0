"""Recompute policies by name."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.decode.recompute.base import Recompute
from mmserve.decode.recompute.dkv_decode import DkvDecode
from mmserve.decode.recompute.none import NoCache

RECOMPUTE: dict[str, Callable[..., Recompute]] = {
    "none": NoCache,
    "dkv_decode": DkvDecode,
}

__all__ = ["RECOMPUTE", "Recompute"]

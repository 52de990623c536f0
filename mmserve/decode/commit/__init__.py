"""Commit policies by name."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.decode.commit.base import Candidates, Commit
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.commit.threshold import Threshold

COMMIT: dict[str, Callable[..., Commit]] = {
    "low_confidence": LowConfidence,
    "threshold": Threshold,
}

__all__ = ["COMMIT", "Candidates", "Commit"]

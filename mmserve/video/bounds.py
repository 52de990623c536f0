"""Limits of the number of open streams, and of their reserved bytes."""

from __future__ import annotations

from mmserve.config import VideoConfig
from mmserve.errors import ResourceExhausted


def check_count(config: VideoConfig, count: int) -> None:
    """Raises ``ResourceExhausted`` if ``count`` open streams reach the limit."""
    if count >= config.max_sessions:
        raise ResourceExhausted(f"{count} streams are open, as many as [video] max_sessions allows; try again later")


def check_bytes(config: VideoConfig, held: int, more: int) -> None:
    """Raises ``ResourceExhausted`` if ``more`` bytes in addition to the ``held`` ones exceed the limit."""
    if held + more > config.total_bytes:
        raise ResourceExhausted(
            f"open streams reserve {held} bytes, and this one needs {more}; [video] "
            f"total_bytes allows {config.total_bytes}; try again later, or keep less"
        )

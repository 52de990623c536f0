"""How many streams may be open, and how many bytes they may have set aside together."""

from __future__ import annotations

from mmserve.config import VideoConfig
from mmserve.errors import ResourceExhausted


def check_count(config: VideoConfig, count: int) -> None:
    """Raise ``ResourceExhausted`` where ``count`` streams are as many as there may be."""
    if count >= config.max_sessions:
        raise ResourceExhausted(f"{count} streams are open, as many as [video] max_sessions allows; try again later")


def check_bytes(config: VideoConfig, held: int, more: int) -> None:
    """Raise ``ResourceExhausted`` where open streams have ``held`` bytes, and one with so many ``more`` has no room."""
    if held + more > config.total_bytes:
        raise ResourceExhausted(
            f"open streams have {held} bytes set aside, and this one needs {more}; [video] "
            f"total_bytes allows {config.total_bytes}; try again later, or keep less"
        )

"""What of a request's media one encoder makes visual tokens of, where several share them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaShare:
    """The image or video at ``place`` among a request's media; of a video in ``of`` parts, part ``part``."""

    place: int
    part: int = 0
    of: int = 1

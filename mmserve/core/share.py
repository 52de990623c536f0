"""The share of a request's media that one encoder encodes, if several encoders share them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaShare:
    """The image or video at index ``place`` of a request's media; for a video split into ``of`` parts, part
    ``part``."""

    place: int
    part: int = 0
    of: int = 1

"""What becomes of visual tokens, as messages name it."""

from __future__ import annotations

from collections.abc import Iterator

from mmserve.core.request import Amount, PixelRange, Vision
from mmserve.v1 import generation_pb2 as pb

#: Fields of pixels: of images, and of videos.
PIXELS = ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels")
_MOST_PIXELS = (1 << 63) - 1


def wrong_vision(vision: pb.VisionParams) -> Iterator[tuple[str, str]]:
    """What is wrong with pixels and with the amount, whatever the model and the pruner."""
    for name in PIXELS:
        if vision.HasField(name) and not 1 <= getattr(vision, name) <= _MOST_PIXELS:
            yield f"vision.{name}", f"must be at least 1 and at most {_MOST_PIXELS}, not {getattr(vision, name)}"
    for least, most in (PIXELS[:2], PIXELS[2:]):
        both = vision.HasField(least) and vision.HasField(most)
        if both and getattr(vision, least) > getattr(vision, most):
            yield f"vision.{least}", f"must be at most {most}, which is {getattr(vision, most)}"
    name = vision.WhichOneof("amount")
    if name is None:
        return
    value = getattr(vision, name)
    if name == "token_budget" and value < 1:
        yield "vision.token_budget", "must be at least 1"
    if name != "token_budget" and not 0 < value <= 1:
        yield f"vision.{name}", f"must be in (0, 1], not {value}"


def asked_vision(vision: pb.VisionParams) -> Vision:
    """The core form of ``vision``."""
    amount = vision.WhichOneof("amount")
    return Vision(
        pruner=vision.WhichOneof("pruner") or "none",
        amount=None if amount is None else Amount(amount, getattr(vision, amount)),
        images=PixelRange(*(_asked(vision, name) for name in PIXELS[:2])),
        videos=PixelRange(*(_asked(vision, name) for name in PIXELS[2:])),
    )


def _asked(vision: pb.VisionParams, name: str) -> int | None:
    return int(getattr(vision, name)) if vision.HasField(name) else None

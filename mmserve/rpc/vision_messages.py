"""What becomes of visual tokens, as messages name it."""

from __future__ import annotations

from collections.abc import Iterator

from mmserve.core.options import AMOUNTS, PIXELS, Amounts, Pixels
from mmserve.core.request import Amount, PixelRange, Vision
from mmserve.core.values import wrong
from mmserve.v1 import generation_pb2 as pb


def wrong_vision(vision: pb.VisionParams) -> Iterator[tuple[str, str]]:
    """What is wrong with pixels and with the amount, whatever the model and the pruner."""
    asked = {name: getattr(vision, name) for name in (*PIXELS, *AMOUNTS) if vision.HasField(name)}
    for kind in (Pixels, Amounts):
        for name, rule in wrong(kind, asked):
            yield f"vision.{name}", rule
    for of in ("", "video_"):
        least, most = asked.get(f"{of}min_pixels", 0), asked.get(f"{of}max_pixels")
        if most is not None and least > most:
            yield f"vision.{of}min_pixels", f"must be at most {of}max_pixels, which is {most}"


def asked_vision(vision: pb.VisionParams) -> Vision:
    """The core form of ``vision``."""
    amount = vision.WhichOneof("amount")
    pixels = [int(getattr(vision, name)) if vision.HasField(name) else None for name in PIXELS]
    return Vision(
        pruner=vision.WhichOneof("pruner") or "none",
        amount=None if amount is None else Amount(amount, getattr(vision, amount)),
        images=PixelRange(*pixels[:2]),
        videos=PixelRange(*pixels[2:]),
    )

"""What becomes of visual tokens, as messages name it."""

from __future__ import annotations

from collections.abc import Iterator

from mmserve.core.request import Amount, Vision
from mmserve.v1 import generation_pb2 as pb


def wrong_vision(vision: pb.VisionParams) -> Iterator[tuple[str, str]]:
    """What is wrong with the amount, whatever the pruner."""
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
    )

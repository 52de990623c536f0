"""Rules for reusing image K/V by name, and the one of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmserve.core.request import Request
from mmserve.errors import FieldViolation, InvalidArgument
from mmserve.kv.reuse.base import Reuse
from mmserve.kv.reuse.blend import Blend
from mmserve.kv.reuse.kv_share import KvShare
from mmserve.kv.reuse.lego_link import LegoLink
from mmserve.kv.reuse.random_reuse import RandomReuse

REUSES: dict[str, Callable[..., Reuse]] = {
    "blend": Blend,
    "kv_share": KvShare,
    "lego_link": LegoLink,
    "random_reuse": RandomReuse,
}


def reuse_of(request: Request) -> Reuse | None:
    """The request's rule; None if it has none. Raises ``InvalidArgument`` for an unknown name or an invalid number."""
    asked = request.image_reuse
    if asked is None:
        return None
    if asked.name not in REUSES:
        raise InvalidArgument.of("image_reuse", f"there is no policy {asked.name!r}; known are {sorted(REUSES)}")
    seed: dict[str, Any] = {"seed": request.sampling.seed} if asked.name == "random_reuse" else {}
    try:
        return REUSES[asked.name](**seed, **asked.options)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(FieldViolation(f"image_reuse.{asked.name}", str(error))) from error


__all__ = ["REUSES", "Reuse", "reuse_of"]

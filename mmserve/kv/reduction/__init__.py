"""K/V reductions (eviction policies) by name, and the one of a request."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.core.request import Request
from mmserve.errors import FieldViolation, InvalidArgument
from mmserve.kv.reduction.base import Reduction
from mmserve.kv.reduction.expected_attention import ExpectedAttention
from mmserve.kv.reduction.heavy_hitters import HeavyHitters
from mmserve.kv.reduction.sink_window import SinkWindow
from mmserve.kv.reduction.visual_cache import VisualCache

REDUCTIONS: dict[str, Callable[..., Reduction]] = {
    "heavy_hitters": HeavyHitters,
    "expected_attention": ExpectedAttention,
    "sink_window": SinkWindow,
    "visual_cache": VisualCache,
}


def reduction_of(request: Request) -> Reduction | None:
    """The request's reduction; None if it has none. Raises ``InvalidArgument`` for an unknown name or an invalid
    number."""
    asked = request.kv_reduction
    if asked is None:
        return None
    if asked.name not in REDUCTIONS:
        raise InvalidArgument.of("kv_reduction", f"there is no policy {asked.name!r}; known are {sorted(REDUCTIONS)}")
    try:
        return REDUCTIONS[asked.name](**{"budget": 0, **asked.options})
    except (TypeError, ValueError) as error:
        raise InvalidArgument(FieldViolation(f"kv_reduction.{asked.name}", str(error))) from error


__all__ = ["REDUCTIONS", "Reduction", "reduction_of"]

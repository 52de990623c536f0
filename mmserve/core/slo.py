"""Latency targets of a class of requests: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.values import at_least, value


@dataclass(frozen=True, kw_only=True)
class SLO:
    """A class of requests with its service-level objectives, which the scheduler tries to meet."""

    name: str = ""
    first_token_seconds: float = value(
        0.0,
        at_least(0, meaning="no target"),
        "target from arrival to the first token; a request that cannot meet it is refused",
    )
    per_token_seconds: float = value(
        0.0,
        at_least(0, meaning="no target"),
        "target for each further token; decode steps are shared in inverse proportion to it",
    )

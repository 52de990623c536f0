"""How soon the tokens of a request are wanted: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.values import at_least, value


@dataclass(frozen=True, kw_only=True)
class SLO:
    """A class of requests and its service-level objectives, which scheduling aims at."""

    name: str = ""
    first_token_seconds: float = value(
        0.0, at_least(0, meaning="no target"), "from arrival to the first token; one that cannot make it is refused"
    )
    per_token_seconds: float = value(
        0.0, at_least(0, meaning="no target"), "of each token after it; steps are shared out in inverse proportion"
    )

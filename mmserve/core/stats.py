"""A look at an engine from outside: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stats:
    """A look at the engine, for health, metrics and tests.

    The first four are what requests hold, and are zero when none is left; the rest, which only counts and keeps what
    may be dropped at any time, takes no part in comparisons.
    """

    live: int
    queued: int
    pages_in_use: int
    held: int  # requests of which a stage or transport keeps anything
    cached_pages: int = field(default=0, compare=False)  # published for later requests, in use or not
    prefix_lookups: int = field(default=0, compare=False)  # pages of prompts that were looked for, and
    prefix_hits: int = field(default=0, compare=False)  # those of them that were found
    constraint_steps: int = field(default=0, compare=False)  # of constrained requests that ended,
    constraint_fallbacks: int = field(default=0, compare=False)  # those after which the answer known before stayed, and
    constraint_late: int = field(default=0, compare=False)  # those of these that had no time left

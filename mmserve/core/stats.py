"""Statistics of an engine: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache since it was made, and what it keeps now.

    ``lookups`` = ``hits`` + ``joined`` (another request made the value) + ``disk_hits`` + ``made``, but for values
    that could not be made.
    """

    lookups: int = 0
    hits: int = 0
    joined: int = 0
    disk_hits: int = 0
    made: int = 0
    evicted: int = 0
    put: int = 0  # values that were made elsewhere
    unfit: int = 0  # found, but not of the shape it had to have: made again
    entries: int = 0
    used_bytes: int = 0
    disk_bytes: int = 0

    @property
    def found(self) -> int:
        """Lookups that found a value, or one that was being made."""
        return self.hits + self.joined + self.disk_hits


@dataclass(frozen=True)
class Pass:
    """A batch that a stage has run: of so many rows, prompt tokens or visual tokens, in so many seconds."""

    stage: str
    size: int
    seconds: float


@dataclass(frozen=True)
class Stats:
    """A snapshot of the engine, for health, metrics and tests.

    The first four are what requests hold, and are zero when none is left; the rest, which only counts and keeps what
    may be dropped at any time, takes no part in comparisons.
    """

    live: int
    queued: int
    pages_in_use: int
    held: int  # requests of which a stage or transport keeps anything
    pages: int = field(default=0, compare=False)  # that there are
    cached_pages: int = field(default=0, compare=False)  # published for later requests, in use or not
    prefix_lookups: int = field(default=0, compare=False)  # pages of prompts that were looked for, and
    prefix_hits: int = field(default=0, compare=False)  # those of them that were found
    constraint_steps: int = field(default=0, compare=False)  # of constrained requests that ended,
    constraint_fallbacks: int = field(default=0, compare=False)  # those after which the answer known before stayed, and
    constraint_late: int = field(default=0, compare=False)  # those of these that had no time left
    token_cache: CacheStats = field(default=CacheStats(), compare=False)  # visual tokens; shared by all engines, and
    pixel_cache: CacheStats = field(default=CacheStats(), compare=False)  # so are the pixels that they are made from,
    kv_cache: CacheStats = field(default=CacheStats(), compare=False)  # and images' K/V, for ``image_reuse``
    prefix_cache: CacheStats = field(default=CacheStats(), compare=False)  # pages of prompts beyond the pool; shared
    shed: int = field(default=0, compare=False)  # requests refused because they would have waited too long
    stages: Mapping[str, int] = field(default_factory=dict, compare=False)  # samples by the stage that they are in
    expected_wait: float = field(default=0.0, compare=False)  # of a request that came now, to start (seconds)

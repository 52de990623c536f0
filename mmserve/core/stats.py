"""Statistics of an engine: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache since its creation, and its current size.

    ``lookups`` = ``hits`` + ``joined`` (another request was computing the value) + ``disk_hits`` + ``made``, except for
    values whose computation failed.
    """

    lookups: int = 0
    hits: int = 0
    joined: int = 0
    disk_hits: int = 0
    made: int = 0
    evicted: int = 0
    put: int = 0  # values that were received, not computed here
    unfit: int = 0  # found, but recomputed because of a wrong shape
    entries: int = 0
    used_bytes: int = 0
    disk_bytes: int = 0

    @property
    def found(self) -> int:
        """Number of lookups that found a value, or one that was being computed."""
        return self.hits + self.joined + self.disk_hits


@dataclass(frozen=True)
class Pass:
    """A batch that a stage has run: its size in rows, prompt tokens or visual tokens, and its duration (seconds)."""

    stage: str
    size: int
    seconds: float


@dataclass(frozen=True)
class Stats:
    """A snapshot of the engine, for health, metrics and tests.

    The first four are resources that requests hold, and are zero if there are no requests; the other fields are
    counters and caches, which comparisons ignore.
    """

    live: int
    queued: int
    pages_in_use: int
    held: int  # requests of which a stage or transport holds any state
    pages: int = field(default=0, compare=False)  # total number of pages
    cached_pages: int = field(default=0, compare=False)  # pages in the prefix cache, in use or not
    prefix_lookups: int = field(default=0, compare=False)  # prompt pages that were looked up
    prefix_hits: int = field(default=0, compare=False)  # those that were found
    constraint_steps: int = field(default=0, compare=False)  # of constrained requests that ended,
    constraint_fallbacks: int = field(default=0, compare=False)  # steps after which the previous witness was kept
    constraint_late: int = field(default=0, compare=False)  # fallbacks in which the search ran out of time
    token_cache: CacheStats = field(default=CacheStats(), compare=False)  # visual tokens; shared by all engines
    pixel_cache: CacheStats = field(default=CacheStats(), compare=False)  # pixels of media; shared by all engines
    kv_cache: CacheStats = field(default=CacheStats(), compare=False)  # image K/V for ``image_reuse``
    prefix_cache: CacheStats = field(default=CacheStats(), compare=False)  # prompt pages outside of the pool; shared
    shed: int = field(default=0, compare=False)  # requests refused because of their expected wait
    stages: Mapping[str, int] = field(default_factory=dict, compare=False)  # number of samples in each stage
    expected_wait: float = field(default=0.0, compare=False)  # of a request that arrives now, until it starts (seconds)

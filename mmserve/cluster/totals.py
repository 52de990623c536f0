"""Sums of the statistics of a cluster's workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from mmserve.core.stats import CacheStats, Stats

#: Fields of ``Stats``: monotonic counters, and current values.
_COUNTS = ("prefix_lookups", "prefix_hits", "constraint_steps", "constraint_fallbacks", "constraint_late")
_HELD = ("pages_in_use", "held", "pages", "cached_pages")
CACHES = ("token_cache", "pixel_cache", "kv_cache", "prefix_cache")
#: Fields of ``CacheStats`` with current values; the others are monotonic counters.
_IN_MEMORY, _ON_DISK = ("entries", "used_bytes"), "disk_bytes"

NOTHING = Stats(0, 0, 0, 0)


def total(each: Sequence[Stats]) -> Stats:
    """The sums over workers; the coordinator adds its queue."""
    found: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in (*_COUNTS, *_HELD)}
    found |= {name: total_of_cache([getattr(one, name) for one in each]) for name in CACHES}
    stages: Counter[str] = Counter()
    for one in each:
        stages.update(one.stages)
    return replace(NOTHING, **found, stages=dict(stages))


def total_of_cache(each: Sequence[CacheStats]) -> CacheStats:
    """The sums over workers; bytes on disk are the maximum, because workers of a host share them."""
    sums = {field.name: sum(getattr(one, field.name) for one in each) for field in fields(CacheStats)}
    return CacheStats(**{**sums, _ON_DISK: max((one.disk_bytes for one in each), default=0)})


def counted(stats: Stats) -> Stats:
    """The counters of a worker that has exited, with current values set to 0, so that totals never decrease."""
    found: dict[str, Any] = {name: getattr(stats, name) for name in _COUNTS}
    nothing = dict.fromkeys((*_IN_MEMORY, _ON_DISK), 0)
    return replace(NOTHING, **found, **{name: replace(getattr(stats, name), **nothing) for name in CACHES})

"""``[kv_cache]``: tiers of the prefix cache outside of a model's K/V pages."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.values import at_least, value

_BYTES = at_least(0, meaning="nothing is kept")


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Tiers for pages of shared prompt prefixes that the page pool evicts, with LRU eviction."""

    host_bytes: int = value(0, _BYTES, "in this process's memory, or in that of each worker of a cluster")
    disk_folder: str = value(
        "", meaning="folder where pages are kept over restarts; processes of a host can share it; empty = none"
    )
    disk_bytes: int = value(4 << 30, _BYTES, "size of that folder, for all processes that share it")

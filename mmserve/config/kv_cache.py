"""``[kv_cache]``: the beginnings of prompts beyond the K/V pages of a model."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.values import at_least, value

_BYTES = at_least(0, meaning="that nothing is kept")


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Where pages of shared prompt beginnings go that the page pool has no room for, least recently used first out."""

    host_bytes: int = value(0, _BYTES, "in this process's memory; a cluster's workers have as much each")
    disk_folder: str = value(
        "", meaning="pages are also kept here, over restarts; processes of a host may share it; empty = nowhere"
    )
    disk_bytes: int = value(4 << 30, _BYTES, "bytes of that folder, of all processes that share it")

"""The caches of a server, shared by all of its engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mmserve.config import EncoderCacheConfig
from mmserve.config.kv_cache import KVCacheConfig
from mmserve.tiers.disk import DiskCache
from mmserve.tiers.memory import TensorCache


@dataclass(frozen=True)
class Caches:
    """Caches of media (visual tokens, prepared pixels, and the decoder's K/V of separate images), and of K/V of prompt
    prefixes evicted from the page pools (``prefix``)."""

    tokens: TensorCache
    pixels: TensorCache
    kv: TensorCache
    prefix: TensorCache

    @classmethod
    def of(cls, media: EncoderCacheConfig, kv: KVCacheConfig | None = None) -> Self:
        """Empty caches, except for what is on disk; raises ``ConfigError`` if a folder cannot be used."""
        kv = kv or KVCacheConfig()
        disk = DiskCache(Path(media.disk_folder), media.disk_bytes) if media.disk_folder else None
        pages = None
        if kv.disk_folder:
            pages = DiskCache(Path(kv.disk_folder), kv.disk_bytes, kind="kv", table="kv_cache")
        return cls(
            TensorCache(media.token_bytes, disk),
            TensorCache(media.pixel_bytes),
            TensorCache(media.kv_bytes),
            TensorCache(kv.host_bytes, pages),
        )

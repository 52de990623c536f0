"""Cache entries of models that are not served: of unloaded ones, and of other servers that share a folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from mmserve.core.cached import Block, Label, alone, named
from mmserve.tiers.memory import TensorCache


class Leftover:
    """The entries in ``caches`` of all models that are not ``served`` or, if it is not empty, of ``model`` alone.

    ``usable``: whether requests to the engine that lists them can use the block of a key: if its model is the same
    under another name. Others are ``stale``, except visual tokens, of which that is not known. Thread-safe, and slow.
    """

    def __init__(
        self,
        caches: Sequence[TensorCache],
        served: Collection[str],
        model: str,
        usable: Callable[[bytes, Label], bool],
    ) -> None:
        self._caches, self._served, self._model, self._usable = caches, frozenset(served), model, usable

    def blocks(self) -> list[Block]:
        """All blocks, tier by tier."""
        return [block for cache in self._caches for _key, block in self._of(cache)]

    def pin(self, ids: Sequence[str], pinned: bool) -> int:
        """Unpin entries; they can only be pinned as those of a model that is served. Returns how many of their blocks
        are there."""
        return 0 if pinned else self._each(ids, named, lambda cache, keys: cache.pin(keys, False))

    def drop(self, ids: Sequence[str]) -> int:
        """Drop entries, without pages shared with others. Returns the number of blocks."""
        return self._each(ids, alone, TensorCache.drop)

    def _each(
        self,
        ids: Sequence[str],
        chosen: Callable[[Iterable[Block], Sequence[str]], list[str]],
        act: Callable[[TensorCache, Sequence[bytes]], int],
    ) -> int:
        """Apply ``act`` to the ``chosen`` blocks of the entries ``ids`` of each model; returns the sum."""
        count = 0
        for cache in self._caches:
            found = self._of(cache)
            for model in {block.label.model for _key, block in found}:
                own = [(key, block) for key, block in found if block.label.model == model]
                names = set(chosen([block for _key, block in own], ids))
                keys = dict.fromkeys(key for key, block in own if block.label.name in names)
                count += act(cache, list(keys)) if keys else 0
        return count

    def _of(self, cache: TensorCache) -> list[tuple[bytes, Block]]:
        return [
            (key, replace(block, stale=key.hex() if self._is_stale(key, block) else ""))
            for key, block in cache.blocks()
            if block.label.model not in self._served and self._model in ("", block.label.model)
        ]

    def _is_stale(self, key: bytes, block: Block) -> bool:
        return block.label.kind == "prefix" and not self._usable(key, block.label)

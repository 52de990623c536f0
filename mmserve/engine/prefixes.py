"""The prefix cache of an engine: in its page pool, and in other tiers (``kv.prefix_tier``)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from mmserve.core.cached import Block, Label, alone, named
from mmserve.core.request import TERMINAL, RequestId
from mmserve.engine.request_state import RequestState
from mmserve.errors import FailedPrecondition
from mmserve.kv.pool import PagePool
from mmserve.kv.prefix_tier import Fetched, PrefixTier
from mmserve.tiers.caches import Caches
from mmserve.tiers.leftover import Leftover

logger = logging.getLogger("mmserve.engine")
_T = TypeVar("_T")

#: Number of prompts whose pages are read from disk concurrently.
_READERS = 2
#: Timeout (seconds) for an answer of the engine's thread.
_PATIENCE = 30.0
#: Number of requests whose prompts are remembered.
_LATEST = 1024


class Prefixes:
    """The prefix cache; for the engine's thread, except for ``blocks``, ``pin``, ``drop`` and ``flush``.

    ``tier``: None = only the pool. ``post`` runs a callable on the engine's thread. ``fetched``: pages of requests that
    wait for prefill, which the prefill stage removes. ``page_bytes``: size of a page in the pool.
    """

    def __init__(
        self,
        pool: PagePool,
        tier: PrefixTier | None,
        fetched: dict[RequestId, Fetched],
        post: Callable[[Callable[[], None]], None],
        model: str,
        page_size: int,
        page_bytes: int,
    ) -> None:
        self._pool, self._tier, self._fetched, self._post = pool, tier, fetched, post
        self._model, self._page_size, self._page_bytes = model, page_size, page_bytes
        #: The last page of recently prefilled prompts, by request.
        self.latest: OrderedDict[RequestId, str] = OrderedDict()
        self._labels: dict[bytes, Label] = {}  # of published pages, by key
        self._read: set[Fetched] = set()  # that the engine's thread has not taken yet
        self._readers = None if tier is None else ThreadPoolExecutor(_READERS, "mmserve-pages")
        if tier is not None:
            pool.evicted = []

    def published(self, state: RequestState) -> None:
        """Record the labels of the pages of ``state`` that are published by now."""
        if not state.keys:
            return
        self.latest[state.request.id] = state.keys[-1].hex()
        if len(self.latest) > _LATEST:
            self.latest.popitem(last=False)
        if not self._labels.keys() >= set(state.keys):  # a page may have been evicted while a later one stayed
            self._labels.update(zip(state.keys, self._labels_of(state), strict=True))
        if len(self._labels) > 2 * self._pool.total:
            there = self._pool.published()
            self._labels = {key: label for key, label in self._labels.items() if key in there}

    def fetch(self, state: RequestState) -> None:
        """Look up in the tier the pages of a prompt that are not in the pool; its prefill waits for the result."""
        if self._tier is None or self._readers is None or not state.keys or state.unpruned or state.final is not None:
            return
        known = self._pool.known(state.keys)
        if known == len(state.keys):
            return
        state.fetching, tier, labels = True, self._tier, self._labels_of(state)

        def read() -> None:
            fetched = Fetched()
            try:
                fetched = tier.fetch(state.keys[known:], labels[known:])
            except Exception as error:  # noqa: BLE001 - missing pages are computed
                logger.warning("K/V pages of request %s could not be read: %s", state.request.id, error)
            self._read.add(fetched)
            self._post(lambda: take(fetched))

        def take(fetched: Fetched) -> None:
            self._read.discard(fetched)
            state.fetching = False
            if state.stage in TERMINAL or state.aborted:
                fetched.close()
            else:
                self._fetched[state.request.id] = fetched

        self._readers.submit(read)

    def evicted(self) -> Callable[[], None]:
        """A function that copies evicted pages that have just been reallocated; to be called before they are
        written."""
        if self._tier is None or not self._pool.evicted:
            return lambda: None
        pages = [(page, self._labels.pop(key)) for page, key in self._pool.evicted if key in self._labels]
        self._pool.evicted, tier = [], self._tier
        return lambda: tier.save(pages)

    def copy_evicted(self) -> None:
        """Copy evicted pages that have just been reallocated (see ``evicted``) now."""
        self.evicted()()

    # --- from any thread ---

    def blocks(self) -> list[Block]:
        """All cached blocks."""
        found = self._ask(self._in_pool)
        return found + (self._tier.blocks() if self._tier is not None else [])

    def pin(self, ids: Sequence[str], pinned: bool) -> int:
        """Pin the prefixes ``ids`` in the tier, or unpin them. Returns how many of their pages are there.

        Raises ``FailedPrecondition`` if there is no tier, ``ResourceExhausted`` if too much is pinned.
        """
        if self._tier is None:
            why = "pages of prompts are pinned beyond the page pool: set [kv_cache] host_bytes or disk_folder"
            raise FailedPrecondition(why)
        names = named(self.blocks(), ids)
        if pinned:
            self._copied(names)
        return self._tier.pin(names, pinned)

    def drop(self, ids: Sequence[str]) -> int:
        """Drop the prefixes ``ids``, without pages shared with others. Returns the number of pages."""
        names = alone(self.blocks(), ids)
        self.discard(names)
        return len(names)

    def discard(self, names: Sequence[str]) -> None:
        """Drop the pages ``names``; unknown ones are ignored."""
        if self._tier is not None:
            self._tier.drop(names)
        self._ask(lambda: self._pool.unpublish([bytes.fromhex(name) for name in names]))

    def flush(self) -> None:
        """Copy the pool's published pages to disk, after the engine's thread and its workers have ended."""
        if self._tier is None or self._readers is None:
            return
        self._readers.shutdown()
        for fetched in [*self._read, *self._fetched.values()]:
            fetched.close()
        if self._tier.cache.on_disk:
            there = [(page, self._labels[key]) for key, page in self._pool.published().items() if key in self._labels]
            most = max(1, self._tier.cache.room // self._tier.page_bytes)
            self._tier.save(there[-most:])
            self._tier.cache.flush()

    def uses(self, key: bytes, label: Label) -> bool:
        """Whether requests use the page under this key of the tier; ``label`` may have another model's name."""
        return self._tier is not None and self._tier.uses(key, label)

    def unpin_in_memory(self, keep: Callable[[bytes, Label], bool]) -> None:
        """Unpin the model's pages in memory, except those to ``keep``; those on disk stay pinned."""
        if self._tier is not None:
            self._tier.cache.unpin_in_memory(self._model, keep)

    def _in_pool(self) -> list[Block]:
        labels = ((key, self._labels.get(key)) for key in self._pool.published())
        return [Block(label, "pages", self._page_bytes) for _key, label in labels if label is not None]

    def _labels_of(self, state: RequestState) -> list[Label]:
        names = [key.hex() for key in state.keys]
        tenant = state.request.tenant.cache
        return [
            Label("prefix", self._model, tenant, self._page_size, name, parent)
            for name, parent in zip(names, ("", *names), strict=False)
        ]

    def _copied(self, names: Sequence[str]) -> None:
        """Copy pages that are in the pool, which are held meanwhile."""
        tier = self._tier
        assert tier is not None, "only ``pin`` calls this"

        def hold() -> list[tuple[int, Label]]:
            pages, labels = self._pool.published(), self._labels
            keys = map(bytes.fromhex, names)
            wanted = [(pages[key], labels[key]) for key in keys if key in pages and key in labels]
            self._pool.hold([page for page, _label in wanted])
            return wanted

        held = self._ask(hold)
        try:
            tier.save(held)
        finally:
            self._post(lambda: self._pool.release(tuple(page for page, _label in held)))  # even after a timeout

    def _ask(self, question: Callable[[], _T]) -> _T:
        """Run ``question`` on the engine's thread and return its result, or raise its exception.

        Raises ``FailedPrecondition`` if that thread does not run it in time; it is then never run.
        """
        answer: Future[_T] = Future()

        def put() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question())
            except Exception as error:  # noqa: BLE001 - the caller's, and no request's
                answer.set_exception(error)

        self._post(put)
        try:
            return answer.result(_PATIENCE)
        except TimeoutError:
            if not answer.cancel():
                return answer.result()  # it is running
            raise FailedPrecondition("the engine is not running: its caches cannot be read now") from None


def own(blocks: Sequence[Block], worker: str) -> list[Block]:
    """``blocks`` as those of ``worker``."""
    return [replace(block, worker=worker) for block in blocks]


class EngineCaches:
    """The caches of one engine's ``model``; those in ``caches`` are shared by engines. Thread-safe, and slow."""

    def __init__(self, model: str, prefixes: Prefixes, caches: Caches) -> None:
        self._model, self._prefixes, self._tokens = model, prefixes, caches.tokens
        self._shared = caches.prefix, caches.tokens

    def blocks(self) -> list[Block]:
        """All blocks, tier by tier."""
        return self._prefixes.blocks() + [b for _key, b in self._tokens.blocks() if b.label.model == self._model]

    def pin(self, ids: Sequence[str], pinned: bool) -> int:
        """Pin entries, or unpin them. Returns how many of their blocks are there.

        Raises ``FailedPrecondition`` if pages are cached only in the pool, ``ResourceExhausted`` if too much is
        pinned.
        """
        visual, prefixes = self._sorted(ids)
        found = self._tokens.pin([bytes.fromhex(each) for each in visual], pinned) if visual else 0
        return found + (self._prefixes.pin(prefixes, pinned) if prefixes else 0)

    def drop(self, ids: Sequence[str]) -> int:
        """Drop entries, without pages shared with others. Returns the number of blocks."""
        visual, prefixes = self._sorted(ids)
        found = self._tokens.drop([bytes.fromhex(each) for each in visual]) if visual else 0
        return found + (self._prefixes.drop(prefixes) if prefixes else 0)

    def discard(self, visual: Sequence[str], pages: Sequence[str]) -> int:
        """Drop visual tokens and pages by the names of their blocks, even if shared. Returns how many were found."""
        self._tokens.drop([bytes.fromhex(each) for each in visual])
        self._prefixes.discard(pages)
        return len(visual) + len(pages)

    def others(self, served: Collection[str], model: str = "") -> Leftover:
        """See ``Leftover``."""
        return Leftover(self._shared, served, model, self._prefixes.uses)

    def unpin_in_memory(self, successor: EngineCaches | None = None) -> None:
        """Unpin entries in memory, for an engine that has stopped: they would take memory from other models.

        ``successor``: of the engine that serves the model now, if any. Pages that it can use stay pinned, and all
        visual tokens, of which that is not known.
        """
        if successor is None:
            self._tokens.unpin_in_memory(self._model)
        self._prefixes.unpin_in_memory(lambda key, label: successor is not None and successor.uses(key, label))

    def uses(self, key: bytes, label: Label) -> bool:
        """See ``Prefixes.uses``."""
        return self._prefixes.uses(key, label)

    def prefix_of(self, request: str) -> str:
        """The id of the prompt prefix of a recently ended request; empty if none is cached."""
        return self._prefixes.latest.get(request, "")

    def _sorted(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """``ids`` of visual tokens, and those of prefixes; unknown ones are left out."""
        kinds = {block.label.name: block.label.kind for block in self.blocks()}
        known = [each for each in ids if each in kinds]
        return [i for i in known if kinds[i] == "visual"], [i for i in known if kinds[i] == "prefix"]

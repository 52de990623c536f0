"""The caches of a server: ``client.cache``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from mmserve.client.options import Chat, Image, Options
from mmserve.client.outgoing import build_request
from mmserve.core.cached import CacheEntry, Kind, Listing
from mmserve.v1 import cache_pb2 as pb
from mmserve.wire.cached import from_entry, kind_number


@dataclass(frozen=True)
class Warmed:
    """A prefilled prompt: its tokens, those that were cached before, visual ones, and the id of its entry, which is
    empty if the model's attention does not allow sharing prefixes."""

    prompt_tokens: int
    cached_tokens: int
    visual_tokens: int
    id: str


class Cache:
    """The caches of a server. ``call(stub's method name, message, timeout)`` makes a call.

    ``pin``, ``unpin`` and ``drop`` change entries of ``model`` only; without it, an id that several models have raises
    ``InvalidArgument``.
    """

    def __init__(self, call: Callable[[str, Any, float | None], Any]) -> None:
        self._call = call

    def list(self, model: str = "", *, kind: Kind | None = None, timeout: float | None = None) -> Listing:
        """The cache entries, the largest first: the caller's own, or all with an admin's token."""
        return _listing(self._call("ListEntries", _asked(model, kind), timeout))

    def pin(self, ids: Sequence[str], *, model: str = "", timeout: float | None = None) -> int:
        """Pin entries, so that they are not evicted. Returns the number of blocks. Needs an admin's token."""
        return int(self._call("PinEntries", pb.PinEntriesRequest(ids=ids, model=model), timeout).blocks)

    def unpin(self, ids: Sequence[str], *, model: str = "", timeout: float | None = None) -> int:
        """Unpin entries. Returns the number of blocks. Needs an admin's token."""
        return int(self._call("UnpinEntries", pb.UnpinEntriesRequest(ids=ids, model=model), timeout).blocks)

    def drop(self, ids: Sequence[str], *, model: str = "", timeout: float | None = None) -> int:
        """Drop entries. Returns the number of blocks. Needs an admin's token."""
        return int(self._call("DropEntries", pb.DropEntriesRequest(ids=ids, model=model), timeout).blocks)

    def warm(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        pin: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Warmed:
        """Encode and prefill a prompt now, so that requests with this prefix reuse it. ``pin``: see ``pin``."""
        return _warmed(self._call("Warm", _warm(prompt, images, pin, options), timeout))


class AsyncCache:
    """As ``Cache``, for asyncio."""

    def __init__(self, call: Callable[[str, Any, float | None], Any]) -> None:
        self._call = call

    async def list(self, model: str = "", *, kind: Kind | None = None, timeout: float | None = None) -> Listing:
        """As ``Cache.list``."""
        return _listing(await self._call("ListEntries", _asked(model, kind), timeout))

    async def pin(self, ids: Sequence[str], *, model: str = "", timeout: float | None = None) -> int:
        """As ``Cache.pin``."""
        return int((await self._call("PinEntries", pb.PinEntriesRequest(ids=ids, model=model), timeout)).blocks)

    async def unpin(self, ids: Sequence[str], *, model: str = "", timeout: float | None = None) -> int:
        """As ``Cache.unpin``."""
        return int((await self._call("UnpinEntries", pb.UnpinEntriesRequest(ids=ids, model=model), timeout)).blocks)

    async def drop(self, ids: Sequence[str], *, model: str = "", timeout: float | None = None) -> int:
        """As ``Cache.drop``."""
        return int((await self._call("DropEntries", pb.DropEntriesRequest(ids=ids, model=model), timeout)).blocks)

    async def warm(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        pin: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Warmed:
        """As ``Cache.warm``."""
        message = await asyncio.to_thread(_warm, prompt, images, pin, options)
        return _warmed(await self._call("Warm", message, timeout))


def _asked(model: str, kind: Kind | None) -> pb.ListEntriesRequest:
    return pb.ListEntriesRequest(model=model, kind=kind_number(kind))


def _listing(reply: pb.ListEntriesResponse) -> Listing:
    entries: tuple[CacheEntry, ...] = tuple(from_entry(each) for each in reply.entries)
    sizes: Any = dict(reply.sizes)
    return Listing(entries, sizes)


def _warm(prompt: str | Sequence[Chat], images: Sequence[Image], pin: bool, options: Options) -> pb.WarmRequest:
    return pb.WarmRequest(request=build_request(prompt, images, deltas=False, snapshots=False, **options), pin=pin)


def _warmed(reply: pb.WarmResponse) -> Warmed:
    return Warmed(reply.prompt_tokens, reply.cached_tokens, reply.visual_tokens, reply.id)

"""CacheService: lists, pins, drops and prefills cache entries."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

from mmserve.core.cached import Block, listing
from mmserve.core.events import Finished
from mmserve.core.request import Streaming
from mmserve.errors import InvalidArgument, MMServeError, Unimplemented
from mmserve.observe import calls
from mmserve.rpc.auth import check_admin, current_tenant
from mmserve.rpc.engines import EngineLike, Engines, KeptLike, kept_of
from mmserve.rpc.generation import Generations, answered, deadline_of, logged
from mmserve.rpc.status import errors_to_status, handler
from mmserve.v1 import cache_pb2 as pb
from mmserve.v1 import cache_pb2_grpc
from mmserve.wire.cached import KINDS, to_entry

logger = logging.getLogger("mmserve.rpc")

#: Fields of a request that determine its prompt's entry.
_OF_PROMPT = ("model", "messages", "raw", "template_options", "vision", "image_reuse", "adapter")


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """Manages the caches of all engines of a server."""

    def __init__(self, engines: Engines, generations: Generations) -> None:
        self._engines, self._generations = engines, generations

    @handler
    async def ListEntries(self, message: pb.ListEntriesRequest, context: Any) -> pb.ListEntriesResponse:
        """The caller's entries, or all for an admin; NOT_FOUND for an unknown model."""
        engines = [self._engines.find(message.model)] if message.model else self._engines.any_ready()
        blocks = await self._blocks(engines)
        kind = KINDS.get(message.kind)
        found = listing([block for block in blocks if kind in (None, block.label.kind)])
        sizes = {str(tier): size for tier, size in found.sizes.items()}
        return pb.ListEntriesResponse(entries=[to_entry(each) for each in found.entries], sizes=sizes)

    @handler
    async def PinEntries(self, message: pb.PinEntriesRequest, context: Any) -> pb.PinEntriesResponse:
        """Pin entries, so that they are not evicted."""
        return pb.PinEntriesResponse(blocks=await self._pin(message, pinned=True))

    @handler
    async def UnpinEntries(self, message: pb.UnpinEntriesRequest, context: Any) -> pb.UnpinEntriesResponse:
        """Unpin entries."""
        return pb.UnpinEntriesResponse(blocks=await self._pin(message, pinned=False))

    @handler
    async def DropEntries(self, message: pb.DropEntriesRequest, context: Any) -> pb.DropEntriesResponse:
        """Drop entries."""
        check_admin("pin or drop cache entries")
        ids = list(message.ids)
        dropped = [await asyncio.to_thread(_kept(each).drop, ids) for each in await self._of(ids, message.model)]
        logger.info("dropped %d blocks of %d cache entries", sum(dropped), len(ids))
        return pb.DropEntriesResponse(blocks=sum(dropped))

    async def Warm(self, message: pb.WarmRequest, context: Any) -> pb.WarmResponse:
        """Encode and prefill a prompt, by a request that generates one token, which is discarded."""
        label, own = calls.current().request_id, uuid.uuid4().hex
        with ExitStack() as held:
            async with errors_to_status(context, f"Warm {label}"):
                pin, made = message.pin, message.request
                del message  # it may hold media
                if pin:
                    check_admin("pin or drop cache entries")
                for field, _ in made.ListFields():
                    if field.name not in _OF_PROMPT:
                        made.ClearField(field.name)
                made.sampling.max_new_tokens, made.sampling.n = 1, 1
                with logged(own, label), self._generations.watch() as watch:
                    try:
                        files = await self._generations.fetched(made)
                        engine, request = self._generations.accepted(
                            own, made, current_tenant(), deadline_of(context), held, watch, files
                        )
                        del files
                    except MMServeError as error:
                        raise error.with_traceback(None) from None  # its frames hold the message
                    finally:
                        del made
                    request = replace(request, streaming=Streaming(deltas=False))
                    async with aclosing(answered(engine, request, watch)) as events:
                        ends = [event async for event in events if isinstance(event, Finished)]
                name = await asyncio.to_thread(_kept(engine).prefix_of, own)
                if pin and name:
                    await asyncio.to_thread(_kept(engine).pin, [name], True)
                usage = ends[-1].usage
                return pb.WarmResponse(
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    visual_tokens=usage.visual_tokens,
                    id=name,
                )
        raise AssertionError("unreachable: an error ends the call")

    async def _blocks(self, engines: Sequence[EngineLike]) -> list[Block]:
        """The blocks of these engines' caches that the caller may see."""
        tenant = current_tenant()
        found = [block for each in engines for block in await asyncio.to_thread(_kept(each).blocks)]
        return found if tenant.admin else [block for block in found if block.label.tenant == tenant.cache]

    async def _pin(self, message: pb.PinEntriesRequest | pb.UnpinEntriesRequest, *, pinned: bool) -> int:
        check_admin("pin or drop cache entries")
        ids = list(message.ids)
        return sum(
            [await asyncio.to_thread(_kept(each).pin, ids, pinned) for each in await self._of(ids, message.model)]
        )

    async def _of(self, ids: Sequence[str], model: str) -> list[EngineLike]:
        """The engines with the entries ``ids``: that of ``model``, or all if it is empty.

        Raises ``InvalidArgument`` for an id that several models have: equal prompts have equal ids.
        """
        if model:
            return [self._engines.find(model)]
        engines = self._engines.any_ready()
        if len(engines) > 1:
            models: dict[str, set[str]] = {}
            for block in await self._blocks(engines):
                models.setdefault(block.label.name, set()).add(block.label.model)
            for i, each in enumerate(ids):
                if len(found := models.get(each, ())) > 1:
                    raise InvalidArgument.of(f"ids[{i}]", f"is an entry of {' and of '.join(sorted(found))}: set model")
        return engines


def _kept(engine: EngineLike) -> KeptLike:
    found = kept_of(engine)
    if found is None:
        raise Unimplemented(f"caches of {engine.info.name!r} cannot be managed here")
    return found

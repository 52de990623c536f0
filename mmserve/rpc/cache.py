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
from mmserve.rpc.engines import EngineCachesLike, EngineLike, Engines, EntriesLike, caches_of
from mmserve.rpc.generation import Generations, answered, deadline_of, logged
from mmserve.rpc.status import errors_to_status, handler
from mmserve.v1 import cache_pb2 as pb
from mmserve.v1 import cache_pb2_grpc
from mmserve.v1 import generation_pb2 as gen
from mmserve.wire.cached import KINDS, to_entry

logger = logging.getLogger("mmserve.rpc")

#: Fields of a request that determine its prompt's entry. ``tools`` too, unless ``tool_choice`` excludes them.
_OF_PROMPT = (
    "model",
    "messages",
    "continue_final_message",
    "raw",
    "template_options",
    "tools",
    "vision",
    "image_reuse",
    "adapter",
)


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """Manages the caches of all engines of a server."""

    def __init__(self, engines: Engines, generations: Generations) -> None:
        self._engines, self._generations = engines, generations

    @handler
    async def ListEntries(self, message: pb.ListEntriesRequest, context: Any) -> pb.ListEntriesResponse:
        """The caller's entries, or all for an admin; NOT_FOUND for an unknown model without entries."""
        blocks = [block for each in await self._held(message.model) for block in await self._blocks(each)]
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
        chosen = await self._chosen(message.ids, message.model)
        dropped = [await asyncio.to_thread(each.drop, ids) for each, ids in chosen]
        logger.info("dropped %d blocks of %d cache entries", sum(dropped), len(message.ids))
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
                shown = _OF_PROMPT if made.tool_choice != gen.TOOL_CHOICE_NONE else set(_OF_PROMPT) - {"tools"}
                for field, _ in made.ListFields():
                    if field.name not in shown:
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
                    # without the grammar of calls, which the one token is too short for
                    request = replace(request, streaming=Streaming(deltas=False), constraint=None)
                    async with aclosing(answered(engine, request, watch)) as events:
                        ends = [event async for event in events if isinstance(event, Finished)]
                name = await asyncio.to_thread(_caches(engine).prefix_of, own)
                if pin and name:
                    await asyncio.to_thread(_caches(engine).pin, [name], True)
                usage = ends[-1].usage
                return pb.WarmResponse(
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    visual_tokens=usage.visual_tokens,
                    id=name,
                )
        raise AssertionError("unreachable: an error ends the call")

    async def _held(self, model: str) -> list[EntriesLike]:
        """The entries of ``model`` or, if it is empty, of each model, with those of models that are not served at the
        end.

        Raises ``NotFound`` for a model that is not served and has no entries, ``Unavailable`` while all are loading.
        """
        served = self._engines.names
        if model in served:
            return [_caches(self._engines.find(model))]
        engines = self._engines.any_ready()
        others = _Others([_caches(each).others(served, model) for each in engines])
        if not model:
            return [*map(_caches, engines), others]
        if not await self._blocks(others):
            self._engines.find(model)
        return [others]

    async def _blocks(self, entries: EntriesLike) -> list[Block]:
        """The blocks of these entries that the caller may see."""
        tenant, found = current_tenant(), await asyncio.to_thread(entries.blocks)
        return found if tenant.admin else [block for block in found if block.label.tenant == tenant.cache]

    async def _pin(self, message: pb.PinEntriesRequest | pb.UnpinEntriesRequest, *, pinned: bool) -> int:
        check_admin("pin or drop cache entries")
        chosen = await self._chosen(message.ids, message.model)
        return sum([await asyncio.to_thread(each.pin, ids, pinned) for each, ids in chosen])

    async def _chosen(self, ids: Sequence[str], model: str) -> list[tuple[EntriesLike, list[str]]]:
        """Those of the entries ``ids`` to change in each of the caches with the entries of ``model``, or of all models
        if it is empty: entries of models that are not served only if no other model has them.

        Raises ``InvalidArgument`` for an id that several models have: equal prompts have equal ids.
        """
        held = await self._held(model)
        if len(held) == 1:
            return [(held[0], list(ids))]
        owners = [_owners(await self._blocks(entries)) for entries in held]
        left: list[str] = []
        for i, name in enumerate(ids):
            found = set[str]().union(*(owner.get(name, ()) for owner in owners[:-1]))
            if not found:
                left.append(name)
                found = owners[-1].get(name, set())
            if len(found) > 1:
                raise InvalidArgument.of(f"ids[{i}]", f"is an entry of {' and of '.join(sorted(found))}: set model")
        return [*((entries, list(ids)) for entries in held[:-1]), (held[-1], left)]


class _Others:
    """Entries of models that are not served, as each engine lists them; they are stale if they are for all engines."""

    def __init__(self, each: Sequence[EntriesLike]) -> None:
        self._each = each

    def blocks(self) -> list[Block]:
        """All blocks."""
        found, *others = (entries.blocks() for entries in self._each)
        used = {_place(block) for blocks in others for block in blocks if not block.stale}
        return [replace(block, stale="") if _place(block) in used else block for block in found]

    def pin(self, ids: Sequence[str], pinned: bool) -> int:
        """See ``tiers.leftover.Leftover.pin``."""
        return self._each[0].pin(ids, pinned)

    def drop(self, ids: Sequence[str]) -> int:
        """See ``tiers.leftover.Leftover.drop``."""
        return self._each[0].drop(ids)


def _place(block: Block) -> tuple[object, ...]:
    return block.label, block.tier, block.worker


def _owners(blocks: Sequence[Block]) -> dict[str, set[str]]:
    """The models that have a block of each name."""
    found: dict[str, set[str]] = {}
    for block in blocks:
        found.setdefault(block.label.name, set()).add(block.label.model)
    return found


def _caches(engine: EngineLike) -> EngineCachesLike:
    found = caches_of(engine)
    if found is None:
        raise Unimplemented(f"caches of {engine.info.name!r} cannot be managed here")
    return found

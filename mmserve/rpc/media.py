"""MediaService: files uploaded once, in chunks, and kept by their hash."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from mmserve.config import MediaConfig
from mmserve.encode.store import MediaStore
from mmserve.errors import DeadlineExceeded, InvalidArgument, MMServeError, ResourceExhausted
from mmserve.observe.inventory import Calls
from mmserve.rpc.auth import current_tenant
from mmserve.rpc.status import handler
from mmserve.v1 import media_pb2, media_pb2_grpc

#: Retry delay (seconds) for a client refused because of too many uploads.
_RETRY_AFTER = 1.0
#: An unfinished upload reserves memory, so one slower than this rate (bytes per second) is ended, at the latest this
#: many seconds after its last chunk.
_LEAST_RATE = 1 << 15
_PATIENCE = 60.0


class MediaService(media_pb2_grpc.MediaServiceServicer):
    """Receives uploads; those in progress may together hold as many bytes as the store."""

    def __init__(self, store: MediaStore, limits: MediaConfig, calls: Calls) -> None:
        self._store = store
        self._limits = limits
        self._calls = calls
        self._in_progress = 0  # total bytes of unfinished uploads

    @handler
    async def UploadMedia(
        self, chunks: AsyncIterator[media_pb2.UploadMediaRequest], context: Any
    ) -> media_pb2.UploadMediaResponse:
        """Store the concatenated chunks; refuses empty and too large items, more than the store can hold, and stalled
        uploads."""
        try:
            return await self._receive(chunks)
        except BaseException as error:
            self._calls.upload_failed(error.code if isinstance(error, MMServeError) else "CANCELLED")
            raise

    async def _receive(self, chunks: AsyncIterator[media_pb2.UploadMediaRequest]) -> media_pb2.UploadMediaResponse:
        received: list[bytes] = []
        chunk = b""
        size = 0
        digest = hashlib.sha256()
        try:
            async with kept_up() as came:
                async for message in chunks:
                    chunk = message.chunk
                    del message  # holds a second copy of its bytes
                    self._check_capacity(size, len(chunk))
                    received.append(chunk)
                    size += len(chunk)
                    self._in_progress += len(chunk)
                    digest.update(chunk)
                    came(len(chunk))
            if not size:
                raise InvalidArgument.of("chunk", "must not be empty: the upload has no bytes")
            media_id = f"sha256:{digest.hexdigest()}"
            stored = self._store.put(b"".join(received), media_id=media_id, cache=current_tenant().cache)
        finally:
            self._in_progress -= size
            del received, chunk  # an error will still be sent, and has this frame in its traceback
        self._calls.uploaded(size, deduplicated=stored.deduplicated)
        return media_pb2.UploadMediaResponse(media_id=stored.media_id, bytes=size, deduplicated=stored.deduplicated)

    def _check_capacity(self, size: int, more: int) -> None:
        limit = self._limits.max_item_bytes
        if size + more > limit:
            raise InvalidArgument.of("chunk", f"must be at most {limit} bytes together")
        if size + more > self._store.capacity:
            raise ResourceExhausted(f"the item does not fit into the media store of {self._store.capacity} bytes")
        if self._in_progress + more > self._store.capacity:
            raise ResourceExhausted("too many uploads at once", retry_after=_RETRY_AFTER)


@asynccontextmanager
async def kept_up() -> AsyncIterator[Callable[[int], None]]:
    """Context for reading an upload; yields a function that must be called with the number of bytes of each chunk.

    Raises ``DeadlineExceeded`` if they arrive too slowly.
    """
    now = asyncio.get_running_loop().time
    end = now() + _PATIENCE

    def came(size: int) -> None:
        nonlocal end
        end = min(now() + _PATIENCE, end + size / _LEAST_RATE)
        limit.reschedule(end)

    try:
        async with asyncio.timeout_at(end) as limit:
            yield came
    except TimeoutError:
        raise DeadlineExceeded(
            f"the upload stalled, or came slower than {_LEAST_RATE} bytes a second; send it again"
        ) from None

"""How messages come in: so many calls of a method, so many messages at once, each in its turn and well-formed.

gRPC receives a message whole, and parses it, before anybody can say no to it. So a message is asked for only while
there is room for the largest that may come; until then all but its beginning stays with its client (HTTP/2's flow
control). For that, the calls with one request are read here like streams of requests, as on the wire they are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mmserve.config import ServerConfig
from mmserve.errors import InvalidArgument, MMServeError, ResourceExhausted
from mmserve.rpc.status import abort

#: When a client may try again (seconds).
_RETRY_AFTER = 1.0
#: A message that takes longer goes, where others wait for its place (seconds).
_TURN = 10.0
#: What is small and quick has places of its own, a quarter of all: health checks, models, reflection. These are …
_LARGE = ("/mmserve.v1.GenerationService/", "/mmserve.v1.MediaService/")
#: … the others, and a small message is late sooner (seconds).
_SMALL_TURN = 1.0


class Incoming(grpc.aio.ServerInterceptor):
    """Bounds what calls may send at once, and ends with a typed error those that are one too many, too slow where
    others wait, or no message."""

    def __init__(self, config: ServerConfig) -> None:
        places = config.receive_bytes // config.max_message_bytes
        self._small = Door(places // 4, _SMALL_TURN)
        self._large = Door(places - places // 4, _TURN)
        self._most = config.max_calls
        self._calls: Counter[str] = Counter()  # under way, by method: none can keep another's calls out

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's own handler, behind a look at what comes in."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        door = self._large if method.startswith(_LARGE) else self._small

        async def one(_: Any, context: Any) -> Any:
            async with self._counted(method, context):
                answer = handler.unary_unary or handler.unary_stream
                return await answer(await _only(door, context), context)  # in no variable: who is done with it frees it

        async def each(_: Any, context: Any) -> Any:
            async with self._counted(method, context):
                return await handler.stream_unary(_Messages(door, context), context)

        async def exchange(_: Any, context: Any) -> AsyncIterator[Any]:
            async with self._counted(method, context):
                async for response in handler.stream_stream(_Messages(door, context), context):
                    yield response

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        behaviour = one if not handler.request_streaming else exchange if handler.response_streaming else each
        return make(behaviour, _reader(handler.request_deserializer, method), handler.response_serializer)

    @asynccontextmanager
    async def _counted(self, method: str, context: Any) -> AsyncIterator[None]:
        """Around a call, whose errors of what comes in become its status; its handler sends the others itself."""
        try:
            if self._calls[method] >= self._most:
                raise ResourceExhausted(
                    f"{self._most} calls of {method} are under way, and server.max_calls allows no more; try later",
                    retry_after=_RETRY_AFTER,
                )
            self._calls[method] += 1
            try:
                yield
            finally:
                self._calls[method] -= 1
        except MMServeError as error:
            await abort(context, error)


class Door:
    """Lets ``places`` messages come in at once, the others in the order in which they asked; used on one event loop.

    Where others wait, a message may take ``turn`` seconds, or nearly twice that.
    """

    def __init__(self, places: int, turn: float) -> None:
        self._places = asyncio.Semaphore(places)
        self._turn = turn
        self._waiting = 0

    async def read(self, context: Any) -> Any:
        """The next message of the call of ``context``, or ``grpc.aio.EOF``; raises ``ResourceExhausted``.

        The message has its place until the caller first waits for something: it must be counted elsewhere by then.
        """
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        # A task of its own, which nobody cancels: gRPC would not free what comes for a read that is given up. It ends
        # with the call, and only then is there room for another.
        reading = asyncio.ensure_future(context.read())
        try:
            while not (await asyncio.wait({reading}, timeout=self._turn))[0]:
                if self._waiting:
                    raise ResourceExhausted(
                        f"the message did not come within {self._turn:g} seconds, and others wait to send theirs; try "
                        "again, and upload large media in chunks",
                        retry_after=_RETRY_AFTER,
                    )
        finally:
            reading.add_done_callback(self._free)
        return reading.result()

    def _free(self, reading: asyncio.Future[Any]) -> None:
        if not reading.cancelled():
            reading.exception()  # told already, or to nobody: the call has ended
        self._places.release()


async def _only(door: Door, context: Any) -> Any:
    async for message in _Messages(door, context):
        return message
    raise InvalidArgument.of("request", "must be one message: none came")


class _Messages:
    """The messages of a call; raises ``InvalidArgument`` for one that is none."""

    def __init__(self, door: Door, context: Any) -> None:
        self._door = door
        self._context = context

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        message = await self._door.read(self._context)
        if isinstance(message, InvalidArgument):
            raise message
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


def _reader(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """``parse``, but what is wrong is returned: raised in gRPC's own code, it would be logged as a bug."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return InvalidArgument.of("request", f"must be the protobuf message of {method}: it cannot be parsed")

    return read

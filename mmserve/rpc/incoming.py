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
from mmserve.observe.metrics import Metrics
from mmserve.rpc.status import abort

#: When a client may try again (seconds).
_RETRY_AFTER = 1.0
#: Methods with messages that may be large. One that takes longer than this goes, where others wait for its place
#: (seconds).
_LARGE = ("/mmserve.v1.GenerationService/", "/mmserve.v1.MediaService/")
_TURN = 10.0
#: The others (health checks, models, reflection) have a quarter of the places for themselves. Their messages come with
#: the call itself: who is here last has waited for nothing yet, and is done before a pile of calls that send nothing.
_SMALL_TURN = 0.1


class Incoming(grpc.aio.ServerInterceptor):
    """Bounds what calls may send at once, and ends with a typed error those that are one too many, too slow where
    others wait, or no message."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        places = config.receive_bytes // config.max_message_bytes
        self._small = Door(max(1, places // 4), _SMALL_TURN, newest_first=True)
        self._large = Door(max(1, places - places // 4), _TURN)
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
            self._metrics.refused(method, error.code)
            await abort(context, error)


class Door:
    """Lets ``places`` messages come in at once, the others in the order in which they asked, or the newest first; used
    on one event loop.

    Where others wait, a message may take ``turn`` seconds, or nearly twice that.
    """

    def __init__(self, places: int, turn: float, *, newest_first: bool = False) -> None:
        self._free = places
        self._turn = turn
        self._next = -1 if newest_first else 0
        self._waiting: list[asyncio.Future[None]] = []

    async def read(self, context: Any) -> Any:
        """The next message of the call of ``context``, or ``grpc.aio.EOF``; raises ``ResourceExhausted``.

        The message has its place until the caller first waits for something: it must be counted elsewhere by then.
        """
        await self._enter()
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
            reading.add_done_callback(self._leave)
        return reading.result()

    async def _enter(self) -> None:
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._waiting.remove(place)
            else:
                self._pass_on()
            raise

    def _leave(self, reading: asyncio.Future[Any]) -> None:
        if not reading.cancelled():
            reading.exception()  # told already, or to nobody: the call has ended
        self._pass_on()

    def _pass_on(self) -> None:
        alive = [place for place in self._waiting if not place.cancelled()]
        if not alive:
            self._free += 1
            return
        self._waiting.remove(alive[self._next])
        alive[self._next].set_result(None)


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

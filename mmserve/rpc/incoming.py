"""Receiving of messages: validation, limits of their cost, and early release of memory.

gRPC keeps the message of a unary call, with its media, until the call ends. So these calls are read here as streams of
requests, which are the same on the wire, so that the message belongs to its reader only. It arrives as bytes, whose
fields are counted before they are parsed (``rpc/wire.py``). No variable here keeps a message: its reader frees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mmserve.config import ServerConfig
from mmserve.errors import InvalidArgument, MMServeError
from mmserve.memory import trim_soon
from mmserve.rpc.arrivals import Arrivals
from mmserve.rpc.memory_budget import MemoryBudget
from mmserve.rpc.status import abort
from mmserve.rpc.turns import Turns
from mmserve.rpc.wire import Shape, check_fields, shape_of
from mmserve.v1 import cache_pb2, decision_pb2, generation_pb2, media_pb2, video_pb2

#: Size (bytes) above which messages are parsed off the event loop.
INLINE_BYTES = 1 << 20
#: Methods with messages of up to ``max_message_bytes``, and a description of these; messages of others only have names.
_LARGE = {
    "/mmserve.v1.GenerationService/Generate": shape_of(generation_pb2.GenerateRequest.DESCRIPTOR),
    "/mmserve.v1.DecisionService/Decide": shape_of(decision_pb2.DecideRequest.DESCRIPTOR),
    "/mmserve.v1.MediaService/UploadMedia": shape_of(media_pb2.UploadMediaRequest.DESCRIPTOR),
    "/mmserve.v1.VideoService/Session": shape_of(video_pb2.SessionRequest.DESCRIPTOR),
    "/mmserve.v1.CacheService/Warm": shape_of(cache_pb2.WarmRequest.DESCRIPTOR),
}
#: The refusal of a large message is delayed, so that a client that repeatedly sends such messages is limited to this
#: rate (bytes per second).
_REFUSED_RATE = 16 << 20
#: Maximum bytes of messages of other methods.
SMALL_BYTES = 64 << 10


class Incoming(grpc.aio.ServerInterceptor):
    """Passes messages on, and ends calls with a typed error if their message cannot be parsed, has too many fields, is
    too slow, or does not arrive.

    ``budget`` counts messages while they are parsed; ``refused`` is called with the code of each such error.
    """

    def __init__(
        self, config: ServerConfig, budget: MemoryBudget, refused: Callable[[str], None] = lambda code: None
    ) -> None:
        self._budget = budget
        self._refused = refused
        self._arrivals = Arrivals(max(1, budget.capacity // config.max_message_bytes), config.message_seconds)
        self._turns = Turns()
        # One thread: parsing holds the GIL, so that two would not be faster.
        self._parser = ThreadPoolExecutor(1, "mmserve-parse")

    def close(self) -> None:
        """Stop the parsing thread."""
        self._parser.shutdown(wait=False)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's handler, with checks of incoming messages."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        read = _reader(handler.request_deserializer, method)

        async def one(_: Any, context: Any) -> Any:
            answer = handler.unary_unary or handler.unary_stream
            try:
                return await answer(await self._only(read, method, context), context)  # not in a variable: see above
            except MMServeError as error:  # from ``_only``: handlers convert their own errors
                await abort(context, error)

        async def each(_: Any, context: Any) -> Any:
            return await handler.stream_unary(self._messages(read, method, context), context)

        async def exchange(_: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in handler.stream_stream(self._messages(read, method, context, idle=True), context):
                    yield response
            except MMServeError as error:
                await abort(context, error)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        behaviour = one if not handler.request_streaming else exchange if handler.response_streaming else each
        return make(behaviour, None, handler.response_serializer)

    async def _only(self, read: Callable[[bytes], Any], method: str, context: Any) -> Any:
        message = await self._read(read, method, self._first(method, context))
        if message is grpc.aio.EOF:
            self._refused(InvalidArgument.code)
            raise InvalidArgument.of("request", "must be one message: none came")
        return message

    async def _messages(
        self, read: Callable[[bytes], Any], method: str, context: Any, *, idle: bool = False
    ) -> AsyncIterator[Any]:
        """Yields the messages of a call, without keeping them; ``idle``: only the first has a time limit."""
        first = True
        while True:
            coming = self._next(method, context) if idle and not first else self._first(method, context)
            message = [await self._read(read, method, coming)]
            first = False
            if message[0] is grpc.aio.EOF:
                return
            yield message.pop()  # not kept while the reader has it

    async def _first(self, method: str, context: Any) -> Any:
        return await self._arrivals.read(lambda: self._next(method, context), context)

    async def _next(self, method: str, context: Any) -> Any:
        """The next message of a call; small messages need no turn."""
        return await (self._turns.take(context.read) if method in _LARGE else context.read())

    async def _read(self, read: Callable[[bytes], Any], method: str, coming: Awaitable[Any]) -> Any:
        try:
            return await self._parsed(read, method, [await coming])
        except asyncio.CancelledError:
            trim_soon()  # see below
            raise
        except MMServeError as error:
            self._refused(error.code)
            trim_soon()  # frees what the message became, with the call
            raise error.with_traceback(None) from None  # its frames hold the bytes

    async def _parsed(self, read: Callable[[bytes], Any], method: str, came: list[Any]) -> Any:
        """The parsed message of the bytes in ``came``, which are removed from the list; ``EOF`` is returned
        unchanged."""
        data = came.pop()
        if data is grpc.aio.EOF:
            return data
        if method not in _LARGE and len(data) > SMALL_BYTES:
            raise InvalidArgument.of("request", f"must be at most {SMALL_BYTES} bytes, not {len(data)}")
        if len(data) <= INLINE_BYTES:
            message = read(data)
        else:
            with self._budget.taken((), len(data)):
                message = await asyncio.get_running_loop().run_in_executor(self._parser, read, data)
            trim_soon()
        if isinstance(message, MMServeError):
            size = len(data)
            del data
            if size > INLINE_BYTES:
                await asyncio.sleep(size / _REFUSED_RATE)
            raise message
        return message


def _reader(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """``parse``, after counting fields; errors are returned, because their traceback would hold the bytes."""
    shape: Shape = _LARGE.get(method, {})

    def read(data: bytes) -> Any:
        try:
            check_fields(data, shape)
            return parse(data)
        except InvalidArgument as error:
            return error.with_traceback(None)
        except DecodeError:
            return InvalidArgument.of("request", f"must be the protobuf message of {method}: it cannot be parsed")

    return read

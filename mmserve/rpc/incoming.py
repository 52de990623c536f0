"""How messages come in: well-formed, of bounded work, and freed once they are read.

gRPC keeps the message of a call with one request until the call ends, media and all. So those calls are read here like
streams of requests, which on the wire they are, and the message belongs to who reads it alone. It comes as bytes; what
these would become is counted before they become it (``rpc/wire.py``). A message is kept in no variable here: who is
done with it frees it.
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

#: Larger messages are parsed off the event loop (bytes).
INLINE_BYTES = 1 << 20
#: Methods that take messages of up to ``max_message_bytes``, with what these are; all others carry names.
_LARGE = {
    "/mmserve.v1.GenerationService/Generate": shape_of(generation_pb2.GenerateRequest.DESCRIPTOR),
    "/mmserve.v1.DecisionService/Decide": shape_of(decision_pb2.DecideRequest.DESCRIPTOR),
    "/mmserve.v1.MediaService/UploadMedia": shape_of(media_pb2.UploadMediaRequest.DESCRIPTOR),
    "/mmserve.v1.VideoService/Session": shape_of(video_pb2.SessionRequest.DESCRIPTOR),
    "/mmserve.v1.CacheService/Warm": shape_of(cache_pb2.WarmRequest.DESCRIPTOR),
}
#: The refusal of a large message is sent late: a client that only ever sends such messages, one after another, is
#: received at this rate (bytes a second).
_REFUSED_RATE = 16 << 20
#: Most bytes of a message of the others.
SMALL_BYTES = 64 << 10


class Incoming(grpc.aio.ServerInterceptor):
    """Hands messages on, and ends with a typed error the calls whose message cannot be parsed, has too many fields, is
    too slow, or does not come.

    ``budget``: where messages count while they are parsed; ``refused`` is called with the code of each such error.
    """

    def __init__(
        self, config: ServerConfig, budget: MemoryBudget, refused: Callable[[str], None] = lambda code: None
    ) -> None:
        self._budget = budget
        self._refused = refused
        self._arrivals = Arrivals(max(1, budget.capacity // config.max_message_bytes), config.message_seconds)
        self._turns = Turns()
        # one thread: parsing holds the interpreter, so that two would not be faster
        self._parser = ThreadPoolExecutor(1, "mmserve-parse")

    def close(self) -> None:
        """End the thread that parses."""
        self._parser.shutdown(wait=False)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's own handler, after a check of what comes in."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        read = _reader(handler.request_deserializer, method)

        async def one(_: Any, context: Any) -> Any:
            answer = handler.unary_unary or handler.unary_stream
            try:
                return await answer(await self._only(read, method, context), context)  # in no variable: see above
            except MMServeError as error:  # of ``_only``: handlers end with their errors themselves
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
        """The messages of a call, each the caller's own; ``idle``: all but the first may take any time."""
        first = True
        while True:
            coming = self._next(method, context) if idle and not first else self._first(method, context)
            message = [await self._read(read, method, coming)]
            first = False
            if message[0] is grpc.aio.EOF:
                return
            yield message.pop()  # not kept here while its reader has it

    async def _first(self, method: str, context: Any) -> Any:
        return await self._arrivals.read(lambda: self._next(method, context), context)

    async def _next(self, method: str, context: Any) -> Any:
        """The next message of a call; what carries names only waits for no turn."""
        return await (self._turns.take(context.read) if method in _LARGE else context.read())

    async def _read(self, read: Callable[[bytes], Any], method: str, coming: Awaitable[Any]) -> Any:
        try:
            return await self._parsed(read, method, [await coming])
        except asyncio.CancelledError:
            trim_soon()  # as below
            raise
        except MMServeError as error:
            self._refused(error.code)
            trim_soon()  # what the message became is freed with the call
            raise error.with_traceback(None) from None  # whose frames hold the bytes, until a collection of cycles

    async def _parsed(self, read: Callable[[bytes], Any], method: str, came: list[Any]) -> Any:
        """The message of the bytes in ``came``, which are taken out of it, or ``EOF`` as it is."""
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
    """``parse``, after a count of the fields; what is wrong is returned, for its traceback would hold the bytes."""
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

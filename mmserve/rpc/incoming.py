"""How messages come in: well-formed, and nobody's any more once they are read.

gRPC keeps the message of a call with one request until the call ends, media and all. So those calls are read here like
streams of requests, which on the wire they are, and the message belongs to who reads it alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mmserve.errors import InvalidArgument
from mmserve.rpc.status import abort


class Incoming(grpc.aio.ServerInterceptor):
    """Hands messages on, and ends calls whose message cannot be parsed, or does not come, with INVALID_ARGUMENT."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's own handler, behind a look at what comes in; reflection's, which answers a stream, as it is."""
        handler = await continuation(handler_call_details)
        if handler is None or (handler.request_streaming and handler.response_streaming):
            return handler

        async def one(_: Any, context: Any) -> Any:
            answer = handler.unary_unary or handler.unary_stream
            try:
                return await answer(await _only(context), context)  # in no variable: who is done with it frees it
            except InvalidArgument as error:  # of ``_only``: handlers end with their errors themselves
                await abort(context, error)

        async def each(_: Any, context: Any) -> Any:
            return await handler.stream_unary(_messages(context), context)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        read = _reader(handler.request_deserializer, handler_call_details.method)
        return make(each if handler.request_streaming else one, read, handler.response_serializer)


async def _next(context: Any) -> Any:
    """The next message of a call, or ``EOF``; raises ``InvalidArgument`` for one that is none."""
    message = await context.read()
    if isinstance(message, InvalidArgument):
        raise message
    return message


async def _only(context: Any) -> Any:
    message = await _next(context)
    if message is grpc.aio.EOF:
        raise InvalidArgument.of("request", "must be one message: none came")
    return message


async def _messages(context: Any) -> AsyncIterator[Any]:
    while True:
        read = [await _next(context)]
        if read[0] is grpc.aio.EOF:
            return
        yield read.pop()  # not kept here while its reader has it


def _reader(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """``parse``, but what is wrong is returned: raised in gRPC's own code, it would be logged as a bug."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return InvalidArgument.of("request", f"must be the protobuf message of {method}: it cannot be parsed")

    return read

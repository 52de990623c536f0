"""Bytes that are no message: refused like any other wrong request, where gRPC would say UNKNOWN and log a bug."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mmserve.errors import InvalidArgument
from mmserve.rpc.status import abort


class WellFormed(grpc.aio.ServerInterceptor):
    """Ends calls whose request cannot be parsed with INVALID_ARGUMENT.

    For methods with one request, and with one response to a stream of them; others (reflection) are left as they are.
    """

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's own handler, behind a look at what comes in."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        read = _reader(handler.request_deserializer, handler_call_details.method)
        if handler.stream_unary is not None:
            return handler._replace(request_deserializer=read, stream_unary=_each_checked(handler.stream_unary))
        for kind in ("unary_unary", "unary_stream"):
            if (answer := getattr(handler, kind)) is not None:
                return handler._replace(request_deserializer=read, **{kind: _checked(answer)})
        return handler


def _reader(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """``parse``, but what is wrong is returned: raised here, nobody could catch it."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return InvalidArgument.of("request", f"must be the protobuf message of {method}: it cannot be parsed")

    return read


def _checked(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def checked(request: Any, context: Any) -> Any:
        if isinstance(request, InvalidArgument):
            await abort(context, request)
        return await answer(request, context)

    return checked


def _each_checked(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def checked(requests: AsyncIterator[Any], context: Any) -> Any:
        return await answer(_good(requests), context)

    return checked


async def _good(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests; the one that is none is raised, for the handler to end with as with any error."""
    async for request in requests:
        if isinstance(request, InvalidArgument):
            raise request
        yield request

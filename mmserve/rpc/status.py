"""Conversion of errors to the status of a server's call."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar, cast

import grpc

from mmserve.errors import Internal, MMServeError
from mmserve.wire.status import DETAILS_KEY, to_status

logger = logging.getLogger("mmserve.rpc")
_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])

#: Maximum time (seconds) that a handler waits for its status to be sent.
UNREAD_SECONDS = 2.0
#: Seconds by which a call's deadline may be later here than at its client, which started its clock when it sent the
#: call: the client's own cancellation arrives before the deadline here.
DEADLINE_SLACK = 0.25


async def abort(context: Any, error: MMServeError) -> NoReturn:
    """End the call of ``context`` with the status of ``error``; always raises.

    A client that does not read blocks its call's status. After a short time, sending it is left to gRPC, so that
    neither the handler nor its request waits for the client.
    """
    status = to_status(error)
    code = next(c for c in grpc.StatusCode if c.value[0] == status.code)
    try:
        async with asyncio.timeout(UNREAD_SECONDS):
            await context.abort(code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
    except TimeoutError:
        raise asyncio.CancelledError from None
    raise AssertionError("unreachable: abort raises")


@asynccontextmanager
async def errors_to_status(context: Any, method: str) -> AsyncIterator[None]:
    """Context for the body of every handler: a typed error becomes its status, any other INTERNAL with a logged id."""
    try:
        yield
    except MMServeError as error:
        if type(error) is MMServeError:
            await abort(context, Internal.logged(error, method, logger))
        await abort(context, error)
    except Exception as error:  # boundary: logged with its traceback, sent as INTERNAL
        if context.cancelled() or isinstance(error, grpc.aio.InternalError):  # the latter: gRPC knows first
            logger.debug("%s ended after its client had gone: %r", method, error)
            raise asyncio.CancelledError from error
        await abort(context, Internal.logged(error, method, logger))


def handler(method: _Method) -> _Method:
    """Decorator of a unary method of a service: its errors become the status of its call."""

    @functools.wraps(method)
    async def handle(service: Any, message: Any, context: Any) -> Any:
        async with errors_to_status(context, method.__name__):
            return await method(service, message, context)
        raise AssertionError("unreachable: an error ends the call")

    return cast(_Method, handle)

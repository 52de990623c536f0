"""Bearer tokens: every call but a health check must carry one that the server accepts."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from mmserve.errors import Unauthenticated
from mmserve.rpc.status import abort

_OPEN = "/grpc.health.v1.Health/"
_SCHEME = "bearer "


class BearerAuth(grpc.aio.ServerInterceptor):
    """Ends calls without an accepted ``authorization: Bearer …`` with UNAUTHENTICATED, before any byte is read."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's own handler, or one that refuses."""
        if handler_call_details.method.startswith(_OPEN) or self._accepts(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)  # on the wire, all four kinds of call are this one

    def _accepts(self, metadata: Any) -> bool:
        given = next((value for key, value in metadata or () if key == "authorization"), "")
        if not isinstance(given, str) or not given.lower().startswith(_SCHEME):
            return False
        digest = _digest(given[len(_SCHEME) :])
        return sum(hmac.compare_digest(digest, accepted) for accepted in self._digests) > 0  # no early exit


async def _refuse(_: Any, context: Any) -> None:
    await abort(context, Unauthenticated("this server needs an accepted bearer token in the authorization metadata"))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", errors="surrogateescape")).digest()

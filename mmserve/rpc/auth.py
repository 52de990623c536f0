"""Bearer tokens: every call except for health checks must have an accepted token, which identifies its tenant."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc

from mmserve.core.tenant import ANONYMOUS, Tenant
from mmserve.errors import PermissionDenied, Unauthenticated
from mmserve.observe import calls
from mmserve.rpc.status import abort
from mmserve.tenants import Accepted, is_plain, token_digest

logger = logging.getLogger("mmserve.rpc")

_WHY = "this server needs an accepted bearer token in the authorization metadata"
_OPEN = "/grpc.health.v1.Health/"
_SCHEME = "bearer "
#: Minimum interval (seconds) of log lines about refused calls, and maximum characters of a method's name in them.
_LOG_SECONDS = 10.0
_LOG_CHARACTERS = 100

_current: ContextVar[Tenant] = ContextVar("tenant", default=ANONYMOUS)


def current_tenant() -> Tenant:
    """The tenant of the current call; ``ANONYMOUS`` if the server has no tokens."""
    return _current.get()


def check_admin(what: str, tenant: Tenant | None = None) -> None:
    """Raises ``PermissionDenied`` if ``tenant`` (default: the call's) is not an admin and may not do ``what``."""
    tenant = tenant or current_tenant()
    if not tenant.admin:
        how = "it needs admin = true in [[tenants]]"
        if is_plain(tenant.name):
            how += ", which a token of [server] auth_tokens has not: add an entry with token_file or token_env"
        raise PermissionDenied(f"the tenant {tenant.name!r} may not {what}: {how}")


class BearerAuth(grpc.aio.ServerInterceptor):
    """Determines the tenant of each call by its ``authorization: Bearer …``.

    A call without an accepted token ends with UNAUTHENTICATED before any byte is read; ``refused`` is called with
    "missing" or "unknown". If ``accepted`` is empty, no token is required.
    """

    def __init__(self, accepted: Sequence[Accepted], refused: Callable[[str], None] = lambda _reason: None) -> None:
        self._accepted = tuple(accepted)
        self._refused = refused
        self._unlogged = 0  # refused calls since the last log line
        self._logged = -_LOG_SECONDS  # time of the last log line, on the monotonic clock (seconds)

    @property
    def guards(self) -> bool:
        """Whether a token is required."""
        return bool(self._accepted)

    def replace(self, accepted: Sequence[Accepted]) -> None:
        """Replace the accepted tokens; calls in progress continue."""
        self._accepted = tuple(accepted)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's handler, or one that refuses the call."""
        method = handler_call_details.method
        if not self._accepted or method.startswith(_OPEN):
            return await continuation(handler_call_details)
        token = _token(handler_call_details.invocation_metadata)
        tenant = None if token is None else self._tenant(token)
        if tenant is not None:
            _current.set(tenant)  # the handler runs in the same task, which belongs to this call
            calls.current().tenant = tenant.name
            return await continuation(handler_call_details)

        async def refuse(_: Any, context: Any) -> None:
            await abort(context, self._refusal(token, method, context.peer()))

        return grpc.stream_stream_rpc_method_handler(refuse)  # all four kinds of calls are the same on the wire

    def tenant_of(self, token: str | None, what: str, peer: str) -> Tenant:
        """The tenant of a call to ``what`` with ``token``; raises ``Unauthenticated``, which is counted and logged.

        ``ANONYMOUS`` if no token is required.
        """
        if not self._accepted:
            return ANONYMOUS
        tenant = None if token is None else self._tenant(token)
        if tenant is None:
            raise self._refusal(token, what, peer)
        return tenant

    def _refusal(self, token: str | None, what: str, peer: str) -> Unauthenticated:
        reason = "missing" if token is None else "unknown"
        self._refused(reason)
        self._log(f"{reason} token, {what[:_LOG_CHARACTERS]!r} from {peer}")
        return Unauthenticated(_WHY)

    def _tenant(self, token: str) -> Tenant | None:
        """Compares every digest completely, in constant time."""
        digest, found = token_digest(token), None
        for accepted in self._accepted:
            if hmac.compare_digest(digest, accepted.digest):
                found = accepted.tenant
        return found

    def _log(self, last: str) -> None:
        """Write at most one line per ``_LOG_SECONDS``, so that clients cannot flood the log."""
        self._unlogged += 1
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            logger.warning("refused %d calls without an accepted token; the last: %s", self._unlogged, last)
            self._unlogged, self._logged = 0, now


def _token(metadata: Any) -> str | None:
    """The bearer token in a call's metadata; None if there is none."""
    given = next((value for key, value in metadata or () if key == "authorization"), "")
    if not isinstance(given, str) or not given.lower().startswith(_SCHEME):
        return None
    return given[len(_SCHEME) :]

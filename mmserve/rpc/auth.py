"""Bearer tokens: every call but a health check must carry one that the server accepts, and is its tenant's."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc

from mmserve.core.tenant import ANONYMOUS, Tenant
from mmserve.errors import Unauthenticated
from mmserve.observe import calls
from mmserve.rpc.status import abort
from mmserve.tenants import Accepted, is_plain, token_digest

logger = logging.getLogger("mmserve.rpc")

_WHY = "this server needs an accepted bearer token in the authorization metadata"
_OPEN = "/grpc.health.v1.Health/"
_SCHEME = "bearer "
#: Seconds between two lines of the log about refused calls, and characters of a method's name in them.
_LOG_SECONDS = 10.0
_LOG_CHARACTERS = 100

_current: ContextVar[Tenant] = ContextVar("tenant", default=ANONYMOUS)


def current_tenant() -> Tenant:
    """Whose call is being answered; ``ANONYMOUS`` where the server asks for no token."""
    return _current.get()


def check_admin(what: str, tenant: Tenant | None = None) -> None:
    """Raise ``Unauthenticated`` where ``tenant``, by default the call's, may not do ``what``."""
    tenant = tenant or current_tenant()
    if not tenant.admin:
        how = "it needs admin = true in [[tenants]]"
        if is_plain(tenant.name):
            how += ", which a token of [server] auth_tokens has not: add an entry with token_file or token_env"
        raise Unauthenticated(f"the tenant {tenant.name!r} may not {what}: {how}")


class BearerAuth(grpc.aio.ServerInterceptor):
    """Finds the tenant of each call by its ``authorization: Bearer …``.

    A call without an accepted token ends with UNAUTHENTICATED before any byte is read; ``refused`` is then called with
    "missing" or "unknown". Without ``accepted`` tokens, none is asked for.
    """

    def __init__(self, accepted: Sequence[Accepted], refused: Callable[[str], None] = lambda _reason: None) -> None:
        self._accepted = tuple(accepted)
        self._refused = refused
        self._unlogged = 0  # refused calls since the last line of the log
        self._logged = -_LOG_SECONDS  # when that was, on the monotonic clock (seconds)

    @property
    def guards(self) -> bool:
        """Whether a token is asked for."""
        return bool(self._accepted)

    def replace(self, accepted: Sequence[Accepted]) -> None:
        """Accept these tokens from now on; calls in progress go on."""
        self._accepted = tuple(accepted)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's own handler, or one that refuses."""
        method = handler_call_details.method
        if not self._accepted or method.startswith(_OPEN):
            return await continuation(handler_call_details)
        token = _token(handler_call_details.invocation_metadata)
        tenant = None if token is None else self._tenant(token)
        if tenant is not None:
            _current.set(tenant)  # the handler runs in the same task, which is this call's alone
            calls.current().tenant = tenant.name
            return await continuation(handler_call_details)

        async def refuse(_: Any, context: Any) -> None:
            await abort(context, self._refusal(token, method, context.peer()))

        return grpc.stream_stream_rpc_method_handler(refuse)  # on the wire, all four kinds of call are this one

    def tenant_of(self, token: str | None, what: str, peer: str) -> Tenant:
        """The tenant of a call to ``what`` with ``token``; raises ``Unauthenticated``, counted and logged.

        ``ANONYMOUS`` where no token is asked for.
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
        """Every digest is compared in full: how long it takes is the same for any token."""
        digest, found = token_digest(token), None
        for accepted in self._accepted:
            if hmac.compare_digest(digest, accepted.digest):
                found = accepted.tenant
        return found

    def _log(self, last: str) -> None:
        """At most one line in ``_LOG_SECONDS``: who sends many such calls cannot fill the log."""
        self._unlogged += 1
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            logger.warning("refused %d calls without an accepted token; the last: %s", self._unlogged, last)
            self._unlogged, self._logged = 0, now


def _token(metadata: Any) -> str | None:
    """The bearer token in a call's metadata, if there is one."""
    given = next((value for key, value in metadata or () if key == "authorization"), "")
    if not isinstance(given, str) or not given.lower().startswith(_SCHEME):
        return None
    return given[len(_SCHEME) :]

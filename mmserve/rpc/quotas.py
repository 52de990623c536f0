"""Rate and concurrency limits of tenants, enforced before anything of a call is read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from mmserve.core.tenant import Tenant
from mmserve.errors import ResourceExhausted
from mmserve.rpc.auth import current_tenant
from mmserve.rpc.status import abort

#: The methods that are limited: those that use compute or memory.
LIMITED = (
    "/mmserve.v1.GenerationService/Generate",
    "/mmserve.v1.DecisionService/Decide",
    "/mmserve.v1.MediaService/UploadMedia",
    "/mmserve.v1.CacheService/Warm",
    "/mmserve.v1.CacheService/ListEntries",
)
#: Retry delay (seconds) for a tenant with too many requests in progress.
_RETRY_AFTER = 1.0


@dataclass
class _Bucket:
    """A token bucket: it contained ``left`` requests at time ``at`` (monotonic clock, seconds)."""

    left: float
    at: float


class Quotas(grpc.aio.ServerInterceptor):
    """Refuses calls beyond a tenant's rate or concurrency with RESOURCE_EXHAUSTED; used on one event loop.

    ``limited`` is called with the tenant's name and "rate" or "concurrency".
    """

    def __init__(self, limited: Callable[[str, str], None] = lambda _tenant, _limit: None) -> None:
        self._limited = limited
        self._buckets: dict[str, _Bucket] = {}
        self._active: Counter[str] = Counter()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's handler, limited by the quotas of the call's tenant."""
        handler = await continuation(handler_call_details)
        tenant = current_tenant()
        if handler is None or not (tenant.rate or tenant.concurrency) or handler_call_details.method not in LIMITED:
            return handler
        answer = handler.stream_stream or handler.stream_unary

        async def within(messages: Any, context: Any) -> Any:
            try:
                held = self.taken(tenant)
                with held:
                    return await answer(messages, context)
            except ResourceExhausted as error:  # from ``taken``: handlers convert their own errors
                await abort(context, error)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(within, handler.request_deserializer, handler.response_serializer)

    def most(self, tenant: Tenant) -> int | None:
        """Maximum requests of ``tenant`` that can begin together if none is in progress; None = unlimited."""
        limits = [limit for limit in (tenant.concurrency, tenant.burst if tenant.rate else 0) if limit]
        return min(limits, default=None)

    @contextmanager
    def taken(self, tenant: Tenant, requests: int = 1) -> Iterator[None]:
        """Context that counts ``requests`` of ``tenant`` as in progress, all of them or none.

        Raises ``ResourceExhausted`` if a limit is exceeded.
        """
        name = tenant.name
        if tenant.concurrency and self._active[name] + requests > tenant.concurrency:
            self._limited(name, "concurrency")
            raise ResourceExhausted(
                f"the tenant {name!r} has {self._active[name]} requests in progress, and its concurrency is "
                f"{tenant.concurrency}; wait for one of them to end",
                retry_after=_RETRY_AFTER,
            )
        if tenant.rate and (seconds := self._wait(tenant, requests, time.monotonic())) > 0:
            self._limited(name, "rate")
            raise ResourceExhausted(
                f"the tenant {name!r} sends more than its rate of {tenant.rate:g} requests a second; try again in "
                f"{seconds:.3g} s",
                retry_after=seconds,
            )
        self._active[name] += requests
        try:
            yield
        finally:
            self._active[name] -= requests

    def _wait(self, tenant: Tenant, requests: int, now: float) -> float:
        """Take ``requests`` from the bucket of ``tenant``. Returns 0, or the seconds until the bucket has enough."""
        bucket = self._buckets.setdefault(tenant.name, _Bucket(tenant.burst, now))
        bucket.left = min(tenant.burst, bucket.left + (now - bucket.at) * tenant.rate)
        bucket.at = now
        if bucket.left < requests:
            return (requests - bucket.left) / tenant.rate
        bucket.left -= requests
        return 0.0

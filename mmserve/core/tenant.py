"""Tenants and their limits: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One caller of the server, identified by its token; a server without tokens has one tenant, ``ANONYMOUS``.

    ``share``: its weight in fair queueing, above 0. ``priority``: its class; lower is served first. ``cache``: its
    cache partition; tenants with the same partition can use each other's uploads. ``rate``: requests per second;
    ``burst``: size of the token bucket; ``concurrency``: requests in progress; 0 = no limit. ``admin``: whether it may
    load and drop adapters, manage the caches of all tenants, and read metrics.
    """

    name: str = ""
    share: float = 1.0
    priority: int = 0
    cache: str = ""
    rate: float = 0.0
    burst: int = 1
    concurrency: int = 0
    admin: bool = False


#: The tenant of all requests if the server has no tokens.
ANONYMOUS = Tenant(admin=True)

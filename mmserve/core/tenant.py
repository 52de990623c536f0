"""Who a request is from, and what that tenant may use: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One caller of the server, known by its token; a server without tokens has one tenant, ``ANONYMOUS``.

    ``share``: its weight in fair queueing, above 0. ``priority``: its class, 0 is served first. ``cache``: the part of
    the caches that it uses; tenants with the same name here can use what the others uploaded. ``rate``: requests a
    second, ``burst`` of them at once, and ``concurrency``: requests in progress at once; 0 = no limit.
    ``admin``: whether it may load and drop adapters, manage the caches of all tenants, and read metrics.
    """

    name: str = ""
    share: float = 1.0
    priority: int = 0
    cache: str = ""
    rate: float = 0.0
    burst: int = 1
    concurrency: int = 0
    admin: bool = False


#: Everybody, where the server asks for no token.
ANONYMOUS = Tenant(admin=True)

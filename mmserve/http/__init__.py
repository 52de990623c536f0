"""The HTTP front end: the APIs of OpenAI and others, with the engines, tenants and limits of gRPC (extra
``mmserve[http]``)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mmserve.errors import ConfigError

if TYPE_CHECKING:
    from mmserve.http.front import HttpFront
    from mmserve.rpc.server import Server


def require_packages() -> None:
    """Raises ``ConfigError`` if packages of the extra are missing; imports nothing."""
    for name in ("starlette", "uvicorn"):
        if find_spec(name) is None:
            raise ConfigError(f"[server] http_port needs the package {name!r}: run pip install 'mmserve[http]'")


def attach(server: Server) -> HttpFront | None:
    """Add HTTP to ``server``, which has not started, if its configuration has an ``http_port``; else returns None.

    Raises ``ConfigError`` if packages of the extra are missing.
    """
    if not server.config.server.http_port:
        return None
    require_packages()
    from mmserve.http.front import HttpFront

    front = HttpFront(server)
    server.attach(front)
    return front

"""Stages on the workers of a Ray cluster: placement, routing, recovery and role switching."""

from __future__ import annotations

from importlib.util import find_spec

from mmserve.errors import ConfigError


def require_ray() -> None:
    """Raises ``ConfigError`` if Ray is not installed; imports nothing."""
    if find_spec("ray") is None:
        raise ConfigError("stages on a cluster need Ray: pip install 'mmserve[ray]'")

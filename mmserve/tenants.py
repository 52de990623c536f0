"""Tenants of a configuration: their settings, and the tokens that identify them.

Tokens are read from files and environment variables, and only their SHA-256 digests are stored. Error messages never
contain a token or a part of one.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmserve.core.tenant import Tenant
from mmserve.core.values import ABOVE_0, at_least, value
from mmserve.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Characters allowed in gRPC metadata and HTTP headers.
_ACCEPTED = "printable ASCII without spaces at the ends"
#: Maximum bytes of a token file: a larger file is not a list of tokens.
_FILE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TenantConfig:
    """One entry of ``[[tenants]]``: its name, its tokens, and its limits."""

    name: str = value("", meaning="letters, digits, '.', '_' and '-'; in logs and metrics")
    token_file: str = value(
        "", meaning="file with one token a line, all accepted: list the old and the new one while clients switch"
    )
    token_env: str = value("", meaning="environment variable that holds the token")
    rate: float = value(0.0, at_least(0, meaning="no limit"), "requests a second that are accepted")
    burst: int = value(0, at_least(0), "requests that can arrive at once within the rate; 0 = those of one second")
    concurrency: int = value(0, at_least(0, meaning="no limit"), "concurrent requests, waiting or running")
    priority: int = value(
        0,
        at_least(0),
        "class; 0 is served first, and a request moves up by one class for every 10 seconds that it waits",
    )
    share: float = value(1.0, ABOVE_0, "weight among the tenants of a class that have requests waiting")
    admin: bool = value(
        False,
        meaning="may load and unload models and adapters, list, pin and drop cache entries of all tenants, and read "
        "metrics on the HTTP port",
    )
    shared_cache: bool = value(False, meaning="share uploads and caches with all other tenants that set this")


@dataclass(frozen=True)
class Accepted:
    """An accepted token, by its SHA-256 digest, and its tenant."""

    digest: bytes
    tenant: Tenant


def token_digest(token: str) -> bytes:
    """The SHA-256 digest by which ``token`` is stored and compared."""
    return hashlib.sha256(token.encode("utf-8", errors="surrogateescape")).digest()


def accepted_tokens(
    tenants: Sequence[TenantConfig], auth_tokens: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[Accepted, ...]:
    """All tokens accepted by a server; empty if it requires none.

    Each of ``auth_tokens`` is a separate tenant, ``token-1`` and so on, with the default settings. Raises
    ``ConfigError`` if a token cannot be read, or two tenants have the same.
    """
    found: dict[bytes, Tenant] = {}
    for index, token in enumerate(dict.fromkeys(auth_tokens), 1):
        found[token_digest(token)] = _tenant(TenantConfig(name=f"token-{index}"))
    for config in tenants:
        tenant = _tenant(config)
        for token in _tokens(config, environment):
            other = found.setdefault(token_digest(token), tenant)
            if other.name != tenant.name:
                raise ConfigError(f"the tenants {other.name!r} and {tenant.name!r} have the same token")
    return tuple(Accepted(digest, tenant) for digest, tenant in found.items())


def check_tenants(tenants: Sequence[TenantConfig], source: str) -> None:
    """Raise ``ConfigError`` if an entry of ``[[tenants]]`` is invalid."""
    names: set[str] = set()
    for index, tenant in enumerate(tenants):
        where = f"{source}: [[tenants]] {index}"
        if not _NAME.fullmatch(tenant.name):
            raise ConfigError(
                f"{where} name must be 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first, not "
                f"{tenant.name!r}"
            )
        if tenant.name in names or is_plain(tenant.name):
            taken = "an entry above has it" if tenant.name in names else "entries of auth_tokens are called so"
            raise ConfigError(f"{where} name must be another than {tenant.name!r}: {taken}")
        names.add(tenant.name)
        if bool(tenant.token_file) == bool(tenant.token_env):
            raise ConfigError(f"{where} ({tenant.name}) needs either token_file or token_env")


def is_plain(tenant: str) -> bool:
    """Whether a tenant of this name comes from ``auth_tokens``."""
    return re.fullmatch(r"token-\d+", tenant) is not None


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address, reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_token(text: str) -> bool:
    """Whether ``text`` is a valid bearer token: only characters allowed in metadata."""
    return bool(text) and text.isascii() and text.isprintable()


def _tenant(config: TenantConfig) -> Tenant:
    return Tenant(
        name=config.name,
        share=config.share,
        priority=config.priority,
        cache="" if config.shared_cache else config.name,
        rate=config.rate,
        burst=config.burst or max(1, math.ceil(config.rate)),
        concurrency=config.concurrency,
        admin=config.admin,
    )


def _tokens(config: TenantConfig, environment: Mapping[str, str]) -> Iterator[str]:
    who = f"the tenant {config.name!r}"
    if config.token_env:
        tokens = [environment.get(config.token_env, "").strip()]
        where = f"the environment variable {config.token_env}, which token_env of {who} names,"
    else:
        tokens = [line.strip() for line in _text(config.token_file, who).splitlines() if line.strip()]
        where = f"the file {config.token_file}, which token_file of {who} names,"
    if not any(tokens):
        raise ConfigError(f"{where} holds no token")
    if not all(map(is_token, tokens)):
        raise ConfigError(f"{where} holds a token that is not {_ACCEPTED}")
    yield from tokens


def _text(path: str, who: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}, which token_file of {who} names: {error.strerror}") from error
    if len(data) > _FILE_BYTES:
        raise ConfigError(f"{path}, which token_file of {who} names, is larger than {_FILE_BYTES} bytes")
    return data.decode("utf-8", errors="replace")  # an error then names the file, not its contents

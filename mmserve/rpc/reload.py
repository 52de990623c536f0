"""What of a running server follows its configuration: tokens and tenants, and certificates."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from mmserve.config import Config
from mmserve.errors import ConfigError
from mmserve.observe.endpoint import Endpoint
from mmserve.rpc.auth import BearerAuth
from mmserve.rpc.certificates import Certificates
from mmserve.tenants import accepted_tokens

logger = logging.getLogger("mmserve.rpc")

#: Keys of [server] that are followed; a change of any other needs a restart, and so does any of these tables.
_FOLLOWED = ("auth_tokens", "allow_plaintext_tokens", "tls_certificate", "tls_key", "tls_client_ca")
_FIXED = ("engine", "media", "encoder_cache", "schedulers")


class Guard:
    """Who may call the server, and with which certificate it answers."""

    def __init__(self, config: Config, refused: Callable[[str], None]) -> None:
        self.auth = BearerAuth(accepted_tokens(config.tenants, config.server.auth_tokens), refused)
        self.certificates = Certificates(config.server) if config.server.tls_key else None
        self.endpoint: Endpoint | None = None  # of metrics, once it is there

    def read(self, config: Config) -> Callable[[], None]:
        """Read the tokens and certificates that ``config`` names now; what is returned puts them into use.

        May be called from any thread; the result, on the server's event loop. Open connections and calls under way go
        on. Raises ``ConfigError`` where something cannot be used: then everything stays as it was.
        """
        accepted = accepted_tokens(config.tenants, config.server.auth_tokens)
        if self.auth.guards and not accepted:
            raise ConfigError("the new configuration asks for no token: to open the server to everybody, restart it")
        if bool(config.server.tls_key) != (self.certificates is not None):
            raise ConfigError("[server] tls_key can be set or removed only by a restart")
        use = None if self.certificates is None else self.certificates.read(config.server)

        def apply() -> None:
            self.auth.replace(accepted)
            if use is not None:
                use()
            if self.endpoint is not None:
                self.endpoint.follow(config.server)

        return apply


def unfollowed(old: Config, new: Config) -> list[str]:
    """What differs between two configurations that a running server cannot follow: tables, and keys of [server]."""
    keys = [f.name for f in dataclasses.fields(old.server) if f.name not in _FOLLOWED]
    changed = [f"[server] {key}" for key in keys if getattr(old.server, key) != getattr(new.server, key)]
    return changed + [f"[{table}]" for table in _FIXED if getattr(old, table) != getattr(new, table)]

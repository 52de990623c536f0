"""Parsing of a server's address."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from mmserve.errors import ConfigError

#: Environment variables with the default address and token.
SERVER_VARIABLE = "MMSERVE_SERVER"
TOKEN_VARIABLE = "MMSERVE_TOKEN"
_DEFAULT = "localhost:50051"

#: Schemes of this client, and whether they imply TLS.
_SCHEMES = {"grpc": False, "grpcs": True}
#: Schemes that gRPC resolves itself; passed on unchanged.
_NAMING = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/@\[\]]+)):(?P<port>[0-9]+)")
_ACCEPTED = "HOST:PORT, grpc://HOST:PORT (not encrypted) or grpcs://HOST:PORT (TLS)"


@dataclass(frozen=True)
class Address:
    """``target``: for gRPC; ``host`` and ``port``: if it contains them; ``tls``: whether its scheme is grpcs."""

    target: str
    host: str | None = None
    port: int = 0
    tls: bool | None = None

    @property
    def local(self) -> bool:
        """Whether the connection stays on this machine."""
        if self.host is None:
            return self.target.startswith("unix")
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(given: str | None) -> Address:
    """The address ``given``; default ``MMSERVE_SERVER``, else localhost:50051.

    Raises ``ConfigError`` for an unsupported form.
    """
    text = given if given is not None else os.environ.get(SERVER_VARIABLE) or _DEFAULT
    if text.startswith(_NAMING):
        return Address(text)
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    elif scheme not in _SCHEMES:
        better = {"http": "; for http use grpc", "https": "; for https use grpcs"}.get(scheme, "")
        raise ConfigError(f"the address {text!r} has the scheme {scheme!r}; accepted are {_ACCEPTED}{better}")
    found = _HOST_PORT.fullmatch(rest.removesuffix("/") if scheme else rest)
    if found is None:
        missing = " has no port" if re.fullmatch(r"[^\s:/@]+", rest) else " is not of the form HOST:PORT"
        raise ConfigError(f"the address {text!r}{missing}; accepted are {_ACCEPTED}")
    port = int(found["port"])
    if not 1 <= port <= 65535:
        raise ConfigError(f"the address {text!r} has the port {port}, which is not in 1 to 65535")
    host = found["v6"] or found["host"]
    return Address(found[0], host, port, _SCHEMES.get(scheme))

"""``[media] url_hosts``: the hosts from which files are downloaded, and which of their addresses are allowed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Self

_NAME = re.compile(
    r"(?=.{1,253}\Z)(?:\*\.)?(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
)
_ENTRY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]/@]+))(?::(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = (80, 443)
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class MediaHost:
    """An entry: a name, ``*.`` followed by a domain for all its subdomains, or an address; ``port`` 0 = 80 and 443."""

    host: str
    port: int
    address: IPv4Address | IPv6Address | None = None

    @classmethod
    def of(cls, entry: str) -> Self:
        """The entry in the configuration's syntax, ``HOST`` or ``HOST:PORT``; raises ``ValueError``."""
        found = _ENTRY.fullmatch(entry)
        port = int(found["port"] or 0) if found else 0
        if found is None or port > 65535 or found["port"] == "0":
            raise ValueError(f"{entry!r} is not a host")
        if found["v6"]:
            return cls(found["v6"], port, IPv6Address(found["v6"]))
        host = found["host"].lower().rstrip(".")
        if re.fullmatch(r"[0-9.]+", host):
            return cls(host, port, IPv4Address(host))
        if not _NAME.fullmatch(host):
            raise ValueError(f"{entry!r} is not a host")
        return cls(host, port)

    def names(self, host: str, port: int) -> bool:
        """Whether ``host`` (lower case, as in a URL) at ``port`` matches this entry."""
        if not self._at(port):
            return False
        if self.address is not None:
            return host == str(self.address)
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host

    def reaches(self, address: IPv4Address | IPv6Address, port: int) -> bool:
        """Whether this entry is the ``address``, at ``port``."""
        return self.address == address and self._at(port)

    def _at(self, port: int) -> bool:
        return port == self.port if self.port else port in _DEFAULT_PORTS


class MediaHosts:
    """All entries."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = [MediaHost.of(entry) for entry in entries]

    def __bool__(self) -> bool:
        return bool(self._entries)

    def listed(self, host: str, port: int) -> bool:
        """Whether files may be downloaded from ``host`` (lower case; IPv6 without brackets) at ``port``."""
        return any(entry.names(host, port) for entry in self._entries)

    def reachable(self, address: str, port: int) -> bool:
        """Whether connecting to ``address`` of a listed host is allowed: it is public, or is listed itself."""
        found = ip_address(address.partition("%")[0])
        return is_public(found) or any(entry.reaches(found, port) for entry in self._entries)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether ``address`` is a public unicast address.

    False for IPv6 addresses that embed an IPv4 address, such as those of 6to4 and Teredo. For NAT64 (RFC 6052), the
    embedded address decides.
    """
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped or address.sixtofour or address.teredo or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def are_hosts(entries: Sequence[str]) -> bool:
    """Whether all ``entries`` are valid."""
    try:
        MediaHosts(entries)
    except ValueError:
        return False
    return True

"""Downloads images and videos by URL, from the configured hosts, with limits, on the event loop.

A host's name is resolved once, its addresses are checked, and the connection is made to one of them, so that DNS
rebinding has no effect. Redirects are checked like the URL itself. The reported content type is ignored; the decoder
gets bytes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urljoin, urlsplit

import h11

from mmserve import __version__
from mmserve.config import MediaConfig
from mmserve.config.media_hosts import MediaHosts
from mmserve.errors import InvalidArgument
from mmserve.rpc.memory_budget import MemoryBudget
from mmserve.v1 import generation_pb2 as pb

logger = logging.getLogger("mmserve.rpc")

MAX_URL = 8 << 10
#: Maximum redirects, and maximum bytes of a response's header.
_REDIRECTS, _HEAD_BYTES = 3, 32 << 10
_READ = 64 << 10
#: Bytes between two updates of a file's size in the budget, and chunks processed without yielding to the event loop.
_STEP, _PARTS = 1 << 20, 64
_PORTS = {"http": 80, "https": 443}
_MOVED = (301, 302, 303, 307, 308)


def urls_in(messages: Iterable[pb.ChatMessage]) -> dict[str, str]:
    """The URLs of images and videos, each with the first field that contains it."""
    found: dict[str, str] = {}
    for i, chat in enumerate(messages):
        for j, part in enumerate(chat.parts):
            kind = part.WhichOneof("part")
            if kind in ("image", "video") and (url := getattr(part, kind).url):
                found.setdefault(url, f"messages[{i}].parts[{j}].{kind}.url")
    return found


@dataclass(frozen=True)
class _Target:
    """The parts of an allowed URL."""

    url: str
    secure: bool
    host: str
    port: int
    path: str  # including the query

    @property
    def authority(self) -> str:
        """Host and port as in a header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.secure else "http"] else f"{host}:{self.port}"


class _Failed(Exception):
    """A failed download, with the reason."""


class Fetcher:
    """Downloads files within ``limits``; their bytes count in ``budget`` meanwhile. Used on one event loop."""

    def __init__(self, limits: MediaConfig, budget: MemoryBudget) -> None:
        self._limits, self._budget = limits, budget
        self._hosts = MediaHosts(limits.url_hosts)
        self._tls = ssl.create_default_context() if self._hosts else None
        self._places = asyncio.Semaphore(limits.url_fetches)
        # Look-ups cannot be cancelled: with its own threads, a slow resolver delays only other URLs.
        self._resolver = ThreadPoolExecutor(limits.url_fetches, "mmserve-resolve")

    def close(self) -> None:
        """Stop the threads."""
        self._resolver.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, wanted: Mapping[str, str]) -> dict[str, bytes]:
        """Download the URLs ``wanted``, whose values are the fields to name in errors.

        Raises ``InvalidArgument`` if one is not allowed or fails, ``ResourceExhausted`` if the budget is exhausted.
        """
        targets = {}
        for url, field in wanted.items():
            try:
                targets[url] = self._target(url)
            except _Failed as error:
                raise InvalidArgument.of(field, str(error)) from None
        with ExitStack() as held:  # until the files are returned: the caller then counts them
            tasks = [asyncio.create_task(self._file(target, wanted[url], held)) for url, target in targets.items()]
            try:
                files = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return dict(zip(targets, files, strict=True))

    @asynccontextmanager
    async def file(self, url: str, field: str) -> AsyncIterator[bytes]:
        """The file at ``url``, whose bytes count until the context ends; arguments and errors as in ``fetch``."""
        [data] = (await self.fetch({url: field})).values()
        with self._budget.taken((data,)):
            yield data

    def _target(self, url: str) -> _Target:
        """The parts of ``url``; raises ``_Failed`` if it is not allowed."""
        if len(url) > MAX_URL:
            raise _Failed(f"must be at most {MAX_URL} characters")
        if not url.isascii() or not url.isprintable() or " " in url:
            raise _Failed("must be a URL of ASCII characters, with all others percent-encoded")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise _Failed(f"is no URL: {error}") from None
        if parts.scheme not in _PORTS:
            raise _Failed("must be an http or https URL")
        if parts.username is not None or parts.password is not None:
            raise _Failed("must hold no user and no password")
        with suppress(ValueError):
            host = str(ip_address(host))  # canonical form
        port = _PORTS[parts.scheme] if port is None else port
        if not self._hosts.listed(host, port):
            shown = host if port in _PORTS.values() else f"{host}:{port}"
            raise _Failed(f"must have a host in the server's [media] url_hosts, which does not list {shown[:100]!r}")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return _Target(url, parts.scheme == "https", host, port, path)

    async def _file(self, target: _Target, field: str, held: ExitStack) -> bytes:
        """The file at ``target``, following redirects to allowed URLs."""
        seconds = self._limits.url_seconds
        try:
            async with asyncio.timeout(seconds), self._places:
                for _ in range(1 + _REDIRECTS):
                    found = await self._answer(target, held)
                    if isinstance(found, bytes):
                        return found
                    try:
                        after = self._target(urljoin(target.url, found))
                    except _Failed as error:
                        raise _Failed(f"it redirects to a URL that {error}") from None
                    if target.secure and not after.secure:
                        raise _Failed("it redirects from https to http")
                    target = after
                raise _Failed(f"it redirects more than {_REDIRECTS} times")
        except TimeoutError:
            why = f"it took longer than {seconds:g} s ([media] url_seconds)"
        except _Failed as error:
            why = str(error)
        except OSError as error:
            logger.info("cannot fetch from %s: %s", target.host, error)
            why = f"the connection to {target.host} failed"
        except (h11.RemoteProtocolError, ValueError):  # also lengths of thousands of digits, and names of long labels
            why = f"{target.host} does not answer in HTTP/1.1"
        raise InvalidArgument.of(field, f"could not be fetched: {why}")

    async def _answer(self, target: _Target, held: ExitStack) -> bytes | str:
        """The response of ``target``: a file, or the URL of a redirect."""
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        asked = h11.Request(
            method="GET",
            target=target.path,
            headers=[
                ("host", target.authority),
                ("user-agent", f"mmserve/{__version__}"),
                ("accept", "image/*, video/*"),
                ("accept-encoding", "identity"),
                ("connection", "close"),
            ],
        )
        async with self._connected(target) as (reader, writer):
            writer.write((connection.send(asked) or b"") + (connection.send(h11.EndOfMessage()) or b""))

            async def following() -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
                while (event := connection.next_event()) is h11.NEED_DATA:
                    connection.receive_data(await reader.read(_READ))
                return event

            while isinstance(head := await following(), h11.InformationalResponse):
                pass
            if not isinstance(head, h11.Response):
                raise _Failed(f"{target.host} ended the connection")
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            if head.status_code in _MOVED and "location" in headers:
                return headers["location"]
            if head.status_code != HTTPStatus.OK:
                raise _Failed(f"{target.host} answered with status {head.status_code}")
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise _Failed(f"{target.host} sent it compressed, which was not asked for")
            data, most = bytearray(), self._limits.max_item_bytes
            announced = headers.get("content-length", "0")
            if int(announced) > most:
                raise _Failed(_too_long(most))
            parts = counted = 0
            while isinstance(event := await following(), h11.Data):
                data += event.data
                if len(data) > most:
                    raise _Failed(_too_long(most))
                if len(data) > counted:
                    held.enter_context(self._budget.taken((), _STEP))
                    counted += _STEP
                if (parts := parts + 1) % _PARTS == 0:  # one read may contain thousands of small chunks
                    await asyncio.sleep(0)
            return bytes(data)

    @asynccontextmanager
    async def _connected(self, target: _Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection to an address of the target's host, all of which are checked."""
        name = target.host
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._resolver, _look_up, name, target.port)
        refused = [address for address in found if not self._hosts.reachable(address, target.port)]
        if refused:
            logger.warning("%s is %s, which is not public and not in [media] url_hosts", name, ", ".join(refused))
            raise _Failed(f"{name} has an address that is not public, which [media] url_hosts does not list itself")
        reader, writer = await self._first(found, target)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _first(self, addresses: list[str], target: _Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first of ``addresses`` that accepts one."""
        tls, name = (self._tls, target.host) if target.secure else (None, None)

        async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection(address, target.port, limit=_READ, ssl=tls, server_hostname=name)

        for address in addresses[:-1]:
            try:
                return await connect(address)
            except OSError as error:
                logger.info("no connection to %s at %s: %s", target.host, address, error)
        return await connect(addresses[-1])


def _look_up(host: str, port: int) -> list[str]:
    """The distinct addresses of ``host``; raises ``OSError`` if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def _too_long(most: int) -> str:
    return f"it is larger than {most} bytes ([media] max_item_bytes)"

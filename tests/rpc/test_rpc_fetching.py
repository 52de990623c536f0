"""Images and videos by URL, over real sockets: what is fetched, and what is refused before or while it is."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from certificates import self_signed
from hosts import Host, moved, serving, whole

from mmserve.config import from_mapping
from mmserve.config.media import MediaConfig
from mmserve.config.media_hosts import MediaHosts, is_public
from mmserve.errors import ConfigError, InvalidArgument, ResourceExhausted
from mmserve.rpc import fetching
from mmserve.rpc.fetching import Fetcher
from mmserve.rpc.memory_budget import MemoryBudget

PATIENCE = 60.0
PICTURE = b"\x89PNG and so on"
FIELD = "messages[0].parts[0].image.url"


@pytest.fixture
def host() -> Iterator[Host]:
    with serving() as found:
        found.answers["/a.png"] = whole(PICTURE, "content-type: text/html")
        yield found


def fetch(url: str, *hosts: str, room: int = 1 << 30, **limits: Any) -> bytes:
    config = replace(MediaConfig(url_hosts=hosts, url_seconds=PATIENCE), **limits)
    own = MemoryBudget(room)
    fetcher = Fetcher(config, own)
    try:
        return asyncio.run(fetcher.fetch({url: FIELD}))[url]
    finally:
        fetcher.close()
        assert own.used == 0


def refused(url: str, *hosts: str, **limits: Any) -> str:
    with pytest.raises(InvalidArgument) as found:
        fetch(url, *hosts, **limits)
    [violation] = found.value.violations
    assert violation.field == FIELD
    return violation.description


def resolving(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[list[str]]]) -> list[str]:
    """Names resolve to the next of their lists of addresses, the last for ever; returns what was looked up."""
    seen: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **how: Any) -> Any:
        if host not in answers:
            return real(host, port, *args, **how)
        seen.append(host)
        found = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [each for address in found for each in real(address, port, *args, **how)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return seen


def test_a_file_whatever_its_type_is_said_to_be(host: Host) -> None:
    assert fetch(host.url("/a.png"), f"127.0.0.1:{host.port}") == PICTURE
    [asked] = host.asked
    assert f"host: 127.0.0.1:{host.port}\r\n" in asked.lower()
    assert not [line for line in asked.lower().split("\r\n") if line.startswith(("cookie", "authorization"))]


@pytest.mark.parametrize("listed", [(), ("example.org",), ("127.0.0.1",), ("*.0.0.1",), ("127.0.0.1:1",)])
def test_only_listed_hosts_and_ports(host: Host, listed: tuple[str, ...]) -> None:
    assert "[media] url_hosts" in refused(host.url("/a.png"), *listed)
    assert not host.asked


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://127.0.0.1/a.png", "http or https"),
        ("http://user@127.0.0.1:{port}/a.png", "no user"),
        ("http://:secret@127.0.0.1:{port}/a.png", "no user"),
        ("http://127.0.0.1:{port}@example.org/a.png", "no user"),
        ("http://example.org\\@127.0.0.1:{port}/a.png", "no user"),
        ("http://example.org#@127.0.0.1:{port}/", "url_hosts"),
        ("http://127.0.0.1:99999/", "no URL"),
        ("http://[127.0.0.1/", "no URL"),
        ("http://2130706433:{port}/a.png", "url_hosts"),
        ("http://0x7f000001:{port}/a.png", "url_hosts"),
        ("http://127.1:{port}/a.png", "url_hosts"),
        ("http://[::ffff:127.0.0.1]:{port}/a.png", "url_hosts"),
        ("http://127.0.0.1.:{port}/\r\nx: y", "ASCII"),
        ("http://127.0.0.1:{port}/ä.png", "ASCII"),
        ("http:///a.png", "url_hosts"),
        ("http://127.0.0.1:{port}/" + "a" * (8 << 10), "at most"),
    ],
)
def test_urls_that_pretend(host: Host, url: str, why: str) -> None:
    assert why in refused(url.replace("{port}", str(host.port)), f"127.0.0.1:{host.port}")
    assert not host.asked


def test_a_listed_name_is_not_followed_into_a_private_network(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {"cdn.test": [["127.0.0.1"]], "mixed.test": [["203.0.114.9", "127.0.0.1"]]})
    url = host.url("/a.png", "cdn.test")
    assert "not public" in refused(url, f"cdn.test:{host.port}")
    assert "not public" in refused(url, f"cdn.test:{host.port}", "127.0.0.1"), "listed, at other ports"
    assert "not public" in refused(host.url("/a.png", "mixed.test"), f"*.test:{host.port}")
    assert not host.asked
    assert fetch(url, f"cdn.test:{host.port}", f"127.0.0.1:{host.port}") == PICTURE, "listed by its address"
    assert f"host: cdn.test:{host.port}\r\n" in host.asked[0].lower()


def test_a_name_that_resolves_anew_changes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is connected to is the address that was checked."""
    monkeypatch.setattr(fetching.MediaHosts, "reachable", lambda _self, address, _port: address == "127.0.0.1")
    seen = resolving(monkeypatch, {"cdn.test": [["127.0.0.1"], ["127.0.0.2"]]})
    assert fetch(host.url("/a.png", "cdn.test"), f"cdn.test:{host.port}") == PICTURE
    assert seen == ["cdn.test"]
    assert "not public" in refused(host.url("/a.png", "cdn.test"), f"cdn.test:{host.port}")


def test_redirects_stay_on_the_list(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as other:
        other.answers["/a.png"] = whole(b"other")
        resolving(monkeypatch, {"cdn.test": [["127.0.0.1"]]})
        listed = f"127.0.0.1:{host.port}"
        host.answers["/near"] = moved("/a.png")
        host.answers["/far"] = moved(other.url("/a.png"))
        host.answers["/file"] = moved("file:///etc/passwd")
        host.answers["/name"] = moved(f"http://cdn.test:{other.port}/a.png")
        host.answers["/round"] = moved("/round")
        assert fetch(host.url("/near"), listed) == PICTURE
        assert "redirects" in refused(host.url("/far"), listed) and not other.asked
        assert "redirects" in refused(host.url("/file"), listed)
        assert "not public" in refused(host.url("/name"), listed, f"cdn.test:{other.port}") and not other.asked
        assert "more than" in refused(host.url("/round"), listed)
        assert fetch(host.url("/far"), listed, f"127.0.0.1:{other.port}") == b"other"


def test_https_is_verified_and_not_left(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path, "host")
    with serving((certificate, key)) as secure:
        secure.answers["/a.png"] = whole(PICTURE)
        secure.answers["/down"] = moved(host.url("/a.png"))
        listed = f"127.0.0.1:{secure.port}"
        url = secure.url("/a.png", scheme="https")
        assert "connection" in refused(url, listed), "nobody vouches for the certificate"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetch(url, listed) == PICTURE
        resolving(monkeypatch, {"cdn.test": [["127.0.0.1"]]})
        other = secure.url("/a.png", "cdn.test", "https")
        assert "connection" in refused(other, f"cdn.test:{secure.port}", listed), "the certificate is of another name"
        down = refused(secure.url("/down", scheme="https"), listed, f"127.0.0.1:{host.port}")
        assert "from https to http" in down and not host.asked


def endless(head: bytes, part: bytes) -> Callable[[socket.socket], None]:
    def answer(stream: socket.socket) -> None:
        stream.sendall(head)
        while True:
            stream.sendall(part)

    return answer


OPEN = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (whole(b"x" * 1001), "larger than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n", "larger than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 20_000 + b"\r\n\r\n", ""),
        (endless(OPEN, b"x" * 4096), "larger than 1000 bytes"),
        (endless(CHUNKED, b"1\r\nx\r\n" * 4096), "larger than 1000 bytes"),
        (endless(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 4096), "HTTP/1.1"),
        (endless(b"", b"\x00" * 4096), "HTTP/1.1"),
        (whole(gzip.compress(b"x" * 100_000), "content-encoding: gzip"), "compressed"),
        (whole(b"", status="500 Oops"), "status 500"),
        (whole(b"", status="204 No Content"), "status 204"),
        (whole(b"", status="302 Found"), "status 302"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\ncut", "HTTP/1.1"),
        (b"", "HTTP/1.1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "HTTP/1.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hosts_that_misbehave(host: Host, answer: Any, why: str) -> None:
    host.answers["/x"] = answer
    assert why in refused(host.url("/x"), f"127.0.0.1:{host.port}", max_item_bytes=1000)


def test_a_host_that_is_slow(host: Host) -> None:
    done = threading.Event()
    host.answers["/silent"] = lambda _stream: done.wait(PATIENCE) and None

    def trickle(stream: socket.socket) -> None:
        stream.sendall(OPEN)
        while not done.wait(0.05):
            stream.sendall(b"x")

    host.answers["/trickle"] = trickle
    for path in ("/silent", "/trickle"):
        assert "url_seconds" in refused(host.url(path), f"127.0.0.1:{host.port}", url_seconds=0.5)
    done.set()


def test_nobody_listens_and_no_such_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "connection" in refused(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}")
    assert "connection" in refused("http://nothing.invalid/", "nothing.invalid")


def test_bytes_count_while_they_come(host: Host) -> None:
    host.answers["/large"] = whole(bytes(5 << 20))
    with pytest.raises(ResourceExhausted, match="live_bytes"):
        fetch(host.url("/large"), f"127.0.0.1:{host.port}", room=3 << 20)


def test_places_are_bounded(host: Host) -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def slowly(stream: socket.socket) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.05)
        with lock:
            at_once -= 1
        stream.sendall(whole(b"x"))

    paths = [f"/{i}" for i in range(6)]
    host.answers.update(dict.fromkeys(paths, slowly))
    config = MediaConfig(url_hosts=(f"127.0.0.1:{host.port}",), url_seconds=PATIENCE, url_fetches=2)
    fetcher = Fetcher(config, MemoryBudget(1 << 30))
    found = asyncio.run(fetcher.fetch({host.url(path): FIELD for path in paths}))
    fetcher.close()
    assert len(found) == 6 and most <= 2


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((address, True) for address in ("93.184.215.14", "2606:2800:21f:cb07::1", "64:ff9b::5db8:d70e")),
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((address, False) for address in ("100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1")),
        *((address, False) for address in ("::", "::1", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "2002:7f00:1::1")),
        *((address, False) for address in ("::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2001::1")),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


def test_entries_of_the_list() -> None:
    hosts = MediaHosts(["Example.ORG", "*.cdn.test:8443", "10.0.0.7", "[fd00::1]:81"])
    assert hosts.listed("example.org", 443) and hosts.listed("example.org", 80)
    assert not hosts.listed("example.org", 8080) and not hosts.listed("a.example.org", 443)
    assert (
        hosts.listed("a.b.cdn.test", 8443)
        and not hosts.listed("cdn.test", 8443)
        and not hosts.listed("a.cdn.test", 443)
    )
    assert hosts.listed("10.0.0.7", 80) and hosts.reachable("10.0.0.7", 443) and not hosts.reachable("10.0.0.7", 81)
    assert hosts.listed("fd00::1", 81) and hosts.reachable("fd00::1", 81) and not hosts.reachable("fd00::2", 81)
    for wrong in ("", "http://a.test", "a.test/x", "a.test:0", "a.test:99999", "a..test", "10.0.0.0/8", "*", "1.2.3"):
        with pytest.raises(ConfigError, match="url_hosts"):
            from_mapping({"media": {"url_hosts": [wrong]}})

"""Addresses and tokens of clients: what is accepted, and what is refused before anything is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mmserve.client import TLS, AsyncClient, Client, ConfigError
from mmserve.client.address import parse_address


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MMSERVE_SERVER", "MMSERVE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "target", "tls"),
    [
        ("localhost:50051", "localhost:50051", None),
        ("example.com:1", "example.com:1", None),
        ("[::1]:65535", "[::1]:65535", None),
        ("grpc://example.com:50051", "example.com:50051", False),
        ("grpcs://example.com:50051/", "example.com:50051", True),
        ("dns:///example.com:50051", "dns:///example.com:50051", None),
        ("unix:/run/mmserve.sock", "unix:/run/mmserve.sock", None),
    ],
)
def test_addresses(given: str, target: str, tls: bool | None) -> None:
    found = parse_address(given)
    assert (found.target, found.tls) == (target, tls)
    assert Client(given).target == target


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("http://host:1", "scheme 'http'.*HOST:PORT.*for http use grpc"),
        ("https://host:1", "for https use grpcs"),
        ("ftp://host:1", "scheme 'ftp'"),
        ("host", "has no port.*HOST:PORT"),
        ("grpc://host", "has no port"),
        ("host:99999", "port 99999.*1 to 65535"),
        ("host:0", "port 0"),
        ("host:", "HOST:PORT"),
        (":50051", "HOST:PORT"),
        ("", "HOST:PORT"),
        ("host:port", "HOST:PORT"),
        ("host:50051/path", "HOST:PORT"),
        ("me@host:50051", "HOST:PORT"),
        ("::1:50051", "HOST:PORT"),
        (" host:50051", "HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused_at_once(given: str, told: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=told):
            kind(given)


def test_address_and_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Client().target == "localhost:50051"
    monkeypatch.setenv("MMSERVE_SERVER", "grpcs://example.com:443")
    monkeypatch.setenv("MMSERVE_TOKEN", "from-the-environment")
    client = Client()
    assert client.target == "example.com:443" and client._tls == TLS()
    assert client._metadata() == [("authorization", "Bearer from-the-environment")]
    assert Client("localhost:1", token="given")._metadata() == [("authorization", "Bearer given")]
    monkeypatch.setenv("MMSERVE_TOKEN", "")
    assert Client()._metadata() == []


def test_a_token_is_not_sent_in_plaintext_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("example.com:1", "10.0.0.1:1", "[2001:db8::1]:1", "dns:///localhost:1", "grpc://example.com:1"):
        with pytest.raises(ConfigError, match=r"the token would be sent to .* unencrypted.*allow_plaintext_token"):
            Client(target, token="secret")
        assert Client(target, token="secret", allow_plaintext_token=True)._metadata()
    for target in ("localhost:1", "127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "unix:/x", "grpcs://example.com:1"):
        assert Client(target, token="secret")._metadata()
    assert Client("example.com:1", token="secret", tls=True)._metadata()
    monkeypatch.setenv("MMSERVE_TOKEN", "secret")
    with pytest.raises(ConfigError, match="the token in MMSERVE_TOKEN would be sent"):
        Client("example.com:1")


def test_a_scheme_and_tls_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="use grpcs"):
        Client("grpc://localhost:1", tls=TLS())
    with pytest.raises(ConfigError, match="tls=False"):
        Client("grpcs://localhost:1", tls=False)


def test_certificates_that_cannot_be_used_are_reported_by_sessions_as_by_calls(tmp_path: Path) -> None:
    for tls, error in ((TLS(ca=b"none"), ConfigError), (TLS(ca=tmp_path / "none.pem"), FileNotFoundError)):
        with Client("grpcs://localhost:1", tls=tls) as client:
            for call in (client.models, client.video_session):
                with pytest.raises(error):
                    call()

        async def opened(tls: TLS = tls) -> None:
            async with AsyncClient("grpcs://localhost:1", tls=tls) as client, client.video_session():
                pass

        with pytest.raises(error):
            asyncio.run(opened())

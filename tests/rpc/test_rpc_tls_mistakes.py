"""What client and server do not agree on about TLS is a typed error at once that says what to do."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import self_signed
from echo_server import EchoEngine, config, threaded

from mmserve.client import TLS, AsyncClient, Client, ConfigError, TLSError, Unavailable


@dataclass(frozen=True)
class Places:
    """Servers: not encrypted, with TLS, and with TLS for clients that have a certificate."""

    plain: str
    encrypted: str
    mutual: str
    server: Path
    known: dict[str, Path]
    stranger: dict[str, Path]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("certificates")
    server, key = self_signed(folder, "server")
    known, stranger = (dict(zip(("certificate", "key"), self_signed(folder, name), strict=True)) for name in "ab")
    own: dict[str, Any] = {"tls_certificate": str(server), "tls_key": str(key)}
    with (
        threaded(EchoEngine()) as plain,
        threaded(EchoEngine(), config(own)) as encrypted,
        threaded(EchoEngine(), config({**own, "tls_client_ca": str(known["certificate"])})) as mutual,
    ):
        yield Places(plain, encrypted, mutual, server, known, stranger)


def case(name: str, places: Places) -> tuple[str, TLS | bool | None, str]:
    """An address, the TLS of a client, and what the error says to do."""
    trusting = {"ca": places.server}
    return {
        "TLS to plaintext": (places.plain, TLS(ca=places.server), r"does not speak TLS.*tls=None"),
        "plaintext to TLS": (places.encrypted, None, r"speaks TLS.*tls=TLS\(ca="),
        "wrong authority": (places.encrypted, TLS(**places.stranger, ca=places.known["certificate"]), r"TLS\(ca="),
        "system's authorities": (places.encrypted, True, r"not signed by a trusted authority.*TLS\(ca="),
        "other name": (
            places.encrypted,
            TLS(**trusting, server_name="other.example"),
            r"'other.example'.*server_name",
        ),
        "plaintext to mTLS": (places.mutual, None, r"speaks TLS"),
        "no client certificate": (places.mutual, TLS(**trusting), r"asks for a client certificate.*certificate="),
        "unknown client": (
            places.mutual,
            TLS(**trusting, **places.stranger),
            r"does not accept the client certificate",
        ),
    }[name]


CASES = [
    "TLS to plaintext",
    "plaintext to TLS",
    "wrong authority",
    "system's authorities",
    "other name",
    "plaintext to mTLS",
    "no client certificate",
    "unknown client",
]


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_about_tls_is_named_and_not_tried_again(name: str, places: Places) -> None:
    address, tls, told = case(name, places)
    with Client(address, tls=tls) as client:  # a retried call takes its deadline, 60 s
        for call in (client.models, client.wait_ready, lambda: client.generate("x"), lambda: list(client.stream("x"))):
            with pytest.raises(TLSError, match=told) as caught:
                call()
            assert address in caught.value.message and "tried" not in caught.value.message


@pytest.mark.parametrize("name", ["plaintext to TLS", "no client certificate"])
def test_so_it_is_with_asyncio(name: str, places: Places) -> None:
    async def main() -> None:
        address, tls, told = case(name, places)
        async with AsyncClient(address, tls=tls) as client:
            for outcome in await asyncio.gather(*(client.generate("x") for _ in range(8)), return_exceptions=True):
                assert isinstance(outcome, TLSError)
            with pytest.raises(TLSError, match=told):
                await client.wait_ready()

    asyncio.run(main())


def test_the_right_tls_still_works(places: Places) -> None:
    for address, tls in (
        (places.plain, None),
        (places.encrypted, TLS(ca=places.server)),
        (f"grpcs://{places.encrypted}", TLS(ca=places.server.read_bytes())),
        (places.mutual, TLS(ca=places.server, **places.known)),
    ):
        with Client(address, tls=tls) as client:
            assert client.generate("x").text == "x"


def test_a_server_that_closes_connections_is_not_taken_for_one_with_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        seen = threading.Event()

        def close_all() -> None:
            while True:
                try:
                    listening.accept()[0].close()
                except OSError:
                    return
                seen.set()

        threading.Thread(target=close_all, daemon=True).start()
        for tls in (None, True):
            target = f"127.0.0.1:{listening.getsockname()[1]}"
            with Client(target, tls=tls, reconnect_seconds=0.3) as client, pytest.raises(Unavailable) as caught:
                client.models()
            assert not isinstance(caught.value, TLSError) and "tried" in caught.value.message
        assert seen.is_set()
        listening.shutdown(socket.SHUT_RDWR)


def test_certificates_that_cannot_be_used(places: Places, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    with pytest.raises(ConfigError, match="both certificate and key"):
        TLS(certificate=garbage)
    wrong = [
        (TLS(ca=garbage), r"TLS\.ca"),
        (TLS(ca=places.server, certificate=garbage, key=places.known["key"]), r"TLS\.certificate and TLS\.key"),
        (TLS(certificate=places.known["certificate"], key=places.stranger["key"]), r"TLS\.certificate and TLS\.key"),
    ]
    for tls, told in wrong:
        with Client(places.encrypted, tls=tls) as client, pytest.raises(ConfigError, match=told):
            client.models()
    with Client(places.encrypted, tls=TLS(ca=tmp_path / "none")) as client, pytest.raises(FileNotFoundError):
        client.models()

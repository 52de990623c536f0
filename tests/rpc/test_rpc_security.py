from __future__ import annotations

import asyncio
import datetime
import ipaddress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from echo_server import EchoEngine, config, served, threaded
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mmserve.client import TLS, AsyncClient, Client
from mmserve.errors import ConfigError, Unauthenticated, Unavailable
from mmserve.rpc.server import Server

TOKENS = {"auth_tokens": ("first-token", "second-token")}


@pytest.mark.parametrize("token", TOKENS["auth_tokens"])
def test_accepted_tokens(engine: EchoEngine, token: str) -> None:
    with threaded(engine, config(TOKENS)) as address, Client(address, token=token) as client:
        assert client.generate("x", images=[client.upload(b"data")]).text == "x"
        assert client.models()


@pytest.mark.parametrize("token", [None, "first", "first-token2", "FIRST-TOKEN"])
def test_refused_tokens(engine: EchoEngine, token: str | None) -> None:
    with threaded(engine, config(TOKENS)) as address, Client(address, token=token) as client:
        client.wait_ready(60)  # health stays open
        for call in (client.models, lambda: client.generate("x"), lambda: client.upload(b"x" * (3 << 20))):
            with pytest.raises(Unauthenticated, match="bearer token"):
                call()
    assert not engine.requests


def test_other_schemes_and_reflection_are_refused(engine: EchoEngine) -> None:
    with threaded(engine, config(TOKENS)) as address, grpc.insecure_channel(address) as channel:
        method = channel.unary_unary("/mmserve.v1.ModelService/ListModels")
        assert method(b"", timeout=60, metadata=(("authorization", "bearer second-token"),)) is not None
        for value in ("Basic first-token", "first-token", "Bearer", "Bearer ", "Bearer  first-token"):
            with pytest.raises(grpc.RpcError) as caught:
                method(b"", timeout=60, metadata=(("authorization", value),))
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(
                stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=60)
            )
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_asyncio_token(engine: EchoEngine) -> None:
    async def main() -> None:
        async with served(engine, config(TOKENS)) as server:
            target = f"127.0.0.1:{server.port}"
            async with AsyncClient(target, token="first-token") as good, AsyncClient(target) as bad:
                assert (await good.generate("x")).text == "x"
                with pytest.raises(Unauthenticated):
                    await bad.generate("x")

    asyncio.run(main())


def test_tokens_must_fit_into_metadata() -> None:
    for token in ("", "ä", "a\nb"):
        with pytest.raises(ValueError, match="printable ASCII"):
            Client("127.0.0.1:1", token=token)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = self._write(f"{name}.pem", self._sign(self.subject, self.key, ca=True))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key files for ``name``, at 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, ca=False)
        kind = serialization.PrivateFormat.PKCS8
        secret = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
        stem = f"{self.name}-{name}"
        return self._write(f"{stem}.pem", certificate), self._write(f"{stem}.key", secret)

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, data: bytes) -> Path:
        file = self.folder / name
        file.write_bytes(data)
        return file


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "stranger")


def test_tls(engine: EchoEngine, authority: Authority, stranger: Authority) -> None:
    certificate, key = authority.issue("server")
    settings = config({"tls_certificate": str(certificate), "tls_key": str(key)})
    with threaded(engine, settings) as address:
        with Client(address, tls=TLS(ca=authority.file)) as client:
            client.wait_ready(60)
            assert client.generate("x").text == "x"
        for tls in (TLS(ca=stranger.file), True, None):
            with Client(address, tls=tls, timeout=60) as client, pytest.raises(Unavailable):
                client.models()


def test_mutual_tls(engine: EchoEngine, authority: Authority, stranger: Authority) -> None:
    certificate, key = authority.issue("server")
    files = {"tls_certificate": str(certificate), "tls_key": str(key), "tls_client_ca": str(authority.file)}

    def identity(issuer: Authority) -> TLS:
        mine, secret = issuer.issue("client")
        return TLS(ca=authority.file, certificate=mine.read_bytes(), key=secret)

    with threaded(engine, config(files)) as address:
        with Client(address, tls=identity(authority)) as client:
            assert client.generate("x").text == "x"
        for tls in (TLS(ca=authority.file), identity(stranger)):
            with Client(address, tls=tls, timeout=60) as client, pytest.raises(Unavailable):
                client.models()


def test_wrong_files_are_config_errors(engine: EchoEngine, authority: Authority, tmp_path: Path) -> None:
    certificate, _ = authority.issue("one")
    _, other_key = authority.issue("two")
    missing = str(tmp_path / "missing.pem")
    secret = serialization.load_pem_private_key(other_key.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(secret)
    for files, words in [
        ({"tls_certificate": str(certificate), "tls_key": str(encrypted)}, "not encrypted"),
        ({"tls_certificate": missing, "tls_key": str(other_key)}, "tls_certificate: cannot read"),
        ({"tls_certificate": str(certificate), "tls_key": str(other_key)}, "not a pair"),
    ]:
        with pytest.raises(ConfigError, match=words):
            asyncio.run(Server(config(files), {"echo": engine}).start())

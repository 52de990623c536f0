"""TLS and bearer tokens as the configuration file sets them, with the model behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import self_signed
from e2e_helpers import Running, command, running, short_asks

from mmserve.cli import main
from mmserve.client import TLS, Client
from mmserve.config import load
from mmserve.errors import Unauthenticated, Unavailable


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("security")


def configured(folder: Path, **keys: object) -> Path:
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"port": 0, **keys}.items()]
    path = folder / "mmserve.toml"
    path.write_text("\n".join(["[engine]", "torch_threads = 1", "[server]", *lines]))
    return path


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Running]:
    """A server that asks for a token."""
    with running(load(configured(folder, auth_tokens=["first", "second"]))) as found:
        yield found


@pytest.mark.parametrize("token", ["first", "second"])
def test_an_accepted_token_opens_every_service(guarded: Running, token: str) -> None:
    ask = short_asks(1)[0]
    with Client(guarded.address, token=token) as client:
        client.wait_ready()
        assert client.generate(ask.prompt, images=[client.upload(ask.images[0])], max_new_tokens=2).forwards
        assert [m.name for m in client.models()] == ["bundled"]


@pytest.mark.parametrize("token", [None, "third", "First", "first "])
def test_any_other_token_opens_nothing(guarded: Running, token: str | None) -> None:
    with Client(guarded.address, token=token) as client:
        client.wait_ready()  # health needs none
        for call in (client.models, lambda: client.generate("x"), lambda: client.upload(b"x")):
            with pytest.raises(Unauthenticated):
                call()
    assert guarded.engine.stats().live == 0


def test_models_of_a_guarded_server_need_its_token(
    guarded: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "token").write_text("second\n")
    good = command("models", "--server", guarded.address, "--token-file", str(folder / "token"), "--json")
    assert good.returncode == 0, good.stderr
    assert [m["name"] for m in json.loads(good.stdout)["models"]] == ["bundled"]
    monkeypatch.setenv("MMSERVE_TOKEN", "third")
    bad = command("models", "--server", guarded.address)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.count("\n") == 1 and "bearer token" in bad.stderr


def test_commands_that_start_their_own_server_work_with_a_guarded_configuration(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They talk to it over loopback, with the settings of the engine and none of the locks."""
    certificate, key = self_signed(folder, "own")
    path = configured(folder, auth_tokens=["first"], tls_certificate=str(certificate), tls_key=str(key))
    assert main(["generate", "x", "--config", str(path), "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forwards"] >= 1


def test_tls_serves_who_trusts_the_certificate_and_nobody_else(folder: Path) -> None:
    certificate, key = self_signed(folder, "server")
    stranger, _ = self_signed(folder, "stranger")
    ask = short_asks(1)[0]
    path = configured(folder, tls_certificate=str(certificate), tls_key=str(key), auth_tokens=["first"])
    with running(load(path)) as server:
        with Client(server.address, tls=TLS(ca=certificate), token="first") as client:
            client.wait_ready()
            assert ask.of(client, max_new_tokens=2).forwards
        with Client(server.address, tls=TLS(ca=certificate)) as client, pytest.raises(Unauthenticated):
            client.generate("x")
        for other in (TLS(ca=stranger), None):
            with Client(server.address, tls=other, token="first") as client, pytest.raises(Unavailable):
                client.generate("x", timeout=60)


def test_mutual_tls_asks_the_client_for_its_certificate(folder: Path) -> None:
    certificate, key = self_signed(folder, "server")
    known, known_key = self_signed(folder, "known")
    other, other_key = self_signed(folder, "other")
    path = configured(folder, tls_certificate=str(certificate), tls_key=str(key), tls_client_ca=str(known))
    with running(load(path)) as server:
        with Client(server.address, tls=TLS(ca=certificate, certificate=known, key=known_key)) as client:
            assert client.generate("x", max_new_tokens=2).forwards
        for wrong in (TLS(ca=certificate), TLS(ca=certificate, certificate=other, key=other_key)):
            with Client(server.address, tls=wrong) as client, pytest.raises(Unavailable):
                client.generate("x", timeout=60)


def test_commands_take_a_client_certificate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = self_signed(folder, "shell-server")
    known, known_key = self_signed(folder, "shell-known")
    path = configured(folder, tls_certificate=str(certificate), tls_key=str(key), tls_client_ca=str(known))
    with running(load(path)) as server:
        asked = ["models", "--json", "--server", server.address, "--tls-ca", str(certificate)]
        assert main([*asked, "--tls-cert", str(known), "--tls-key", str(known_key)]) == 0
        assert [m["name"] for m in json.loads(capsys.readouterr().out)["models"]] == ["bundled"]
        for wrong, words in (
            (["--tls-cert", str(known)], "--tls-cert and --tls-key must be given together"),
            (["--tls-cert", str(folder / "none.pem"), "--tls-key", str(known_key)], "none.pem"),
        ):
            assert main([*asked, *wrong]) == 1
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1 and words in err

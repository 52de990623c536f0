"""SIGHUP over a real socket: new tokens and certificates hold, and nothing under way is disturbed."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates import self_signed
from echo_server import PATIENCE, EchoEngine, config, model_info
from harness import eventually
from quick_collections import nothing_unfrozen

from mmserve.client import TLS, Client
from mmserve.config import SLO, Config, EngineConfig, KVCacheConfig, ModelConfig
from mmserve.errors import ConfigError, MMServeError, NotFound, Unauthenticated
from mmserve.rpc.engines import Engines
from mmserve.rpc.reload import Replacement
from mmserve.rpc.server import Server
from mmserve.tenants import TenantConfig


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    with nothing_unfrozen():
        yield


def served_while(settings: Config, engine: EchoEngine, work: Callable[[str], None], **options: Any) -> None:
    """Serve with signals watched in this thread, while ``work`` runs with the address in another; then stop."""

    async def serve() -> None:
        server = Server(settings, {"echo": engine})
        address = f"127.0.0.1:{await server.start()}"
        watched = asyncio.Event()
        serving = asyncio.create_task(server.serve_until_signal(watched.set, **options))
        await watched.wait()
        try:
            await asyncio.to_thread(work, address)
        finally:
            await server.stop()
            await serving

    asyncio.run(serve())


def hang_up(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Send SIGHUP, and wait for what the server logs of it."""
    caplog.clear()
    os.kill(os.getpid(), signal.SIGHUP)
    eventually(lambda: words in caplog.text, words)


def refused(address: str, token: str, **options: Any) -> None:
    with Client(address, token=token, timeout=PATIENCE, **options) as client, pytest.raises(Unauthenticated):
        client.models()


def accepted(address: str, token: str, **options: Any) -> None:
    with Client(address, token=token, timeout=PATIENCE, **options) as client:
        assert client.models()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "mmserve")
    return caplog


def test_tokens_and_certificates_are_replaced_under_a_running_request(
    tmp_path: Path, engine: EchoEngine, log: pytest.LogCaptureFixture
) -> None:
    old, new, names = self_signed(tmp_path, "old"), self_signed(tmp_path, "new"), ("server.pem", "server.key")
    used = [tmp_path / name for name in names]
    for source, target in zip(old, used, strict=True):
        shutil.copy(source, target)
    token = tmp_path / "token"
    token.write_text("first")
    settings = config({"tls_certificate": str(used[0]), "tls_key": str(used[1])})
    settings = replace(settings, tenants=(TenantConfig(name="alice", token_file=str(token)),))
    engine.go.clear()

    def work(address: str) -> None:
        with Client(address, token="first", tls=TLS(ca=old[0])) as client:
            stream = iter(client.stream("a b c"))
            next(stream)
            for source, target in zip(new, used, strict=True):
                shutil.copy(source, target)
            token.write_text("second")
            hang_up(log, "are read again")
            accepted(address, "second", tls=TLS(ca=new[0]))
            refused(address, "first", tls=TLS(ca=new[0]))
            with pytest.raises(Unauthenticated):
                client.models()  # on the connection that is open
            with Client(address, token="second", tls=TLS(ca=old[0]), timeout=2) as other, pytest.raises(MMServeError):
                other.models()  # the new certificate is another one's
            assert engine.running == 1
            engine.go.set()
            assert list(stream)[-1].text == "a b c"

    served_while(settings, engine, work)


def test_a_stream_goes_on_to_its_end_under_a_token_that_is_no_longer_accepted(
    tmp_path: Path, engine: EchoEngine, log: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    settings = replace(config(), tenants=(TenantConfig(name="alice", token_file=str(token)),))
    engine.go.clear()

    def work(address: str) -> None:
        with Client(address, token="first") as client:
            stream = iter(client.stream("a b c d e f g h i j k l m n o p q r s t"))
            next(stream)
            token.write_text("second")
            hang_up(log, "are read again")
            refused(address, "first")
            engine.go.set()
            assert list(stream)[-1].text == "a b c d e f g h i j k l m n o p q r s t"

    served_while(settings, engine, work)


def test_what_cannot_be_used_changes_nothing(tmp_path: Path, engine: EchoEngine, log: pytest.LogCaptureFixture) -> None:
    certificate, key = self_signed(tmp_path, "one")
    token = tmp_path / "token"
    token.write_text("first")
    settings = config({"tls_certificate": str(certificate), "tls_key": str(key)})
    settings = replace(settings, tenants=(TenantConfig(name="alice", token_file=str(token)),))
    kept = "the configuration stays as it was"

    def work(address: str) -> None:
        tls = TLS(ca=certificate.read_bytes())
        token.write_text("s3cret\u00e4")
        hang_up(log, kept)
        assert "s3cret" not in log.text
        token.write_text("second")
        secret = key.read_text()
        key.write_text("no key at all")
        hang_up(log, kept)
        assert "no key at all" not in log.text
        accepted(address, "first", tls=tls)
        refused(address, "second", tls=tls)
        key.write_text(secret)
        hang_up(log, "are read again")
        accepted(address, "second", tls=tls)

    served_while(settings, engine, work)


def test_a_reload_never_opens_the_server(tmp_path: Path, engine: EchoEngine, log: pytest.LogCaptureFixture) -> None:
    settings = config({"auth_tokens": ("first",)})

    def work(address: str) -> None:
        hang_up(log, "open the server to all")
        refused(address, "other")
        accepted(address, "first")

    served_while(settings, engine, work, read=lambda: config())


def test_what_needs_a_restart_is_named(engine: EchoEngine, log: pytest.LogCaptureFixture) -> None:
    changed = replace(config({"max_message_bytes": 9}), engine=EngineConfig(max_queued=7))
    changed = replace(changed, kv_cache=KVCacheConfig(host_bytes=1), slo=(SLO(name="fast", first_token_seconds=1),))

    def work(address: str) -> None:
        hang_up(log, "are read again")
        assert "[server] max_message_bytes of the configuration differs" in log.text
        named = [line.split()[0] for line in log.messages if "of the configuration differs" in line]
        assert named == ["[server]", "[engine]", "[kv_cache]", "[slo]"]
        accepted(address, "any")

    served_while(config(), engine, work, read=lambda: changed)


def test_a_configuration_that_cannot_be_read_changes_nothing(engine: EchoEngine, log: pytest.LogCaptureFixture) -> None:
    configurations: list[Config] = [models("one", "one")]

    def read() -> Config:
        if not configurations:
            raise ConfigError("mmserve.toml is not valid TOML")
        return configurations.pop()

    def work(address: str) -> None:
        hang_up(log, "stays as it was: two models are named 'one'")
        hang_up(log, "stays as it was: mmserve.toml is not valid TOML")
        accepted(address, "any")

    served_while(config(), engine, work, read=read, load=lambda settings: iter(()))


def models(*names: str) -> Config:
    return replace(config(), models=tuple(ModelConfig(path=f"/models/{name}", name=name) for name in names))


def test_models_are_replaced_while_requests_run(engine: EchoEngine, log: pytest.LogCaptureFixture) -> None:
    """The new one is served before the old one goes, and what the old one has under way comes to its end."""
    loaded: list[EchoEngine] = []
    started = models("echo")
    wanted = [models("one", "two"), models("one", "two", "three")]
    wanted = [replace(each, engine=EngineConfig(max_queued=7)) for each in wanted]

    def load(settings: Config) -> Iterator[EchoEngine]:
        assert settings.engine == started.engine, "only a restart changes that"
        for model in settings.models:
            loaded.append(EchoEngine(model_info(model.name)))
            yield loaded[-1]

    engine.go.clear()

    def work(address: str) -> None:
        with Client(address, timeout=PATIENCE) as client:
            stream = iter(client.stream("a b c d e f g h i j k l m n o p q r s t"))
            next(stream)
            hang_up(log, "serving one, two")
            assert [m.name for m in client.models()] == ["one", "two"]
            assert client.generate("x", model="two").text == "x"
            with pytest.raises(NotFound, match="no model 'echo' here; there is one, two"):
                client.generate("x", model="echo")
            wanted.pop(0)
            hang_up(log, "serving one, two, three")  # while the first still has a request
            engine.go.set()
            assert list(stream)[-1].text == "a b c d e f g h i j k l m n o p q r s t"
            hang_up(log, "are read again")  # nothing differs any more
            assert len(loaded) == 3
        assert engine.calls[0] == "start"
        eventually(lambda: engine.calls[-1] == "stop", "the old one is stopped")

    served_while(started, engine, work, read=lambda: wanted[0], load=load)
    assert [e.calls[-1] for e in loaded] == ["stop"] * 3


def test_no_model_is_loaded_while_the_server_drains(engine: EchoEngine, log: pytest.LogCaptureFixture) -> None:
    engine.go.clear()

    def work(address: str) -> None:
        with Client(address, timeout=PATIENCE) as client:
            stream = iter(client.stream("a b c d e f g h i j k l m n o p q r s t"))
            next(stream)
            log.clear()
            os.kill(os.getpid(), signal.SIGTERM)
            eventually(lambda: "drain 60" in engine.calls, "the drain to begin")
            hang_up(log, "[[models]] differ, and stay as they were: the server is shutting down")
            engine.go.set()
            assert list(stream)[-1].text == "a b c d e f g h i j k l m n o p q r s t"

    def load(_settings: Config) -> Iterator[EchoEngine]:
        raise AssertionError("the server drains")

    served_while(models("echo"), engine, work, read=lambda: models("echo", "one"), load=load)


def test_a_model_that_cannot_be_loaded_changes_nothing(engine: EchoEngine, log: pytest.LogCaptureFixture) -> None:
    started: list[EchoEngine] = []

    def load(settings: Config) -> Iterator[EchoEngine]:
        started.append(EchoEngine(model_info("one")))
        yield started[0]
        raise ConfigError("there is no model directory /models/two")

    def work(address: str) -> None:
        hang_up(log, "[[models]] stay as they were: there is no model directory /models/two")
        with Client(address) as client:
            assert [m.name for m in client.models()] == ["echo"]

    served_while(models("echo"), engine, work, read=lambda: models("echo", "one", "two"), load=load)
    assert started[0].calls == ["start", "stop"]


def test_a_stopped_engine_unpins_what_its_successor_cannot_use() -> None:
    """``old`` is replaced under its name, ``gone`` is removed."""
    unpinned: dict[str, Any] = {}

    def engine_of(name: str, kept: str) -> EchoEngine:
        made = EchoEngine(model_info(name))
        unpin = partial(unpinned.__setitem__, kept)
        made.caches = SimpleNamespace(name=kept, unpin_in_memory=unpin)
        return made

    async def nothing(_engine: Any, _seconds: float) -> None:
        return

    async def reload() -> None:
        engines = Engines(("a", "b"))
        engines.add("a", engine_of("a", "old"))
        engines.add("b", engine_of("b", "gone"))
        leaving = engines.replace(("a",), {"a": engine_of("a", "new")})
        assert await Replacement(engines, config(), asyncio.to_thread, nothing).retire(leaving, 1.0)
        assert unpinned == {"old": engines["a"].caches, "gone": None}  # type: ignore[attr-defined]

    asyncio.run(reload())

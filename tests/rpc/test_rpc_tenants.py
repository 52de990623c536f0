"""Tenants over a real socket: what is theirs alone, what they may ask for, and what the server notes of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from echo_server import PATIENCE, EchoEngine, config, served, threaded

from mmserve.client import Client
from mmserve.config import Config, ServerConfig, from_mapping, load
from mmserve.errors import ConfigError, NotFound, ResourceExhausted, Unauthenticated
from mmserve.rpc.server import Server
from mmserve.tenants import TenantConfig, accepted_tokens, is_loopback
from mmserve.v1 import media_pb2, media_pb2_grpc

SECRET = "s3cret-of-alice"


def tenants(folder: Path, **settings: dict[str, Any]) -> Config:
    """A server's configuration with tenants whose tokens are their names and "-token"."""
    found = []
    for name, values in settings.items():
        file = folder / f"{name}.token"
        file.write_text(f"{name}-token\n")
        found.append(TenantConfig(name=name, token_file=str(file), **values))
    return replace(config(), tenants=tuple(found))


@pytest.fixture
def two(tmp_path: Path, engine: EchoEngine) -> Iterator[tuple[Client, Client]]:
    """Clients of two tenants of one server."""
    with (
        threaded(engine, tenants(tmp_path, alice={}, bob={})) as address,
        Client(address, token="alice-token") as alice,
        Client(address, token="bob-token") as bob,
    ):
        yield alice, bob


def test_a_tenant_cannot_use_another_ones_upload(two: tuple[Client, Client]) -> None:
    alice, bob = two
    media_id = alice.upload(b"a picture of alice's")
    assert alice.generate("x", images=[media_id]).text == "x"
    with pytest.raises(NotFound):
        bob.generate("x", images=[media_id])


def upload(address: str, token: str, data: bytes) -> bool:
    """Whether the server says that it had ``data`` already."""
    with grpc.insecure_channel(address) as channel:
        stub = media_pb2_grpc.MediaServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),)
        reply = stub.UploadMedia(iter([media_pb2.UploadMediaRequest(chunk=data)]), timeout=PATIENCE, metadata=metadata)
        return bool(reply.deduplicated)


def test_a_tenant_cannot_find_out_what_another_one_uploaded(engine: EchoEngine) -> None:
    with threaded(engine, config({"auth_tokens": ("alice", "bob")})) as address:
        assert not upload(address, "alice", b"a picture")
        assert upload(address, "alice", b"a picture")
        assert not upload(address, "bob", b"a picture")
        with Client(address, token="bob") as bob, pytest.raises(Unauthenticated, match="add an entry with token_file"):
            bob.cache.drop(["0"])


def test_tenants_that_say_so_share_their_uploads(tmp_path: Path, engine: EchoEngine) -> None:
    shared = {"shared_cache": True}
    with threaded(engine, tenants(tmp_path, alice=shared, bob=shared, carol={})) as address:
        assert not upload(address, "alice-token", b"a picture")
        assert upload(address, "bob-token", b"a picture")
        assert not upload(address, "carol-token", b"a picture")


def test_uploads_of_one_tenant_do_not_push_out_another_ones(tmp_path: Path, engine: EchoEngine) -> None:
    settings = replace(tenants(tmp_path, alice={}, bob={}), media=replace(config().media, store_bytes=100))
    with (
        threaded(engine, settings) as address,
        Client(address, token="alice-token") as alice,
        Client(address, token="bob-token") as bob,
    ):
        mine = bob.upload(b"b" * 30)
        for i in range(20):
            alice.upload(bytes([i]) * 30)
        assert bob.generate("x", images=[mine]).text == "x"


def test_the_engine_is_told_whose_a_request_is(tmp_path: Path, engine: EchoEngine) -> None:
    settings = tenants(tmp_path, alice={"share": 2.0, "priority": 1}, bob={"shared_cache": True})
    with threaded(engine, settings) as address:
        for token in ("alice-token", "bob-token"):
            with Client(address, token=token) as client:
                client.generate("x")
    first, second = (request.tenant for request in engine.requests)
    assert (first.name, first.share, first.priority, first.cache) == ("alice", 2.0, 1, "alice")
    assert (second.name, second.share, second.priority, second.cache) == ("bob", 1.0, 0, "")


def test_calls_at_the_same_time_are_each_their_own_tenants(two: tuple[Client, Client], engine: EchoEngine) -> None:
    engine.pause = 0.01
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: two[i % 2].generate(f"{'ab'[i % 2]} {i}"), range(32)))
    for request in engine.requests:
        assert request.messages[-1].parts[0].text[0] == request.tenant.name[0]


def test_a_server_without_tokens_has_one_tenant_without_a_name(address: str, engine: EchoEngine) -> None:
    with Client(address) as client:
        client.generate("x")
    assert engine.requests[0].tenant.name == engine.requests[0].tenant.cache == ""


def once(address: str, token: str) -> Any:
    """One call without a retry after a refusal."""
    with Client(address, token=token, timeout=PATIENCE, retries=False) as client:
        return client.generate("x")


def test_more_than_its_rate_is_refused_with_the_time_to_wait(tmp_path: Path, engine: EchoEngine) -> None:
    with threaded(engine, tenants(tmp_path, alice={"rate": 0.005, "burst": 2}, bob={})) as address:
        once(address, "alice-token"), once(address, "alice-token")
        with pytest.raises(ResourceExhausted, match=r"'alice' .*rate of 0\.005 requests a second") as caught:
            once(address, "alice-token")
        assert caught.value.retry_after is not None and 0 < caught.value.retry_after <= 200
        assert once(address, "bob-token").text == "x"
        with Client(address, token="alice-token") as client:
            assert client.models()  # costs nothing
    assert len(engine.requests) == 3


def test_a_rate_is_had_again_with_time(tmp_path: Path, engine: EchoEngine) -> None:
    settings = tenants(tmp_path, alice={"rate": 20.0, "burst": 1})
    with threaded(engine, settings) as address, Client(address, token="alice-token") as client:
        for _ in range(4):  # the client waits as it is told
            assert client.generate("x").text == "x"


def test_more_at_once_than_its_concurrency_is_refused(tmp_path: Path, engine: EchoEngine) -> None:
    engine.pause = 0.05
    settings = tenants(tmp_path, alice={"concurrency": 1}, bob={})
    with (
        threaded(engine, settings) as address,
        Client(address, token="alice-token", timeout=PATIENCE, retries=False) as alice,
    ):
        stream = alice.stream("word " * 2000)
        next(iter(stream))
        with pytest.raises(
            ResourceExhausted, match="'alice' has 1 requests in progress, and its concurrency is 1"
        ) as e:
            once(address, "alice-token")
        assert e.value.retry_after
        with pytest.raises(ResourceExhausted, match="concurrency"):
            alice.upload(b"x")
        assert once(address, "bob-token").text == "x"
        stream.close()
        assert engine.cancel_seen.wait(PATIENCE)
        with Client(address, token="alice-token", timeout=PATIENCE) as client:
            assert client.generate("x").text == "x"  # its place is free again


def metrics(server: Any) -> dict[str, float]:
    """Samples of what tenants are counted by, by name and labels."""
    return {
        f"{s.name}{sorted(s.labels.values())}": s.value
        for family in server.metrics.registry.collect()
        for s in family.samples
        if s.name.endswith("_total") and ("tenant" in s.name or "authentication" in s.name)
    }


async def _counted(engine: EchoEngine, settings: Config, caplog: pytest.LogCaptureFixture) -> dict[str, float]:
    def calls(address: str) -> None:
        assert once(address, "alice-token").text == "x"
        with pytest.raises(ResourceExhausted):
            once(address, "alice-token")
        for token in [SECRET] * 20:
            with pytest.raises(Unauthenticated):
                once(address, token)
        with Client(address) as client, pytest.raises(Unauthenticated):
            client.models()

    async with served(engine, settings) as server:
        with caplog.at_level(logging.INFO):
            await asyncio.to_thread(calls, f"127.0.0.1:{server.port}")
        return metrics(server)


def test_refused_calls_are_counted_and_logged_once_in_a_while_without_their_token(
    tmp_path: Path, engine: EchoEngine, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tenants(tmp_path, alice={"rate": 0.01})
    found = asyncio.run(_counted(engine, settings, caplog))
    assert found["mmserve:authentication_failures_total['unknown']"] == 20
    assert found["mmserve:authentication_failures_total['missing']"] == 1
    assert found["mmserve:tenant_limited_total['alice', 'rate']"] == 1
    assert found["mmserve:tenant_requests_total['OK', 'alice']"] == 1
    assert found["mmserve:tenant_tokens_total['alice', 'generation']"] == 1
    lines = [r.getMessage() for r in caplog.records if "without an accepted token" in r.getMessage()]
    assert len(lines) == 1 and "GenerationService/Generate" in lines[0] and "127.0.0.1" in lines[0]
    assert SECRET not in caplog.text and "alice-token" not in caplog.text


def test_several_tokens_of_a_tenant_are_all_accepted(tmp_path: Path, engine: EchoEngine) -> None:
    settings = tenants(tmp_path, alice={})
    (tmp_path / "alice.token").write_text("old\n\n  new  \n")
    with threaded(engine, settings) as address:
        assert [once(address, token).text for token in ("old", "new")] == ["x", "x"]
        with pytest.raises(Unauthenticated):
            once(address, "alice-token")


# --- configuration ---


def test_a_token_of_the_environment() -> None:
    [found] = accepted_tokens([TenantConfig(name="a", token_env="MMSERVE_A")], (), {"MMSERVE_A": SECRET})
    assert found.tenant.name == "a"
    assert SECRET not in repr(found)
    with pytest.raises(ConfigError, match="environment variable MMSERVE_A, which token_env of the tenant 'a' names"):
        accepted_tokens([TenantConfig(name="a", token_env="MMSERVE_A")], (), {})


def test_no_error_and_no_repr_has_a_token_in_it(tmp_path: Path) -> None:
    assert SECRET not in repr(from_mapping({"server": {"auth_tokens": [SECRET]}}))
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\u00e4\n")
    env = {"E": f"{SECRET}\n{SECRET}"}
    wrong = [
        {"server": {"auth_tokens": SECRET}},
        {"server": {"auth_tokens": [SECRET, f"{SECRET}\u00e4"]}},
        {"server": {"auth_tokens": [SECRET, 5]}},
        {"server": {"auth_tokens": [SECRET], "host": "0.0.0.0"}},
        {"tenants": SECRET},
        {"tenants": [SECRET]},
        {"tenants": [{"name": "a", "token": SECRET}]},
        {"tenants": [{"name": "a", "token_env": [SECRET]}]},
        {"tenants": [{"name": "a", "token_file": {"text": SECRET}}]},
    ]
    for data in wrong:
        with pytest.raises(ConfigError) as caught:
            from_mapping(data)
        assert SECRET not in str(caught.value)
    one, same = (TenantConfig(name=name, token_env="E") for name in "ab")
    for found, environment in (
        ([TenantConfig(name="a", token_file=str(file))], {}),
        ([one], env),
        ([one, same], {"E": SECRET}),
    ):
        with pytest.raises(ConfigError) as caught:
            accepted_tokens(found, (), environment)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "name must be"),
        ({"name": "a b", "token_env": "E"}, "name must be"),
        ({"name": "token-1", "token_env": "E"}, "auth_tokens are called so"),
        ({"name": "a"}, "needs either token_file or token_env"),
        ({"name": "a", "token_env": "E", "token_file": "f"}, "needs either"),
        ({"name": "a", "token_env": "E", "share": 0.0}, "share must be above 0"),
        ({"name": "a", "token_env": "E", "rate": -1}, "rate must be at least 0"),
        ({"name": "a", "token_env": "E", "priority": -1}, "priority must be at least 0"),
        ({"name": "a", "token_env": "E", "colour": 1}, "no key 'colour'"),
    ],
)
def test_tenants_that_cannot_be(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_mapping({"tenants": [values]})


def test_two_tenants_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="an entry above has it"):
        from_mapping({"tenants": [{"name": "a", "token_env": "E"}, {"name": "a", "token_env": "F"}]})


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    settings = tenants(tmp_path, alice={})
    (tmp_path / "alice.token").unlink()
    with pytest.raises(ConfigError, match=r"alice\.token, which token_file of the tenant 'alice' names: No such file"):
        Server(settings, {"echo": EchoEngine()})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_tokens_in_plaintext_are_refused_beyond_this_machine(host: str) -> None:
    for guard in ({"server": {"auth_tokens": ["x"]}}, {"tenants": [{"name": "a", "token_env": "E"}]}):
        data = {**guard, "server": {**guard.get("server", {}), "host": host}}
        with pytest.raises(ConfigError, match="tokens would travel in plaintext"):
            from_mapping(data)
        data["server"]["allow_plaintext_tokens"] = True
        assert from_mapping(data).server.host == host


def test_loopback_hosts() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "")))
    assert from_mapping({"server": {"auth_tokens": ["x"], "host": "::1"}}).server == ServerConfig(
        host="::1", auth_tokens=("x",)
    )


def test_a_file_with_tenants(tmp_path: Path) -> None:
    path = tmp_path / "mmserve.toml"
    path.write_text('[[tenants]]\nname = "a"\ntoken_env = "E"\nrate = 5\nshare = 2\n')
    assert load(path).tenants == (TenantConfig(name="a", token_env="E", rate=5.0, share=2.0),)

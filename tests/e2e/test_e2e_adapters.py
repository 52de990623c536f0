"""Adapters (LoRA) of a served model over real sockets: gRPC, both clients, HTTP and the command line."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import PATIENCE, settings
from llama_checkpoints import llama, save
from lora_checkpoints import adapter_tensors, merged, save_adapter

from mmserve import cli
from mmserve.assembly import BackgroundServer
from mmserve.client import AsyncClient, Client
from mmserve.config import ModelConfig
from mmserve.errors import NotFound, ResourceExhausted, Unauthenticated, Unimplemented
from mmserve.tenants import TenantConfig

TEXT = "what is left of the circle?"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters for it, and the models with those merged into their weights."""
    base, found = llama(), tmp_path_factory.mktemp("served")
    save(base, found / "base")
    for seed, name in enumerate(("red", "blue")):
        tensors = adapter_tensors(base, seed)
        save_adapter(found / "adapters" / name, tensors)
        save(merged(base, tensors), found / f"merged-{name}")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[BackgroundServer]:
    config = settings(server={"http_port": free_port()}, engine={"adapter_folder": str(folder / "adapters")})
    names = ("base", "merged-red", "merged-blue")
    models = tuple(ModelConfig(path=str(folder / name), name=name) for name in names)
    with BackgroundServer(replace(config, models=models)) as found:
        yield found


def http(server: BackgroundServer, path: str, body: dict[str, Any] | None = None) -> Any:
    url = f"http://127.0.0.1:{server.config.server.http_port}{path}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return json.load(reply)


def test_loaded_asked_for_and_dropped(server: BackgroundServer, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(server.address, timeout=PATIENCE) as client:
        expected = {name: client.generate(TEXT, model=f"merged-{name}").text for name in ("red", "blue")}
        plain = client.generate(TEXT, model="base").text
        assert len({plain, *expected.values()}) == 3
        assert client.adapters("base") == []
        with pytest.raises(NotFound, match="model 'base' has no adapter 'red'; there is: none is loaded"):
            client.generate(TEXT, model="base", adapter="red")
        info = client.load_adapter("red", model="base")
        assert cli.main(["adapters", "--server", server.address, "--model", "base", "--load", "blue", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["adapters"]
        assert [each["name"] for each in listed] == ["blue", "red"] and listed[1]["digest"] == info.digest
        for name, text in expected.items():
            assert client.generate(TEXT, model="base", adapter=name).text == text
            assert client.generate(TEXT, model=f"base:{name}").text == text
            command = ["generate", TEXT, "--server", server.address, "--model", "base", "--adapter", name, "--json"]
            assert cli.main(command) == 0
            assert json.loads(capsys.readouterr().out)["text"] == text
            body = {"model": f"base:{name}", "messages": [{"role": "user", "content": TEXT}]}
            assert http(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"] == text
        assert client.generate(TEXT, model="base").text == plain
        assert {each["id"] for each in http(server, "/v1/models")["data"]} >= {"base", "base:red", "base:blue"}
        assert http(server, "/v1/models/base:red")["id"] == "base:red"
        client.drop_adapter("red", model="base")
        with pytest.raises(NotFound, match="has no adapter 'red'; there is: blue"):
            client.generate(TEXT, model="base:red")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            http(server, "/v1/models/base:red")
        with pytest.raises(NotFound, match="no model 'base:red:x' here"):
            client.generate(TEXT, model="base:red:x")


def test_the_asynchronous_client(server: BackgroundServer) -> None:
    async def all_of_it() -> None:
        async with AsyncClient(server.address, timeout=PATIENCE) as client:
            info = await client.load_adapter("red", model="base")
            assert info in await client.adapters("base")
            answer = await client.generate(TEXT, model="base", adapter="red")
            assert answer.text == (await client.generate(TEXT, model="merged-red")).text
            await client.drop_adapter("red", model="base")

    asyncio.run(all_of_it())


def test_only_tenants_with_admin_load_and_drop(folder: Path) -> None:
    tokens = {"boss": "b" * 20, "guest": "g" * 20}
    for name, token in tokens.items():
        (folder / f"{name}.token").write_text(token)
    tenants = tuple(
        TenantConfig(name=name, token_file=str(folder / f"{name}.token"), admin=name == "boss") for name in tokens
    )
    config = settings(engine={"adapter_folder": str(folder / "adapters"), "adapter_bytes": 50_000})
    models = (ModelConfig(path=str(folder / "base"), name="base"),)
    with BackgroundServer(replace(config, models=models, tenants=tenants)) as server:
        boss, guest = (Client(server.address, token=token, timeout=PATIENCE) for token in tokens.values())
        with boss, guest:
            with pytest.raises(Unauthenticated, match="the tenant 'guest' may not load or drop adapters"):
                guest.load_adapter("red")
            boss.load_adapter("red")
            with pytest.raises(ResourceExhausted, match=r"\[engine\] adapter_bytes is 50000"):
                boss.load_adapter("blue")
            assert [each.name for each in guest.adapters()] == ["red"]
            assert guest.generate(TEXT, adapter="red").text
            with pytest.raises(Unauthenticated, match="may not load or drop"):
                guest.drop_adapter("red")


def test_a_server_without_a_folder_of_adapters(folder: Path) -> None:
    with (
        BackgroundServer(replace(settings(), models=(ModelConfig(path=str(folder / "base")),))) as server,
        Client(server.address, timeout=PATIENCE) as client,
    ):
        for call in (lambda: client.load_adapter("red"), lambda: client.generate(TEXT, adapter="red")):
            with pytest.raises(Unimplemented, match=r"takes no adapters: it has no \[engine\] adapter_folder"):
                call()

"""Models that come and go while a server serves, over real sockets: gRPC, both clients, HTTP and the command line."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import urllib.request
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_helpers import PATIENCE, command_here, gated, serving, settings, wait_for
from forked import forked
from llama_checkpoints import llama, save
from quick_collections import nothing_unfrozen

from mmserve import cli
from mmserve.assembly import BackgroundServer
from mmserve.client import AsyncClient, Client
from mmserve.config import EngineConfig, KVCacheConfig, ModelConfig
from mmserve.errors import (
    FailedPrecondition,
    InvalidArgument,
    MMServeError,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from mmserve.kv.capacity import pool_bytes
from mmserve.memory import available, resident
from mmserve.needs import memory_needed
from mmserve.rpc import reload
from mmserve.tenants import TenantConfig

TEXT = "what is left of the circle?"


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    with nothing_unfrozen():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of other weights, the first beside the folder that others may be loaded from."""
    found = tmp_path_factory.mktemp("models")
    for place, heads in (("base", (4, 4)), ("allowed/red", (4, 2)), ("allowed/team/blue", (2, 2))):
        save(llama(*heads), found / place)
    (found / "allowed/empty").mkdir()
    (found / "allowed/out").symlink_to(found / "base")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[BackgroundServer]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = settings(server={"http_port": port, "model_folder": str(folder / "allowed")}, engine={"max_running": 4})
    models = (ModelConfig(path=str(folder / "base")),)
    pins = KVCacheConfig(host_bytes=50_000)  # room for those of one model
    with BackgroundServer(replace(config, models=models, kv_cache=pins)) as found:
        yield found


def listed(server: BackgroundServer) -> list[str]:
    url = f"http://127.0.0.1:{server.config.server.http_port}/v1/models"
    with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
        return [model["id"] for model in json.load(reply)["data"]]


def engine_of(server: BackgroundServer, name: str) -> Any:
    return server._server.engines[name]


def test_loaded_asked_and_unloaded(server: BackgroundServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = BackgroundServer(replace(settings(), models=(ModelConfig(path=str(folder / "allowed/red")),)))
    with alone, Client(alone.address, timeout=PATIENCE) as client:
        expected = client.generate(TEXT).text
    with Client(server.address, timeout=PATIENCE) as client:
        before = client.generate(TEXT).text
        info = client.load_model("red")
        assert info == client.describe("red") and listed(server) == ["base", "red"]
        assert client.generate(TEXT, model="red").text == expected != before
        assert client.generate(TEXT).text == before
        with pytest.raises(FailedPrecondition, match="a model 'red' is already loaded: unload it, or choose another"):
            client.load_model("red")
        command = ["models", "--server", server.address, "--load", "team/blue=sky", "--json"]
        assert cli.main(command) == 0
        shown = json.loads(capsys.readouterr().out)["models"]
        assert [model["name"] for model in shown] == ["base", "red", "sky"]
        assert client.generate(TEXT, model="sky").text
        assert cli.main(["models", "--server", server.address, "--unload", "sky"]) == 0
        assert client.unload_model("red") and listed(server) == ["base"]
        for name in ("red", "sky"):
            with pytest.raises(NotFound, match=f"no model '{name}' here; there is base"):
                client.generate(TEXT, model=name)
            with pytest.raises(NotFound, match=f"no model '{name}' here"):
                client.unload_model(name)
        with pytest.raises(FailedPrecondition, match="'base' is the only model of this server"):
            client.unload_model("base")


def test_the_first_model_may_go_too(server: BackgroundServer) -> None:
    async def all_of_it() -> None:
        async with AsyncClient(server.address, timeout=PATIENCE) as client:
            info = await client.load_model("red", "other", dtype="bfloat16")
            assert info.dtype == "bfloat16" and info.name == "other"
            first = weakref.ref(engine_of(server, "base"))
            assert await client.unload_model("base", drain_seconds=5)
            assert first() is None, "what the server began with is freed, too"
            assert [model.name for model in await client.models()] == ["other"]
            assert (await client.generate(TEXT)).text  # of the default, which is another now
            with pytest.raises(InvalidArgument, match="drain_seconds: must be at least 0"):
                await client.unload_model("other", drain_seconds=-1)

    try:
        asyncio.run(all_of_it())
    finally:  # what the other tests find
        base = server._load(replace(server.config, models=server.config.models))
        engine = next(base)
        engine.start()
        gone = server._server.engines.replace(("base",), {"base": engine})
        assert [each.drain(PATIENCE) for each in gone] == [True]
        for each in gone:
            each.stop()


def test_requests_under_way_end_first(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "_FREEING", (0.0,))  # the gates refer to the engine
    with Client(server.address, timeout=PATIENCE) as client, ThreadPoolExecutor(2) as threads:
        client.load_model("red")
        expected = client.generate(TEXT, model="red").text
        with gated(engine_of(server, "red"), monkeypatch) as gates:
            gates.decode.close()
            asked = threads.submit(client.generate, TEXT, model="red")
            wait_for("the request to decode", lambda: gates.decode.waiting)
            unloaded = threads.submit(client.unload_model, "red", drain_seconds=PATIENCE)
            wait_for("the model to be gone", lambda: listed(server) == ["base"])
            assert client.generate(TEXT).text  # others are served meanwhile
            assert not asked.done() and not unloaded.done()
            gates.open()
            assert asked.result(PATIENCE).text == expected and unloaded.result(PATIENCE)


def test_requests_that_take_too_long_fail(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "_FREEING", (0.0,))  # the gates refer to the engine
    with Client(server.address, timeout=PATIENCE) as client, ThreadPoolExecutor(2) as threads:
        client.load_model("red")
        with gated(engine_of(server, "red"), monkeypatch) as gates:
            gates.decode.close()
            asked = threads.submit(client.generate, TEXT, model="red", timeout=PATIENCE)
            wait_for("the request to decode", lambda: gates.decode.waiting)
            unloaded = threads.submit(client.unload_model, "red", drain_seconds=0.0)
            wait_for("the model to be gone", lambda: listed(server) == ["base"])
            gates.open()
            assert not unloaded.result(PATIENCE)
            with pytest.raises((Unavailable, NotFound)):  # a retry finds no such model any more
                asked.result(PATIENCE)
        assert client.generate(TEXT).text


def test_memory_is_known_before_and_given_back(server: BackgroundServer, folder: Path) -> None:
    """A model of 100 MB: what it needs is said to the byte, and what it took is free again."""
    wide = llama(4, 4, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, initializer_range=0.01)
    save(wide.bfloat16(), folder / "allowed/wide")  # loaded as fp32 on a CPU
    weights = sum(parameter.numel() * 4 for parameter in wide.parameters())
    del wide
    entry = ModelConfig(path=str(folder / "allowed/wide"))
    needed = memory_needed(entry, server.config)
    assert needed.weights == weights > 80e6 and needed.device == torch.device("cpu")
    decoder = engine_of(server, "base").stages.model.decoder.config
    wide_pool = pool_bytes(
        replace(decoder, num_layers=2, num_kv_heads=4, head_dim=256), engine_of(server, "base").config, torch.float32
    )
    assert needed.pages == wide_pool
    process = forked().Process(target=load_and_unload, args=(folder, weights))
    process.start()
    process.join(3 * PATIENCE)
    assert process.exitcode == 0


def load_and_unload(folder: Path, weights: int) -> None:
    """In a process of its own, in which nothing else takes memory: the model ``wide`` of so many bytes, and back."""
    config = settings(server={"model_folder": str(folder / "allowed")}, engine={"max_running": 4})
    with (
        BackgroundServer(replace(config, models=(ModelConfig(path=str(folder / "base")),))) as server,
        Client(server.address, timeout=PATIENCE) as client,
    ):
        client.load_model("wide")
        assert client.generate(TEXT, model="wide", max_new_tokens=2).forwards
        gone, held = weakref.ref(engine_of(server, "wide").stages.model.decoder), resident()
        assert client.unload_model("wide")

        def freed() -> bool:
            gc.collect()
            return gone() is None

        wait_for("the decoder to be freed", freed)
        wait_for("the memory to be given back", lambda: held - resident() > 0.7 * weights)


def test_what_memory_is_missing_is_said(folder: Path) -> None:
    reserve = 1 << 50
    config = settings(server={"model_folder": str(folder / "allowed"), "load_reserve_bytes": reserve})
    with (
        BackgroundServer(replace(config, models=(ModelConfig(path=str(folder / "base")),))) as server,
        Client(server.address, timeout=PATIENCE) as client,
    ):
        with pytest.raises(ResourceExhausted, match=r"no memory for the model 'red': (\d+) MiB are missing") as raised:
            client.load_model("red")
        missing = int(str(raised.value).partition("'red': ")[2].split()[0])
        assert abs(missing - (reserve - available()) / (1 << 20)) < 8192
        assert [model.name for model in client.models()] == ["base"]


def test_what_cannot_be_loaded_is_refused(server: BackgroundServer, folder: Path) -> None:
    with Client(server.address, timeout=PATIENCE) as client:
        for path in ("", ".", "..", "../base", str(folder / "base"), "out", "red/../../base"):
            with pytest.raises(InvalidArgument, match=r"path: must be that of a folder within \[server\] model_folder"):
                client.load_model(path)
        with pytest.raises(NotFound, match=r"\[server\] model_folder has no folder 'green'"):
            client.load_model("green")
        with pytest.raises(InvalidArgument, match=r"path: .*empty has no config\.json"):
            client.load_model("empty")
        for path in ("nul\0l", "x" * 300, "red/" + "y/" * 5000):
            with pytest.raises(NotFound, match=r"\[server\] model_folder has no folder"):
                client.load_model(path)
        with pytest.raises(InvalidArgument, match="path: dtype 'int3' is not known"):
            client.load_model("red", dtype="int3")
        for name in ("two\nlines", "x" * 257):
            with pytest.raises(InvalidArgument, match="name: must be at most 256 printable characters"):
                client.load_model("red", name)
        for seconds in (-1.0, float("nan"), 1e10):
            with pytest.raises(InvalidArgument, match="drain_seconds: must be at least 0 and at most 2147483, not"):
                client.unload_model("base", drain_seconds=seconds)
        assert listed(server) == ["base"]


def test_pins_of_a_model_that_is_unloaded_take_no_room_from_others(server: BackgroundServer) -> None:
    prompt = TEXT * 5
    with Client(server.address, timeout=PATIENCE) as client:
        client.load_model("red")
        pinned = client.cache.warm(prompt, model="red", pin=True)
        assert [entry.pinned for entry in client.cache.list("red").entries if entry.id == pinned.id] == [True]
        client.unload_model("red")
        assert [entry.pinned for entry in client.cache.list("red").entries if entry.id == pinned.id] == [False]
        other = client.cache.warm(prompt, pin=True)
        [entry] = [entry for entry in client.cache.list("base").entries if entry.id == other.id]
        assert entry.pinned and entry.sizes["host"] == entry.sizes["pages"], "all of its pages"
        client.cache.drop([other.id])
        assert {entry.model for entry in client.cache.list().entries if entry.id == other.id} == {"red"}
        client.cache.drop([other.id])  # those of the model that was unloaded, which no other has now
        assert other.id not in [entry.id for entry in client.cache.list().entries]


def test_entries_of_one_model_are_changed_where_another_has_them_too(server: BackgroundServer) -> None:
    with Client(server.address, timeout=PATIENCE) as client:
        client.load_model("red")
        [name] = {client.cache.warm(TEXT * 5, model=model).id for model in ("base", "red")}
        for change in (client.cache.pin, client.cache.unpin, client.cache.drop):
            with pytest.raises(InvalidArgument, match=r"ids\[1\]: is an entry of base and of red: set model"):
                change(["00", name])
        pages = client.cache.pin([name], model="red")
        assert {entry.model: entry.pinned for entry in client.cache.list().entries} == {"base": False, "red": True}
        done = command_here("cache", "drop", name[:12], "--server", server.address, "--model", "red")
        assert (done.stdout, client.cache.list("red").entries) == (f"drop: {pages} blocks\n", ())
        assert name in [entry.id for entry in client.cache.list("base").entries]
        with pytest.raises(NotFound, match="no model 'blue' here"):
            client.cache.drop([name], model="blue")
        client.unload_model("red")
        assert client.cache.drop([name]) == pages


def test_a_model_goes_only_where_another_one_serves(server: BackgroundServer) -> None:
    engines = server._server.engines
    engines.replace((*engines.names, "late"), {})  # as while a server starts
    try:
        with Client(server.address, timeout=PATIENCE, retries=False) as client:
            with pytest.raises(FailedPrecondition, match="'base' is the only model"):
                client.unload_model("base")
            with pytest.raises(Unavailable, match="the model 'late' is loading"):
                client.unload_model("late")
    finally:
        engines.replace(("base",), {})


def test_a_signal_ends_a_server_that_reads_a_model(folder: Path, tmp_path: Path) -> None:
    """Nothing can interrupt a thread that waits for a file."""
    slow = folder / "allowed/slow"
    slow.mkdir()
    os.mkfifo(slow / "config.json")
    options = ("--set", f"server.model_folder={slow.parent}")
    with (
        serving(tmp_path, *options) as running,
        ThreadPoolExecutor(1) as threads,
        Client(running.address, timeout=PATIENCE, retries=False) as client,
    ):
        asked = threads.submit(client.load_model, "slow")
        with (slow / "config.json").open("w"):  # once it is read
            running.process.send_signal(signal.SIGTERM)
            assert running.ends() == 0
        with pytest.raises(MMServeError):
            asked.result(PATIENCE)


def test_only_tenants_with_admin_load_and_only_from_a_folder(folder: Path) -> None:
    tokens = {"boss": "b" * 20, "guest": "g" * 20}
    for name, token in tokens.items():
        (folder / f"{name}.token").write_text(token)
    tenants = tuple(
        TenantConfig(name=name, token_file=str(folder / f"{name}.token"), admin=name == "boss") for name in tokens
    )
    config = replace(settings(), models=(ModelConfig(path=str(folder / "base")),), tenants=tenants)
    with BackgroundServer(replace(config, engine=EngineConfig(torch_threads=1, max_running=2))) as server:
        boss, guest = (Client(server.address, token=token, timeout=PATIENCE) for token in tokens.values())
        with boss, guest:
            for call in (lambda: guest.load_model("red"), lambda: guest.unload_model("base")):
                with pytest.raises(Unauthenticated, match="the tenant 'guest' may not load or unload models"):
                    call()
            with pytest.raises(Unimplemented, match=r"cannot be loaded at run time: \[server\] model_folder"):
                boss.load_model("red")

"""What a server keeps for later requests, over a socket: listed, pinned, dropped, warmed, and found after a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e_helpers import command_here, settings
from helpers import picture
from llama_checkpoints import Sighted
from PIL import Image
from prometheus_client import generate_latest

from mmserve.assembly import BackgroundServer
from mmserve.client import AsyncClient, Client, FailedPrecondition, NotFound, ResourceExhausted, Result, Unauthenticated
from mmserve.config import KVCacheConfig, ModelConfig, TenantConfig

LONG = "what is left of the red circle, and what is right of it? " * 5
PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Sighted(tmp_path_factory.mktemp("llava"), image_aspect_ratio="square").folder


@contextmanager
def served(
    folder: Path,
    kv: KVCacheConfig,
    tenants: tuple[TenantConfig, ...] = (),
    server: dict[str, object] | None = None,
    name: str = "m",
    **engine: object,
) -> Iterator[BackgroundServer]:
    models = (ModelConfig(path=str(folder), name=name),)
    config = settings(engine={"page_size": PAGE, **engine}, server=server)
    with BackgroundServer(replace(config, models=models, kv_cache=kv, tenants=tenants)) as running:
        yield running


def run_positions(result: Result) -> int:
    """Positions of the prompt that were run."""
    return result.usage.prompt_tokens - result.usage.cached_tokens


def test_a_server_answers_from_what_an_earlier_one_left_on_disk(folder: Path, tmp_path: Path) -> None:
    kv = KVCacheConfig(disk_folder=str(tmp_path))
    asked = [(LONG, ()), (f"{LONG} blue", (picture(1, (40, 40)),))]
    answers: list[list[Result]] = []
    for _ in range(2):
        with served(folder, kv) as server, Client(server.address, timeout=60) as client:
            answers.append(
                [client.generate(text, images=shown, max_new_tokens=8, tokens=True) for text, shown in asked]
            )
            found = {entry.id: set(entry.sizes) for entry in client.cache.list(kind="prefix").entries}
    assert [[r.tokens for r in each] for each in answers] == [[r.tokens for r in answers[0]]] * 2
    for before, after in zip(*answers, strict=True):
        assert run_positions(after) <= PAGE + 1 < run_positions(before)
    assert all(tiers >= {"disk", "pages"} for tiers in found.values()) and len(found) == 2
    with served(folder, kv, name="other") as server, Client(server.address, timeout=60) as client:
        left = client.cache.list().entries
        assert {(entry.id, entry.model, entry.stale) for entry in left} == {(each, "m", False) for each in found}
        assert client.generate(LONG, max_new_tokens=1).usage.cached_tokens, "it is the same model"
    with (
        served(folder, kv, name="third", prefill_tokens=64) as server,
        Client(server.address, timeout=60) as client,
    ):
        left = client.cache.list().entries
        assert {entry.id for entry in left} == {entry.id for entry in client.cache.list("m").entries} == set(found)
        assert all(entry.model == "m" and entry.stale and set(entry.sizes) == {"disk"} for entry in left)
        assert client.cache.list("third").entries == ()
        with pytest.raises(NotFound, match="no model 'nobody' here"):
            client.cache.list("nobody")
        one, another = sorted(found)
        client.generate(LONG, max_new_tokens=1)
        [own] = client.cache.list("third").entries
        assert own.id in found, "a prompt has the same id in every model"
        first, second = (own.id, one if own.id == another else another)
        assert client.cache.drop([first]) > 0 and not client.cache.list("third").entries
        assert {entry.id for entry in client.cache.list().entries} == set(found), "those of the model that serves"
        assert client.cache.pin([second]) == 0, "no request can use it"
        assert client.cache.drop([first, second]) > 0 and not client.cache.list().entries
    assert not list(tmp_path.glob("*.safetensors"))


def test_prompts_are_warmed_pinned_and_dropped(folder: Path, tmp_path: Path) -> None:
    kv = KVCacheConfig(host_bytes=1 << 20, disk_folder=str(tmp_path))
    with served(folder, kv, server={"metrics_port": 0}) as server, Client(server.address, timeout=60) as client:
        shown = (picture(2, (40, 40)),)
        warmed = client.cache.warm(LONG, shown, pin=True)
        result = client.generate(LONG, shown, max_new_tokens=4)
        assert warmed.cached_tokens == 0 < warmed.visual_tokens and warmed.prompt_tokens == result.usage.prompt_tokens
        assert result.usage.cached_tokens == (result.usage.prompt_tokens - 1) // PAGE * PAGE
        listed = {entry.kind: entry for entry in client.cache.list().entries}
        prefix, visual = listed["prefix"], listed["visual"]
        assert (prefix.id, prefix.pinned, prefix.tokens) == (warmed.id, True, result.usage.cached_tokens)
        assert set(prefix.sizes) == {"pages", "host", "disk"}
        assert (visual.tokens, set(visual.sizes)) == (warmed.visual_tokens, {"host"})
        done = command_here("cache", "list", "--server", server.address, "--json")
        assert {each["id"] for each in json.loads(done.stdout)["entries"]} == {prefix.id, visual.id}
        done = command_here("cache", "unpin", prefix.id[:12], "--server", server.address)
        assert done.stdout == f"unpin: {prefix.tokens // PAGE} blocks\n"
        assert asyncio.run(drop(server.address, [prefix.id, visual.id, "0" * 64])) == prefix.tokens // PAGE + 1
        assert client.cache.list().entries == () and not list(tmp_path.iterdir())
        assert client.generate(LONG, shown, max_new_tokens=4).usage.cached_tokens == 0


def test_warming_takes_what_a_request_takes_and_counts_as_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("one-token\n")
    tenants = (TenantConfig(name="one", token_file=str(tmp_path / "one"), rate=0.005, burst=1),)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    with served(folder, KVCacheConfig(), tenants) as server:
        client = Client(server.address, token="one-token", timeout=60, retries=False)
        assert client.cache.warm(LONG, (noise,)).visual_tokens > 0  # a message of more than 100 KB
        with pytest.raises(ResourceExhausted, match="rate"):
            client.cache.warm(LONG)
        with pytest.raises(ResourceExhausted, match="rate"):
            client.cache.list()  # asks the engine's thread, and reads the headers of all files


async def drop(address: str, ids: list[str]) -> int:
    async with AsyncClient(address, timeout=60) as client:
        assert len((await client.cache.list(kind="prefix")).entries) == 1
        return await client.cache.drop(ids)


def test_a_tenant_sees_its_own_and_only_an_admin_changes_anything(folder: Path, tmp_path: Path) -> None:
    names = ("boss", "one", "other")
    for name in names:
        (tmp_path / name).write_text(f"{name}-token\n")
    tenants = tuple(TenantConfig(name=n, token_file=str(tmp_path / n), admin=n == "boss") for n in names)
    with served(folder, KVCacheConfig(host_bytes=1 << 20), tenants) as server:
        clients = {n: Client(server.address, token=f"{n}-token", timeout=60) for n in names}
        warmed = clients["one"].cache.warm(LONG)
        assert clients["other"].generate(LONG, max_new_tokens=2).usage.cached_tokens == 0
        for n in ("one", "other"):
            assert [entry.tenant for entry in clients[n].cache.list().entries] == [n]
        assert {entry.tenant for entry in clients["boss"].cache.list().entries} == {"one", "other"}
        for refused in (clients["one"].cache.pin, clients["one"].cache.unpin, clients["one"].cache.drop):
            with pytest.raises(Unauthenticated, match=r"admin = true in \[\[tenants\]\]$"):
                refused([warmed.id])
        with pytest.raises(Unauthenticated, match="admin"):
            clients["one"].cache.warm(LONG, pin=True)
        assert clients["boss"].cache.drop([warmed.id]) == (warmed.prompt_tokens - 1) // PAGE
        assert clients["one"].cache.list().entries == () != clients["other"].cache.list().entries
        for client in clients.values():
            client.close()


def test_nothing_beyond_the_pool_pins_nothing_and_metrics_count_by_tier(folder: Path, tmp_path: Path) -> None:
    with served(folder, KVCacheConfig()) as server, Client(server.address, timeout=60) as client:
        warmed = client.cache.warm(LONG)
        with pytest.raises(FailedPrecondition, match=r"\[kv_cache\] host_bytes"):
            client.cache.pin([warmed.id])
        assert client.cache.pin(["f" * 64]) == 0
    kv = KVCacheConfig(disk_folder=str(tmp_path))
    for _ in range(2):
        with served(folder, kv) as server, Client(server.address, timeout=60) as client:
            client.generate(LONG, max_new_tokens=2)
            text = generate_latest(server._server.metrics.served).decode()
    pages = (warmed.prompt_tokens - 1) // PAGE
    assert f'mmserve:prefix_tier_hits_total{{tier="disk"}} {pages}.0' in text
    assert "mmserve:prefix_tier_misses_total 0.0" in text and 'mmserve:prefix_tier_bytes{tier="disk"} ' in text

"""The prefix cache as a client sees it: prompts that begin alike are not run again, and the answers are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_helpers import EMPTY, command_here, settings, wait_for
from helpers import picture
from llama_checkpoints import Sighted

from mmserve.assembly import BackgroundServer
from mmserve.client import Client
from mmserve.config import ModelConfig

LONG = "what is left of the red circle, and what is right of it? " * 3
PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Sighted(tmp_path_factory.mktemp("llava"), image_aspect_ratio="square").folder


@contextmanager
def served(folder: Path, **engine: object) -> Iterator[tuple[BackgroundServer, Client]]:
    config = replace(settings(engine={"page_size": PAGE, **engine}), models=(ModelConfig(path=str(folder), name="m"),))
    with BackgroundServer(config) as server, Client(server.address, timeout=30) as client:
        yield server, client


def test_a_long_prompt_that_comes_again_is_taken_from_the_cache(folder: Path) -> None:
    with served(folder) as (server, client):
        first, second = (client.generate(LONG, max_new_tokens=12) for _ in range(2))
        prompt = first.usage.prompt_tokens
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, (prompt - 1) // PAGE * PAGE)
        assert second.usage.cached_tokens > 0
        assert (second.text, second.forwards) == (first.text, first.forwards)
        assert first.recomputed_tokens - second.recomputed_tokens == second.usage.cached_tokens
        done = command_here("generate", LONG, "--server", server.address, "--json", "--max-new-tokens", "12")
        told = json.loads(done.stdout)
        assert told["text"] == first.text and told["usage"]["cached_tokens"] == second.usage.cached_tokens
        engine = server.engines["m"]
        wait_for("an empty engine", lambda: engine.stats() == EMPTY)
        assert engine.stats().cached_pages == (prompt - 1) // PAGE


def test_it_can_be_switched_off(folder: Path) -> None:
    with served(folder, prefix_cache=False) as (server, client):
        assert [client.generate(LONG, max_new_tokens=4).usage.cached_tokens for _ in range(2)] == [0, 0]
        assert server.engines["m"].stats().cached_pages == 0


def test_clients_at_once_with_pictures_get_the_answers_they_get_without_a_cache(folder: Path) -> None:
    """Each picture is asked about by several, and the pool holds two requests: pages are shared and given up all the
    time."""
    asks = [(f"{LONG[: 40 + 30 * (i % 3)]}", (picture(i % 5, (40, 40)),)) for i in range(24)]

    def one(client: Client, ask: tuple[str, tuple[bytes, ...]]) -> tuple[str, int]:
        result = client.generate(ask[0], images=ask[1], max_new_tokens=6)
        assert result.usage.cached_tokens + result.recomputed_tokens == result.usage.prompt_tokens + result.forwards - 1
        return result.text, result.forwards

    with served(folder, prefix_cache=False) as (_server, client):
        expected = [one(client, ask) for ask in asks]
    assert len(set(expected)) > 5
    with served(folder, max_tokens=160, pages=20) as (server, client), ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda ask: one(client, ask), asks * 2)) == expected * 2
        engine = server.engines["m"]
        assert engine.stats().prefix_hits > 0
        wait_for("an empty engine", lambda: engine.stats() == EMPTY)

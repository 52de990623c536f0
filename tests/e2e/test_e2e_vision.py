"""Pruned and cached visual tokens through the whole server: what clients say of them, and many clients at once."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_helpers import Running, command_here, running, settings

import mmserve.bench.vision
from mmserve.cli import main
from mmserve.client import Client, LegoLink
from mmserve.config import Config, EncoderCacheConfig
from mmserve.errors import InvalidArgument
from mmserve.reference.clips import draw_clip, h264
from mmserve.reference.scenes import draw_scene

QUESTIONS = ("How many shapes are there?", "What is left of the circle?", "What colour is the square?")


def scene(seed: int) -> bytes:
    return draw_scene(random.Random(seed)).png()


def test_pruners_of_the_bundled_model(server: Running) -> None:
    info = server.client.describe()
    assert info.pruners[0] == "none" and len(info.pruners) == 11
    plain = server.client.generate(QUESTIONS[0], images=[scene(1)], max_new_tokens=8)
    assert (plain.usage.visual_tokens, plain.usage.visual_tokens_before) == (81, 81)
    for pruner in info.pruners[1:]:
        less = server.client.generate(QUESTIONS[0], [scene(1)], max_new_tokens=8, pruner=pruner, keep_ratio=0.25)
        assert less.usage.visual_tokens_before == 81 and 1 <= less.usage.visual_tokens <= 20
        assert plain.usage.prompt_tokens - less.usage.prompt_tokens == 81 - less.usage.visual_tokens
        whole = server.client.generate(QUESTIONS[0], [scene(1)], max_new_tokens=8, pruner=pruner, keep_ratio=1.0)
        assert (whole.text, whole.usage, whole.forwards) == (plain.text, plain.usage, plain.forwards)


def test_a_clip_through_the_client(server: Running) -> None:
    film = h264(draw_clip(random.Random(3)).frames())
    whole = server.client.generate("What happens?", videos=[film], max_new_tokens=8)
    less = server.client.generate("What happens?", videos=[film], max_new_tokens=8, pruner="hired", token_budget=24)
    assert (whole.usage.visual_tokens, less.usage.visual_tokens, less.usage.visual_tokens_before) == (72, 24, 72)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"pruner": "random", "keep_ratio": 0.0}, "vision.keep_ratio"),
        ({"pruner": "random", "keep_ratio": 1.01}, "vision.keep_ratio"),
        ({"pruner": "random", "keep_ratio": float("nan")}, "vision.keep_ratio"),
        ({"pruner": "random", "token_budget": 0}, "vision.token_budget"),
        ({"pruner": "cls_attention", "attention_mass": -1.0}, "vision.attention_mass"),
        ({"pruner": "random"}, "vision"),
        ({"pruner": "tome", "attention_mass": 0.5}, "vision.attention_mass"),
        ({"keep_ratio": 0.5}, "vision.keep_ratio"),
        ({"pruner": "best", "keep_ratio": 0.5}, "vision.pruner"),
        ({"pruner": "random", "token_budget": -1}, "vision.token_budget"),
        ({"pruner": "random", "keep_ratio": 0.5, "token_budget": 4}, "vision"),
    ],
)
def test_amounts_that_make_no_sense(server: Running, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        server.client.generate(QUESTIONS[0], images=[scene(1)], **options)
    assert [v.field for v in raised.value.violations] == [field]


def test_the_command_line_prunes(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "scene.png"
    path.write_bytes(scene(2))
    given = ("--image", str(path), "--server", server.address, "--json", "--max-new-tokens", "4")
    done = command_here("generate", QUESTIONS[0], *given, "--pruner", "cls_attention", "--keep-ratio", "0.25")
    assert done.returncode == 0, done.stderr
    usage = json.loads(done.stdout)["usage"]
    assert (usage["visual_tokens"], usage["visual_tokens_before"]) == (20, 81)


def test_the_vision_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = {"lego_link": LegoLink()}
    for name, value in {"RATIOS": (0.5,), "SCORING_ROUNDS": 2, "REUSING": rules}.items():
        monkeypatch.setattr(mmserve.bench.vision, name, value)
    plot = tmp_path / "pruners.png"
    given = ("--limit", "2", "--tasks", "what", "--commit", "threshold", "--set", "engine.torch_threads=1", "--json")
    assert main(["bench", "vision", *given, "--plot", str(plot)]) == 0
    report = json.loads(capsys.readouterr().out)
    whole, *rows = report["rows"]
    assert (report["bench"], whole["pruner"], whole["visual_tokens"], len(rows)) == ("vision", "none", 81.0, 10)
    for row in rows:
        assert row["visual_tokens"] == 41 or row["pruner"] in ("resize", "mustdrop", "hired")
        assert row["kv_bytes"] < whole["kv_bytes"] and 0 <= row["accuracy"] <= 1
        assert (row["scored_by"] == "decoder") == (row["pruner"] in ("fastv", "redvtp"))
    for again in (report["again"], *report["again_reusing"].values()):
        assert again["encoded"] == again["pictures"] == 2 and 0 <= again["accuracy"] <= 1
    assert list(report["again_reusing"]) == ["lego_link"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    given = ("--limit", "2", "--tasks", "what", "--model", "bundled-causal", "--concurrent", "2", "--json")
    assert main(["bench", "vision", *given, "--pruners", "heavy_hitters,visual_cache,fastv"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["pruner"] for row in report["rows"]] == ["none", "fastv"]
    assert [row["kv_reduction"] for row in report["kv_reductions"]] == ["heavy_hitters", "visual_cache"]
    assert all(row["kv_positions"] < row["kv_positions_unreduced"] for row in report["kv_reductions"])
    assert main(["bench", "vision", "--tasks", "arithmetic"]) == 1
    assert "--tasks: 'arithmetic' is not one of count" in capsys.readouterr().err


# --- many clients ---


def with_cache(**cache: int) -> Config:
    plain = settings(engine={"max_queued": 4096})
    return Config(server=plain.server, engine=plain.engine, encoder_cache=EncoderCacheConfig(**cache))


@pytest.fixture(scope="module")
def entry_bytes() -> int:
    """What an image of the bundled model takes: 81 tokens of 256 numbers, their row of ids, places in it, and grids."""
    return 81 * 256 * 4 + 81 * 8 + 81 * 8 + 81 * 8


def storm(server: Running, *, requests: int, images: int, clients: int, bound: int) -> list[str]:
    """Questions about few images from many clients, in an order drawn by chance; the bytes kept are watched."""
    cache, ended = server.engine.stages.encoder.cache.tokens, threading.Event()
    most = 0

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, cache.stats().used_bytes)

    pictures = [scene(100 + i) for i in range(images)]
    order = [(QUESTIONS[i % 3], pictures[i % images]) for i in range(requests)]

    def client(mine: list[int]) -> Iterator[tuple[int, str]]:
        with Client(server.address, timeout=600) as asked:
            for i in mine:
                yield i, asked.generate(order[i][0], images=[order[i][1]], max_new_tokens=4, steps=1).text

    shuffled = random.Random(0).sample(range(requests), requests)
    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(clients) as pool:
        parts = [shuffled[c::clients] for c in range(clients)]
        answers = dict(pair for part in pool.map(lambda mine: list(client(mine)), parts) for pair in part)
    ended.set()
    watcher.join()
    assert max(most, cache.stats().used_bytes) <= bound
    return [answers[i] for i in range(requests)]


def check_storm(entry: int, *, requests: int, images: int, clients: int) -> None:
    sizes = {"requests": requests, "images": images, "clients": clients}
    with running(with_cache(token_bytes=0, pixel_bytes=0)) as plain:
        questions = {(i % 3, i % images): i for i in range(requests)}
        right = {
            pair: plain.client.generate(QUESTIONS[pair[0]], [scene(100 + pair[1])], max_new_tokens=4, steps=1).text
            for pair in questions
        }
    expected = [right[i % 3, i % images] for i in range(requests)]
    assert len(set(expected)) > 3
    with running(with_cache(token_bytes=images * entry)) as large:
        assert storm(large, **sizes, bound=images * entry) == expected
        stats = large.engine.stats().token_cache
        assert (stats.made, stats.entries, stats.used_bytes) == (images, images, images * entry)
        assert stats.lookups == requests and stats.evicted == 0
    with running(with_cache(token_bytes=images * entry // 10, pixel_bytes=0)) as small:
        assert storm(small, **sizes, bound=images * entry // 10) == expected
        assert small.engine.stats().token_cache.evicted > 0


def test_each_image_is_encoded_once_however_many_ask(entry_bytes: int) -> None:
    check_storm(entry_bytes, requests=36, images=12, clients=16)


@pytest.mark.slow
def test_a_thousand_requests_over_fifty_images_from_32_clients(entry_bytes: int) -> None:
    check_storm(entry_bytes, requests=1000, images=50, clients=32)

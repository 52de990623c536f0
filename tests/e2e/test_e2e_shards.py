"""The images of one request on several encode workers of a real Ray cluster: the tokens of one process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fleets import RECOMPUTE, finished, fleet, kill, same, start_ray, submit, until
from helpers import ask, picture

from mmserve.assembly import build_engines
from mmserve.cluster import ray_actors
from mmserve.cluster.fleet import Fleet
from mmserve.config import Config, EngineConfig, ModelConfig
from mmserve.core.events import Failed, Finished
from mmserve.core.request import Policy, Request
from mmserve.errors import InvalidArgument

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::ResourceWarning")]
NAME, IMAGES = "reference-causal", 6


@pytest.fixture(scope="module")
def config() -> Config:
    engine = EngineConfig(max_tokens=1024, max_running=4, torch_threads=1)
    return Config(models=(ModelConfig(path="bundled-causal"),), engine=engine)


@pytest.fixture(scope="module")
def made(config: Config) -> Iterator[Fleet]:
    start_ray()
    try:
        with fleet(config, "e e pd", shard_pixels=1, silent_seconds=300.0) as found:
            yield found
    finally:
        ray_actors.end()


def request(name: str, first: int, broken: int | None = None) -> Request:
    """About pictures of several sizes, of which one may be no picture."""
    images = [picture(first + i, (40 + 10 * i, 50)) for i in range(IMAGES)]
    if broken is not None:
        images[broken] = b"\x89PNG\r\n\x1a\n" + bytes(40)
    made = ask(name, "What is in them?", images=tuple(images), max_new_tokens=8, recompute=Policy(name=RECOMPUTE[NAME]))
    return replace(made, model=NAME, streaming=replace(made.streaming, tokens=True))


def alone(config: Config, asked: Request) -> Finished:
    """The answer of one process."""
    [engine] = build_engines(config).values()
    engine.start()
    try:
        return finished(submit(engine, asked)[0])
    finally:
        engine.stop()


def made_by(found: Fleet) -> dict[str, int]:
    """Images that each worker's tower has seen."""
    stats = dict(found.coordinators[NAME]._stats)
    return {name: each.token_cache.made for name, each in stats.items()}


def test_images_go_to_both_encode_workers_and_come_together_in_order(made: Fleet, config: Config) -> None:
    asked = request("shared", 100)
    before = made_by(made)
    [call] = submit(made.coordinators[NAME], asked)
    same(alone(config, asked), finished(call))

    def counts() -> list[int]:
        return sorted(count - before.get(name, 0) for name, count in made_by(made).items())

    until(lambda: sum(counts()) == IMAGES, "all images to be counted")
    assert counts() == [0, IMAGES // 2, IMAGES // 2]


def test_a_broken_image_fails_its_request_as_in_one_process(made: Fleet, config: Config) -> None:
    calls = submit(made.coordinators[NAME], request("broken", 200, broken=4), request("beside", 300))
    until(lambda: calls[0].ended, "the end of it")
    last = calls[0].wait()
    assert isinstance(last, Failed) and isinstance(last.error, InvalidArgument), last
    same(alone(config, request("beside", 300)), finished(calls[1]))


def test_a_worker_that_is_lost_has_its_share_encoded_again(made: Fleet, config: Config) -> None:
    """The one that is stopped has its share and never ends it; then it is killed."""
    asked = request("lost", 400)
    coordinator = made.coordinators[NAME]
    until(lambda: len(coordinator._workers) == 3, "all workers")
    before = made_by(made)
    kill(made, 1, signal.SIGSTOP)
    [call] = submit(coordinator, asked)
    group = coordinator._groups[asked.id]
    until(lambda: sum(bool(part.shard) for part in group.parts.values()) == 1, "the other's share to be done")
    kill(made, 1)
    same(alone(config, asked), finished(call))
    until(lambda: sum(n - before.get(name, 0) for name, n in made_by(made).items()) == IMAGES, "each image once")

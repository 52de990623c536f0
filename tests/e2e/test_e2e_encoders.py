"""Images of one request, and sessions of video, on encode workers of a real Ray cluster: the tokens of one process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from clips import clip
from fleets import PATIENCE, RECOMPUTE, finished, fleet, kill, same, start_ray, submit, until
from helpers import ask, picture

sys.path.insert(0, str(Path(__file__).parents[1] / "rpc"))
from echo_server import threaded
from video_client import picture as drawn
from video_client import sdk

from mmserve.assembly import build_engines
from mmserve.cluster import ray_actors
from mmserve.cluster.fleet import Fleet
from mmserve.cluster.in_flight import Report
from mmserve.cluster.messages import Moved
from mmserve.cluster.requests import Group, Part
from mmserve.config import Config, EngineConfig, ModelConfig
from mmserve.core.events import Failed, Finished
from mmserve.core.request import Message, Policy, Request, TextPart, VideoPart
from mmserve.errors import FailedPrecondition, InvalidArgument, NotFound

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::ResourceWarning")]
NAME, IMAGES = "bundled-causal", 6


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
    return {name: each.token_cache.made for name, each in found.coordinators[NAME].stats_of_workers().items()}


def test_images_go_to_both_encode_workers_and_come_together_in_order(made: Fleet, config: Config) -> None:
    asked = request("shared", 100)
    before = made_by(made)
    [call] = submit(made.coordinators[NAME], asked)
    same(alone(config, asked), finished(call))

    def counts() -> list[int]:
        return sorted(count - before.get(name, 0) for name, count in made_by(made).items())

    until(lambda: sum(counts()) == IMAGES, "all images to be counted")
    assert counts() == [0, IMAGES // 2, IMAGES // 2]


def test_a_clip_is_encoded_by_both_workers(made: Fleet, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each encodes a part of its frames; the parts come together where the prompt is made."""
    parts = (VideoPart(clip(frames=40, rate=5)), TextPart("What moves?"))
    asked = replace(request("clip", 0), messages=(Message("user", parts),))
    coordinator = made.coordinators[NAME]
    ended: list[tuple[int, type]] = []
    in_flight = coordinator._in_flight
    shard_ended = in_flight._shard_ended

    def noted(group: Group, shard: Part, item: Report) -> None:
        ended.append((shard.shard[0].part, type(item)))
        shard_ended(group, shard, item)

    monkeypatch.setattr(in_flight, "_shard_ended", noted)
    [call] = submit(coordinator, asked)
    done = finished(call)
    same(alone(config, asked), done)
    assert done.usage.visual_tokens > 0 and sorted(ended, key=lambda each: each[0]) == [(0, Moved), (1, Moved)]


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
    until(lambda: all(member.described for member in made.members), "all workers")
    before = made_by(made)
    kill(made, 1, signal.SIGSTOP)
    [call] = submit(coordinator, asked)
    group = coordinator._in_flight.groups[asked.id]
    until(lambda: sum(bool(part.shard) for part in group.parts.values()) == 1, "the other's share to be done")
    kill(made, 1)
    same(alone(config, asked), finished(call))
    until(lambda: sum(n - before.get(name, 0) for name, n in made_by(made).items()) == IMAGES, "each image once")


# --- sessions of video ---


@pytest.fixture
def front(made: Fleet, config: Config) -> Iterator[str]:
    """The address of a server whose model is on the cluster."""
    until(lambda: all(member.described for member in made.members), "all workers")
    coordinator = made.coordinators[NAME]
    with threaded({NAME: coordinator}, served(config)) as address:  # type: ignore[dict-item]
        yield address
    coordinator.start()  # the server has stopped it


def served(config: Config) -> Config:
    return replace(config, server=replace(config.server, port=0))


def watched(address: str) -> tuple[list[object], list[float]]:
    """What a session answers: questions about all and about some of its frames, after each; and when an alert began."""
    found: list[object] = []
    with sdk(address) as client, client.video_session(budget=200) as session:
        alerts = session.watch("Is there a circle?", on=1e-6, off=0.0, min_mass=0.0)
        for number in range(4):
            session.push(drawn(number), float(number))
            questions = [
                session.stream("What is it?", max_new_tokens=8, tokens=True),
                session.stream("And before?", scope=(None, 1.0), max_new_tokens=8, temperature=0.9, seed=number),
            ]
            for question in questions:
                result = question.result()
                assert question.asked is not None
                found.append((result.text, result.tokens, result.usage.prompt_tokens, question.asked.frames))
        alert = alerts.next(PATIENCE)
        assert alert is not None
        statistics = session.statistics()
        assert (statistics.frames_taken, statistics.pushes_failed, statistics.questions) == (4, 0, 8)
        found.append((statistics.kept_rows, statistics.kv_bytes))
    return found, [alert.seconds, alert.probability]


def test_a_session_has_its_frames_on_a_worker_and_the_answers_of_one_process(
    front: str, made: Fleet, config: Config
) -> None:
    engines = build_engines(config)
    with threaded(engines, served(config)) as address:  # type: ignore[arg-type]
        alone, alert = watched(address)
    together, same_alert = watched(front)
    assert together == alone
    assert same_alert == pytest.approx(alert, abs=1e-5)
    ran = {(name, stage) for (stage, _size), means in made._pace._means.items() for name in means}
    assert {name for name, stage in ran if stage in ("prefill", "decode")} == {made.members[2].name}, "K/V travel"
    with sdk(front) as client:
        assert client.describe().sessions
        with client.video_session(budget=64) as session:
            with pytest.raises(FailedPrecondition, match="no frame"):
                session.ask("What is it?")
            session.push(drawn(0), 5.0)
            session.push(drawn(1), 4.0)
            with pytest.raises(NotFound, match="no adapter 'red'"):
                session.ask("What is it?", adapter="red")
            statistics = session.statistics()
            [failed] = session.push_failures
            assert statistics.pushes_failed == 1 and isinstance(failed.error, InvalidArgument)


def test_a_session_goes_on_after_the_worker_that_keeps_its_frames(front: str, made: Fleet) -> None:
    with sdk(front) as client, client.video_session(budget=64) as other:
        other.push(drawn(0), 0.0)
        assert other.ask("What is it?", max_new_tokens=4).text
        streams = made.coordinators[NAME]._streams
        assert streams is not None
        [kept] = streams._streams.values()
        with client.video_session(budget=64) as session:
            session.push(drawn(0), 0.0)
            session.ask("What is it?", max_new_tokens=4)
            homes = {stream.worker for stream in streams._streams.values()}
            assert len(homes) == 2, "each on the worker with fewer of them"
            [lost] = homes - {kept.worker}
            kill(made, next(member.index for member in made.members if member.name == lost))
            for number in range(1, 4):
                session.push(drawn(number), float(number))
                assert session.ask("What is it?", max_new_tokens=4).text
        other.push(drawn(2), 1.0)
        assert other.ask("What is it?", max_new_tokens=4).text
    until(lambda: all(member.described for member in made.members), "the worker's successor")

"""Sessions' streams on real workers that end, or change their roles, at any moment: answers as of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from harness import PATIENCE, Call, eventually
from helpers import ask, picture
from local_workers import LocalWorker, local_cluster
from PIL import Image

from mmserve.assembly import build_engines
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.coordinator import Coordinator
from mmserve.config import Config, EngineConfig, ModelConfig
from mmserve.core.request import Policy, Request
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import ANONYMOUS
from mmserve.video.base import EncodedFrame, Frame, Stream, Streams
from mmserve.video.standing import StandingQuestion
from mmserve.video.streams import EngineStreams

pytestmark = [pytest.mark.timeout(300)]

ALL = ("encode", "prefill", "decode")
MEMORY = Memory(budget=100)
MODELS = {"bundled": ("bundled", "none"), "bundled-causal": ("bundled-causal", "last")}
CIRCLE = StandingQuestion("Is there a circle?")


def settings(path: str) -> Config:
    engine = EngineConfig(max_tokens=512, max_running=8, torch_threads=1)
    return Config(models=(ModelConfig(path=path),), engine=engine)


def frame(number: int) -> Frame:
    pixels = np.random.default_rng(number).integers(0, 256, (72, 72, 3), dtype=np.uint8)
    return Frame(float(number), Image.fromarray(pixels))


def question(path: str, name: str, adapter: str) -> Request:
    model, recompute = MODELS[path]
    asked = ask(name, "What is there?", max_new_tokens=10, recompute=Policy(name=recompute), temperature=0.7, seed=5)
    asked = dataclasses.replace(asked, model=model, adapter=adapter)
    return dataclasses.replace(asked, streaming=dataclasses.replace(asked.streaming, tokens=True))


class Session:
    """A stream that is given frames, and asked about them; its answers."""

    def __init__(self, path: str, streams: Streams, name: str) -> None:
        self.path, self.streams, self.name = path, streams, name
        self.stream: Stream = streams.open(MEMORY, ANONYMOUS)
        self.frames: list[Future[EncodedFrame]] = []
        self.calls: list[tuple[Call, Asked]] = []

    def see(self, count: int, wait: bool = True) -> None:
        for _ in range(count):
            self.frames.append(self.stream.append(frame(len(self.frames))))
            if wait:
                self.frames[-1].result(PATIENCE)

    def ask(self) -> None:
        for each in self.frames:  # as a session does
            each.result(PATIENCE)
        adapter = self.streams.adapter_for("")
        call = Call(question(self.path, f"{self.name}.{len(self.calls)}", adapter))
        self.calls.append((call, self.stream.ask(call.request, None, call.sink)))

    def answers(self) -> list[Any]:
        return [([token.id for token in call.finished().tokens], asked) for call, asked in self.calls]

    def play(self, between: Callable[[int], None] = lambda _step: None) -> Any:
        """The same frames and questions in any case; ``between`` is called after every few of them."""
        steps = (
            lambda: self.see(5),
            self.ask,
            lambda: self.see(6, wait=False),
            self.ask,
            lambda: self.see(3, wait=False),
            lambda: self.see(2),
            self.ask,
        )
        for number, step in enumerate(steps):
            step()
            between(number)
        seen = [each.result(PATIENCE).seconds for each in self.frames]
        found = self.answers(), seen, self.stream.stats()
        self.stream.close()
        return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The answers of a session in one process, by model, and of a standing question about its frames."""
    found = {}
    for path in MODELS:
        [engine] = build_engines(settings(path)).values()
        engine.start()
        streams = EngineStreams(engine)
        session = Session(path, streams, "alone")
        found[path] = session.play()
        streams.stop()
        engine.stop()
    assert all(stats.evicted_rows for _answers, _seen, stats in found.values())
    return found


@pytest.mark.parametrize("path", MODELS)
def test_a_session_outlives_its_workers(alone: dict[str, Any], path: str) -> None:
    """Each worker that keeps it is killed, one after another, with frames and questions under way."""
    config = settings(path)
    workers = [LocalWorker(f"{i}", ALL, config) for i in range(4)]
    left = list(workers)
    with local_cluster(config, ClusterSettings(save_frames=3), *workers) as made:
        streams = made.session_parts(config).streams
        session = Session(path, streams, "moved")

        def kill(step: int) -> None:
            if step in (0, 1, 2):
                stream: Any = session.stream
                eventually(lambda: stream.worker in {worker.name for worker in left}, "it to be on another worker")
                [owner] = [worker for worker in left if worker.name == stream.worker]
                left.remove(owner)
                owner.kill()

        assert session.play(kill) == alone[path]
        assert len(left) == 1
        streams.stop()


@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
def test_states_of_requests_and_sessions_may_go_by_nixl(alone: dict[str, Any]) -> None:
    path = "bundled-causal"
    config = settings(path)
    workers = [LocalWorker(f"{i}", roles, config, "nixl") for i, roles in enumerate((ALL, ALL, ("prefill",)))]
    with local_cluster(config, ClusterSettings(save_frames=3, transport="nixl"), *workers) as made:
        streams = made.session_parts(config).streams
        session = Session(path, streams, "moved")

        def kill(step: int) -> None:
            if step == 1:
                next(worker for worker in workers if worker.name == session.stream.worker).kill()  # type: ignore[attr-defined]

        assert session.play(kill) == alone[path]
        streams.stop()


def test_a_session_follows_the_role_of_encoding(alone: dict[str, Any]) -> None:
    path = "bundled-causal"
    config = settings(path)
    workers = [LocalWorker(f"{i}", ALL, config) for i in range(2)]
    with local_cluster(config, ClusterSettings(save_frames=4), *workers) as made:
        streams = made.session_parts(config).streams
        session, seen_at = Session(path, streams, "switched"), set()
        judge: Any = streams

        def switch(step: int) -> None:
            owner = session.stream.worker  # type: ignore[attr-defined]
            seen_at.add(owner)
            for worker in workers:
                worker.serve(("prefill", "decode") if worker.name == owner else ALL)
            made.worker_ready(workers[0])
            if step == 3:
                [judged] = judge.judge(session.frames[-1].result(PATIENCE), [CIRCLE])
                assert sum(judged.probabilities) == pytest.approx(1.0)

            def moved() -> bool:
                made.tick(0.0)  # as a fleet does all the time
                return bool(session.stream.worker != owner)  # type: ignore[attr-defined]

            eventually(moved, "the session to move")

        assert session.play(switch) == alone[path]
        assert seen_at == {"0", "1"}
        streams.stop()


def test_a_standing_question_is_answered_about_a_frame_whose_worker_has_ended() -> None:
    path = "bundled-causal"
    config = settings(path)
    workers = [LocalWorker(f"{i}", ALL, config) for i in range(2)]
    with local_cluster(config, ClusterSettings(save_frames=2), *workers) as made:
        streams: Any = made.session_parts(config).streams
        session = Session(path, streams, "judged")
        session.see(4)
        frames = [each.result(PATIENCE) for each in session.frames[-2:]]
        before = [streams.judge(each, [CIRCLE]) for each in frames]
        next(worker for worker in workers if worker.name == session.stream.worker).kill()  # type: ignore[attr-defined]
        assert [streams.judge(each, [CIRCLE]) for each in frames] == before
        streams.stop()


def test_a_request_may_name_an_adapter_of_the_checkpoint_on_a_cluster() -> None:
    config = settings("bundled")
    worker = LocalWorker("0", ALL, config)
    with local_cluster(config, ClusterSettings(), worker) as made:
        assert [each.name for each in made.adapters.listed()] == ["decisions", "streams", "tools"]
        streams: Streams = made.session_parts(config).streams
        assert streams.adapter_for("") == "streams" and streams.adapter_for("other") == "other"
        asked = ask("plain", "What is it?", images=(picture(3),), max_new_tokens=8, recompute=Policy(name="none"))
        asked = dataclasses.replace(asked, model="bundled", streaming=dataclasses.replace(asked.streaming, tokens=True))
        calls = [submit(made, each) for each in (asked, dataclasses.replace(asked, id="adapted", adapter="streams"))]
        plain, adapted = (call.finished().tokens for call in calls)
        assert plain and plain != adapted
        made.adapters.drop("streams")
        assert streams.adapter_for("") == ""
        assert [each.name for each in made.adapters.listed()] == ["decisions", "tools"]
        streams.stop()


def submit(made: Coordinator, request: Request) -> Call:
    call = Call(request)
    made.submit(request, call.sink)
    return call

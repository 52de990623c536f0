"""A session's stream among workers that by chance end, or encode no more: each frame is in once and in its order,
wherever the stream goes on, and each question sees the frames that were there when it was asked."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_workers import MODEL, PATIENCE, PayloadStore, Worker, coordinator, finish, join
from harness import Call, eventually
from helpers import ask
from PIL import Image

from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.messages import Appended, Item, Moved, Order, StreamSaved
from mmserve.config import Config
from mmserve.core.events import Failed
from mmserve.core.request import Stage
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.errors import FailedPrecondition
from mmserve.video.base import Frame
from mmserve.video.support import SessionSupport

ENCODES, RUNS = frozenset({"encode"}), frozenset({"prefill", "decode"})


class Encoder(Worker):
    """Takes frames in as they come, and reports that later; a state is the frames that are in it."""

    def __init__(self, name: str, seen: dict[str, list[int]]) -> None:
        super().__init__(name, ENCODES)
        self.dead, self.wrong = False, list[str]()
        self.streams: dict[str, list[int]] = {}
        self.reports: deque[Item] = deque()
        self._seen, self._one = seen, threading.Lock()

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        with self._one:
            if self.dead:
                raise WorkerEnded("it has ended")
            return self._answered(question, *arguments)

    def post(self, model: str, question: str, arguments: Sequence[Any]) -> None:
        with self._one:
            if not self.dead:
                self._answered(question, *arguments)

    def _answered(self, question: str, name: str, *given: Any) -> Any:
        if question == "stream.open":
            self.streams[name] = [] if given[-1] is None else [int(each) for each in given[-1].split("/")[0].split(",")]
            return 0
        frames = self.streams.get(name)
        if question == "stream.close":
            self.streams.pop(name, None)
        elif frames is None:
            if question == "stream.ask":
                raise FailedPrecondition("the stream is closed")
        elif question == "stream.append":
            if given[0] != len(frames) + 1:
                self.wrong.append(f"frame {given[0]} came after {frames}")
            frames.append(given[0])
            self.reports.append(Appended(MODEL, name, given[0], None))
        elif question == "stream.save":
            state = ",".join(map(str, frames)) + f"/{self.name}.{time.monotonic_ns()}"
            self.reports.append(StreamSaved(MODEL, name, len(frames), state))
        elif question == "stream.ask":
            order: Order = given[0]
            self._seen.setdefault(order.key, []).append(len(frames))
            handover = replace(order.handover, stage=Stage.ENCODED)
            self.reports.append(Moved(MODEL, order.key, order.sample, handover, f"{order.key} {self.name}", False))
            return Asked(len(frames), 0.0, 1.0, 0)
        return None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(8))
def test_frames_are_in_once_and_questions_see_those_before_them(seed: int) -> None:
    chance, payloads, seen = random.Random(seed), PayloadStore(), dict[str, list[int]]()
    rest = Encoder("rest", seen)  # which keeps the stream only while no other one can
    rest.roles = RUNS
    first = Encoder("e0", seen)
    settings = ClusterSettings(save_frames=3, max_losses=10_000, shard_pixels=0)
    made = coordinator(first, rest, support=SessionSupport(), settings=settings, payloads=payloads, max_running=100)
    streams = made.session_parts(Config()).streams
    stream = streams.open(Memory(), Tenant())
    encoders, every, over = [first], [first, rest], threading.Event()
    join(made, second := Encoder("e1", seen))
    encoders.append(second)
    every.append(second)

    def report() -> None:
        """As the threads that read reports of workers; some of a worker's reports are lost where it ends."""
        mine, answered = random.Random(seed + 1), 0
        while not over.is_set():
            for one in [*encoders, rest]:
                while one.reports and mine.random() < 0.8:
                    made.take(one.name, [one.reports.popleft()])
            while answered < len(rest.orders):
                finish(made, rest, rest.orders[answered].key)
                answered += 1
            made.tick(0.0)
            time.sleep(0.001)

    reporting = threading.Thread(target=report)
    reporting.start()
    futures, calls, expected = [], list[Call](), dict[str, int]()
    try:
        for _turn in range(150):
            kind = chance.random()
            if kind < 0.5:
                futures.append(stream.append(Frame(float(len(futures)), Image.new("RGB", (2, 2)))))
            elif kind < 0.65 and futures:
                call = Call(ask(f"q{len(calls)}"))
                expected[call.request.id] = len(futures)
                stream.ask(call.request, None, call.sink)
                calls.append(call)
            elif kind < 0.8:
                gone = encoders.pop(chance.randrange(len(encoders)))
                with gone._one:
                    gone.dead = True
                made.worker_exited(gone.name)
                join(made, fresh := Encoder(f"e{len(every)}", seen))
                encoders.append(fresh)
                every.append(fresh)
            elif kind < 0.9:
                one = chance.choice(encoders)
                others = any("encode" in each.roles for each in encoders if each is not one)
                one.serve(ENCODES if "encode" not in one.roles or not others else RUNS - {"prefill"})
            time.sleep(chance.random() * 0.003)
        assert [each.result(PATIENCE).seconds for each in futures] == [float(i) for i in range(len(futures))]
        for call in calls:
            eventually(lambda call=call: call.ended, f"the end of {call.request.id}")  # type: ignore[misc]
            assert not any(isinstance(event, Failed) for event in call.events), call.events
            assert set(seen[call.request.id]) == {expected[call.request.id]}
        assert [each.wrong for each in every if each.wrong] == []
        [kept] = [frames for one in (*encoders, rest) for frames in one.streams.values()]
        assert kept == list(range(1, len(futures) + 1))
        streams.stop()
    finally:
        over.set()
        reporting.join(PATIENCE)
        streams.stop()
    assert not any(one.streams for one in (*encoders, rest)), "nothing of it stays"
    for one in (*encoders, rest):
        made.take(one.name, list(one.reports))
    assert made.stats().live == 0 and not payloads.held

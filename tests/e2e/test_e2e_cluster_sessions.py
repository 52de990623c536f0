"""Sessions of video on ``mmserve serve --cluster``: answers as of one process, whatever happens to the workers; and
other services of the command, whose server ends in the last test."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import Process, serving, settings
from helpers import picture

from mmserve.assembly import BackgroundServer
from mmserve.client import Alert, Client, Finished, NotFound, VideoSession
from mmserve.config import ModelConfig

pytestmark = [pytest.mark.timeout(900)]

PATIENCE = 120.0
MODELS = ("bundled", "bundled-causal")
#: Frames of a session, more than its budget has room for, and after how many a question comes.
FRAMES, EVERY, BUDGET = 14, 5, 90
CONFIG = '[[models]]\npath = "bundled"\n[[models]]\npath = "bundled-causal"\n[engine]\ntorch_threads = 1\n'
CLUSTER = """
[cluster]
save_frames = 4
silent_seconds = 20.0
slow_factor = 0
decide_seconds = 1000.0
[[workers]]
roles = "ep"
count = 2
[[workers]]
roles = "d"
"""


def server(folder: Path, *arguments: str, config: str = CONFIG) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "mmserve.toml").write_text(config)
    return serving(folder, "--config", str(folder / "mmserve.toml"), *arguments)


def clustered(folder: Path, cluster: str = CLUSTER, config: str = CONFIG) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "cluster.toml").write_text(cluster)
    return server(folder, "--cluster", str(folder / "cluster.toml"), config=config)


class Film:
    """What one session is sent, and all that it got: the same whenever it is played, wherever."""

    def __init__(self, number: int, model: str) -> None:
        self.number, self.model = number, model

    def play(self, client: Client, shown: Callable[[], None] = lambda: None) -> dict[str, Any]:
        alerts: list[Alert] = []
        with client.video_session(model=self.model, budget=BUDGET) as session:
            session.watch("Is there a circle?", on=0.4, off=0.35, min_mass=0.0, callback=alerts.append)
            answers = [self._play(session, shown, part) for part in range(0, FRAMES, EVERY)]
            found = session.statistics()
        seconds = [(alert.seconds, alert.active, round(alert.probability, 4)) for alert in alerts]
        kept = found.frames_taken, found.frames_dropped, found.pushes_failed, found.kept_rows, found.evicted_rows
        return {"answers": answers, "alerts": seconds, "kept": kept}

    def _play(self, session: VideoSession, shown: Callable[[], None], part: int) -> Any:
        for i in range(part, min(part + EVERY, FRAMES)):
            session.push(picture(1000 * self.number + i, (72, 72)), float(i))
            shown()
        question = session.stream("What is there?", max_new_tokens=8, tokens=True, temperature=0.7, seed=self.number)
        result = question.result()
        asked = question.asked
        assert asked is not None
        return [token.id for token in result.tokens], asked.frames, asked.begin, asked.end


def play(address: str, shown: Callable[[], None] = lambda: None, each: int = 2) -> dict[tuple[str, int], Any]:
    """Several sessions of each model side by side."""
    films = [Film(i, model) for i, model in enumerate(MODELS * each)]
    with Client(address, timeout=PATIENCE) as client, ThreadPoolExecutor(len(films)) as threads:
        results = list(threads.map(lambda film: film.play(client, shown), films))
    return {(film.model, film.number): result for film, result in zip(films, results, strict=True)}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], Any]:
    """The answers of one process, which is this one."""
    models = tuple(ModelConfig(path=path) for path in ("bundled", "bundled-causal"))
    with BackgroundServer(replace(settings(), models=models)) as found:
        answers = play(found.address)
    assert all(len(set(map(str, each["answers"]))) > 1 and each["kept"][4] for each in answers.values())
    return answers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with clustered(tmp_path_factory.mktemp("cluster")) as found:
        yield found
        found.process.terminate()


def workers(found: Process) -> dict[str, int]:
    """The process of each worker that serves now, by its place."""
    places: dict[str, int] = {}
    for name, pid in re.findall(r"worker (\S+) \(process (\d+)\) serves", found.stderr()):
        places[name.split(".")[0]] = int(pid)
    return places


def test_sessions_of_a_cluster_answer_as_one_process(cluster: Process, alone: dict[tuple[str, int], Any]) -> None:
    assert play(cluster.address) == alone


@pytest.mark.slow
def test_sessions_go_on_when_the_workers_that_keep_their_frames_are_killed(
    cluster: Process, alone: dict[tuple[str, int], Any]
) -> None:
    frames, killed = [0], list[str]()
    lock, due = threading.Lock(), threading.Semaphore(0)
    over = threading.Event()
    total = FRAMES * len(alone)

    def shown() -> None:
        with lock:
            frames[0] += 1
            if frames[0] % (total // 5) == 0:
                due.release()

    def reap() -> None:
        while not over.is_set():
            if not due.acquire(timeout=0.05):
                continue
            place = str(len(killed) % 2)
            pid = workers(cluster)[place]
            killed.append(place)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + PATIENCE
            while workers(cluster)[place] == pid and time.monotonic() < end:
                time.sleep(0.02)

    reaper = threading.Thread(target=reap)
    reaper.start()
    try:
        answers = play(cluster.address, shown)
    finally:
        over.set()
        reaper.join()
    assert set(killed) == {"0", "1"}
    assert "goes on with a session's stream after frame" in cluster.stderr()
    assert answers == alone


def test_sessions_have_the_adapters_of_the_checkpoint(cluster: Process) -> None:
    with Client(cluster.address, timeout=PATIENCE) as client:
        assert [adapter.name for adapter in client.adapters("bundled")] == ["decisions", "streams", "tools"]
        assert [adapter.name for adapter in client.adapters("bundled-causal")] == ["decisions", "tools"]
        answers = [
            client.generate("What is it?", images=[picture(3)], model=name, max_new_tokens=8, tokens=True).tokens
            for name in ("bundled", "bundled:streams")
        ]
        assert answers[0] != answers[1]


def test_the_command_serves_from_a_cluster_and_ends_in_order(cluster: Process) -> None:
    with Client(cluster.address, timeout=PATIENCE) as client:
        before = client.cache.list("bundled").entries
        client.generate("What is it?", images=[picture(1)], max_new_tokens=8)
        [entry] = (each for each in client.cache.list("bundled").entries if each not in before)
        assert entry.kind == "visual" and entry.workers in (("0",), ("1",))
        assert client.cache.warm("Warm.").prompt_tokens > 0
        assert client.cache.drop([entry.id]) == 1 and client.cache.list("bundled").entries == before
        with pytest.raises(NotFound, match=r"no adapter 'red', and \[engine\] adapter_folder is not set"):
            client.load_adapter("red")
        events = client.stream("Count to ten.", max_new_tokens=64, temperature=1.0, seed=1)
        first = next(events)
        cluster.process.send_signal(signal.SIGTERM)
        rest = list(events)
    assert not isinstance(first, Finished) and isinstance(rest[-1], Finished), "a drain lets requests finish"
    assert cluster.process.wait(PATIENCE) == 0, cluster.stderr()
    assert "SIGTERM: draining" in cluster.stderr()

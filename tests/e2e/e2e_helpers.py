"""What the end-to-end tests share: a served bundled model, gates in front of its stages, requests to draw from."""

from __future__ import annotations

import asyncio
import io
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from forked import ForkedCommand
from harness import stages_of

from mmserve.assembly import BackgroundServer
from mmserve.cli import main
from mmserve.client import Client, DkvDecode, Finished, Result, Threshold
from mmserve.config import Config, EngineConfig, MediaConfig, ServerConfig
from mmserve.core.request import Stage, TextPart
from mmserve.engine.engine import Engine, Stats
from mmserve.errors import MMServeError
from mmserve.reference.images import SHORT_TASKS
from mmserve.reference.tasks import sample

T = TypeVar("T")

#: Seconds that no healthy run comes near: how long a test waits for what must happen.
PATIENCE = 60.0
#: Tasks about one picture.
PICTURE_TASKS = (*SHORT_TASKS, "caption", "json")
EMPTY = Stats(live=0, queued=0, pages_in_use=0, held=0)


def settings(
    *, server: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, media: dict[str, Any] | None = None
) -> Config:
    return Config(
        server=ServerConfig(**{"port": 0, **(server or {})}),
        engine=EngineConfig(**{"torch_threads": 1, **(engine or {})}),
        media=MediaConfig(**(media or {})),
    )


def wait_for(what: str, condition: Callable[[], T]) -> T:
    """The first true value of ``condition``; the test fails where there is none within ``PATIENCE``."""
    limit = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < limit, f"waited in vain: {what}"
        time.sleep(0.005)
    return value


class Running:
    """A server in this process with one model, its engine, and a client."""

    def __init__(self, background: BackgroundServer) -> None:
        self.background = background
        self.address = background.address
        self.engine: Engine = background.engines["bundled"]
        self.client = Client(self.address, timeout=PATIENCE)
        self._pool = ThreadPoolExecutor(96)

    def start(self, work: Callable[..., T], *args: Any, **options: Any) -> Future[T]:
        """``work`` on a thread."""
        return self._pool.submit(work, *args, **options)

    def ask(self, prompt: str, **options: Any) -> Future[Result]:
        """A request on a thread; its prompt is its name in ``stages``."""
        return self.start(self.client.generate, prompt, **{"max_new_tokens": 8, **options})

    def stages(self) -> dict[str, Stage]:
        """Where each live request is, by the text of its last message."""
        return {text_of(r.request): r.stage for r in list(self.engine._live.by_id.values())}

    def aborted(self) -> set[str]:
        """Requests whose clients have their error, and that a worker still holds."""
        return {text_of(r.request) for r in list(self.engine._live.by_id.values()) if r.aborted}

    def reach(self, prompt: str, stage: Stage) -> None:
        wait_for(f"{prompt!r} to be {stage.name}: {self.stages()}", lambda: self.stages().get(prompt) is stage)

    def assert_serves(self) -> None:
        """Nothing of earlier requests is left, and the next one is answered."""
        wait_for(f"an empty engine, not {self.engine.stats()}", lambda: self.engine.stats() == EMPTY)
        assert self.client.generate("How many shapes are there?", max_new_tokens=2).forwards >= 1
        wait_for(f"an empty engine, not {self.engine.stats()}", lambda: self.engine.stats() == EMPTY)

    def drain(self) -> Future[None]:
        """The server's own orderly end, begun on its event loop."""
        return asyncio.run_coroutine_threadsafe(self.background._server.drain(), self.background._loop)

    def close(self) -> None:
        self.client.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def running(config: Config | None = None) -> Iterator[Running]:
    with BackgroundServer(config or settings()) as background:
        found = Running(background)
        try:
            yield found
        finally:
            found.close()


def text_of(request: Any) -> str:
    return "".join(part.text for part in request.messages[-1].parts if isinstance(part, TextPart))


class Gate:
    """Stands in for one stage of an engine: batches pass while it is open, and wait while it is closed."""

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._passes = float("inf")
        self.waiting: list[Any] = []  # the batch that waits now
        self.sizes: list[int] = []  # of the batches that passed

    def __call__(self, batch: list[Any]) -> Any:
        with self._changed:
            self.waiting = batch
            while self._passes < 1:
                self._changed.wait()
            self._passes -= 1
            self.sizes.append(len(batch))
            self.waiting = []
        return self._run(batch)

    def close(self) -> None:
        with self._changed:
            self._passes = 0

    def open(self) -> None:
        with self._changed:
            self._passes = float("inf")
            self._changed.notify_all()

    def let_through_until(self, wanted: Callable[[list[Any]], bool]) -> None:
        """Let batches pass one by one until a wanted one waits."""
        while not wanted(wait_for("a batch at the gate", lambda: list(self.waiting))):
            with self._changed:
                self._passes, passed = 1, len(self.sizes)
                self._changed.notify_all()
            wait_for("the batch to pass", lambda: len(self.sizes) > passed)  # noqa: B023


@dataclass
class Gates:
    """A gate in front of each stage; all are open at first."""

    encode: Gate
    prefill: Gate
    decode: Gate

    @property
    def all(self) -> tuple[Gate, Gate, Gate]:
        return self.encode, self.prefill, self.decode

    def open(self) -> None:
        for gate in self.all:
            gate.open()


@contextmanager
def gated(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    """Gates for as long as the context lasts, whatever happens in it."""
    stages = {name: stages_of(engine)[name] for name in ("encode", "prefill", "decode")}
    gates = Gates(*(Gate(getattr(stage, name)) for name, stage in stages.items()))
    with monkeypatch.context() as patch:
        for name, stage in stages.items():
            patch.setattr(stage, name, getattr(gates, name))
        try:
            yield gates
        finally:
            gates.open()
            wait_for("an empty engine behind the gates", lambda: engine.stats() == EMPTY)


@dataclass(frozen=True)
class Ask:
    """One drawn request."""

    prompt: str
    images: tuple[bytes, ...] = field(repr=False)
    options: dict[str, Any]

    def of(self, client: Client, **changes: Any) -> Result:
        return client.generate(self.prompt, images=self.images, **{**self.options, **changes})


def draw_asks(
    count: int, *, seed: int = 0, tasks: Sequence[str] = PICTURE_TASKS, canvas: Sequence[int] = (4, 9, 12, 16, 24)
):
    """Requests about scenes of their own, with mixed canvas sizes, policies, seeds and temperatures."""
    asks = []
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        scene, question = sample(tasks[index % len(tasks)], rng)
        size = rng.choice(canvas)
        options: dict[str, Any] = {
            "max_new_tokens": size,
            "steps": rng.choice((None, 1, max(1, size // 2), max(1, size // 3))),
            "block_length": rng.choice((None, 4, 7, 32)),
            "recompute": rng.choice((None, "none", DkvDecode(1), DkvDecode(2), DkvDecode(4), "dkv_decode")),
            "commit": rng.choice((None, "low_confidence", Threshold(0.3), Threshold(0.9), "threshold")),
            "temperature": rng.choice((0.0, 0.0, 0.7, 1.0, 3.0)),
            "top_p": rng.choice((None, 0.5, 0.95)),
            "top_k": rng.choice((None, 5)),
            "seed": rng.randrange(1 << 64),
        }
        images = () if index % 16 == 5 else (scene.png(),)  # some ask about nothing
        asks.append(Ask(question.text, images, options))
    return asks


def short_asks(count: int, *, seed: int = 0) -> list[Ask]:
    return draw_asks(count, seed=seed, tasks=SHORT_TASKS, canvas=(4, 8))


def answer(result: Result | Finished) -> tuple[Any, ...]:
    """What of a result depends on the request alone."""
    reason = result.finish_reason if isinstance(result, Result) else result.reason
    return result.text, reason, result.usage, result.forwards, result.recomputed_tokens


def failure(future: Future[Any]) -> MMServeError:
    """The typed error that ended ``future``."""
    error = future.exception(timeout=PATIENCE)
    assert isinstance(error, MMServeError), f"not a typed error: {error!r}"
    return error


class Process:
    """``mmserve serve`` in a process of its own, which need not import everything first."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / "stderr.txt"
        self.process = ForkedCommand(["serve", "--set", "server.port=0", *arguments], self.log)
        line = self.process.stdout.readline()
        assert line.startswith("mmserve serves bundled"), (line, self.stderr())
        self.address = line.split()[-1]

    def stderr(self) -> str:
        return self.log.read_text()

    def ends(self) -> int:
        return self.process.wait(PATIENCE)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Process]:
    found = Process(folder, *arguments)
    with found.process:
        try:
            yield found
            assert found.ends() == 0, found.stderr()
        finally:
            found.process.kill()
    log = found.stderr()
    assert "Traceback" not in log and "Error" not in log and "Exception" not in log, log


def command(*arguments: str, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """``mmserve …`` in a process of its own, until its end."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [sys.executable, "-m", "mmserve", *arguments], input=data, capture_output=True, timeout=280, check=False
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def command_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As ``command``, in this process, which has imported everything."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as end:  # of argparse
            code = end.code if isinstance(end.code, int) else 1
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

"""A server on a real socket in front of an engine that echoes: real threads, no model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mmserve.client import Client
from mmserve.config import Config, MediaConfig, ServerConfig
from mmserve.core.events import Admitted, Delta, Event, Failed, Finished, Snapshot, StageTimes, Usage
from mmserve.core.info import ModelInfo
from mmserve.core.request import ImagePart, Request, TextPart
from mmserve.core.stats import Stats
from mmserve.errors import Cancelled, DeadlineExceeded, MMServeError, Unavailable
from mmserve.rpc.server import Server

#: Seconds that no healthy run comes near.
PATIENCE = 60.0


def model_info(name: str = "echo", **changes: Any) -> ModelInfo:
    values: dict[str, Any] = {
        "name": name,
        "architecture": "EchoModel",
        "images": True,
        "videos": True,
        "diffusion": True,
        "recompute_policies": ("none", "dkv_decode"),
        "commit_policies": ("low_confidence", "threshold"),
        "pruners": ("none", "random", "cls_attention"),
        "max_tokens": 1024,
        "max_images": 4,
        "visual_tokens_per_image": 81,
        "max_image_bytes": 1 << 20,
        "max_videos": 2,
        "frames_per_video": 8,
        "max_video_seconds": 30.5,
        "max_video_bytes": 1 << 20,
        "max_new_tokens": 64,
        "block_length": 32,
        "recompute_policy": "none",
        "commit_policy": "low_confidence",
        "parameters": 12_345,
        "dtype": "float32",
        "device": "cpu",
        "kernels": {"cached_attention": "pytorch"},
        "kv_reductions": ("sink_window",),
        "image_reuses": ("blend", "lego_link"),
    }
    return ModelInfo(**{**values, **changes})


@dataclass(eq=False)
class EchoEngine:
    """Says the text of the last message again, word by word, one thread a request."""

    info: ModelInfo = field(default_factory=model_info)
    pause: float = 0.0  # seconds before each word
    refusals: list[MMServeError] = field(default_factory=list)  # raised by the next submits, in this order
    failure: MMServeError | None = None  # ends every request after its first word
    bug: Exception | None = None  # raised by submit
    refusing: dict[str, MMServeError] = field(default_factory=dict)  # raised by submits of these texts
    failing: dict[str, MMServeError] = field(default_factory=dict)  # ends requests of these texts before a word

    def __post_init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: dict[str, MMServeError] = {}
        self.calls: list[str] = []
        self.cancel_seen = threading.Event()
        self.run_seen = threading.Event()
        self.go = threading.Event()  # while it is cleared, no request comes to its next word
        self.go.set()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._running: dict[str, threading.Event] = {}
        self._draining = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self.calls.append("start")

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        if self.bug is not None:
            raise self.bug
        with self._lock:
            self.requests.append(request)
            if self.refusals:
                raise self.refusals.pop(0)
            if (refusal := self.refusing.get(said(request))) is not None:
                raise refusal
            if self._draining:
                raise Unavailable("draining")
            assert request.id not in self._running
            self._running[request.id] = threading.Event()
        self.run_seen.set()
        thread = threading.Thread(target=self._run, args=(request, sink))
        self._threads.append(thread)
        thread.start()

    def stats(self) -> Stats:
        with self._lock:
            return Stats(len(self._running), 0, 0, len(self._running))

    def cancel(self, request_id: str, error: MMServeError | None = None) -> None:
        with self._lock:
            if request_id not in self._running:
                return
            self.cancelled.setdefault(request_id, error or Cancelled("cancelled"))
            self._running[request_id].set()
        self.cancel_seen.set()

    def drain(self, timeout: float) -> bool:
        self.calls.append(f"drain {timeout:g}")
        self._draining = True
        alone = self._wait(timeout)
        for request_id in [] if alone else list(self._running):
            self.cancel(request_id, Unavailable("the server stops"))
        self._wait(60)
        return alone

    def stop(self) -> None:
        self.calls.append("stop")
        for thread in self._threads:
            thread.join()

    @property
    def running(self) -> int:
        return len(self._running)

    def _wait(self, seconds: float) -> bool:
        with self._ended:
            return self._ended.wait_for(lambda: not self._running, seconds)

    def _run(self, request: Request, sink: Callable[[Event], None]) -> None:
        sink(Admitted(0))
        for sample in range(request.sampling.n):
            last = self._answer(request, lambda e, i=sample: sink(replace(e, sample=i)), self._running[request.id])
            if isinstance(last, Failed):
                sink(last)
                break
            sink(replace(last, sample=sample))
        with self._lock:
            del self._running[request.id]
            self._ended.notify_all()

    def _answer(self, request: Request, sink: Callable[[Event], None], stopped: threading.Event) -> Event:
        parts = request.messages[-1].parts
        if (failure := self.failing.get(said(request))) is not None:
            return Failed(failure)
        words = said(request).split(" ")
        for index, word in enumerate(words):
            stop = stopped.wait(self.pause)
            while not (stop or self.go.is_set()):
                stop = stopped.wait(0.005)
            if stop:
                return Failed(self.cancelled[request.id])
            if request.streaming.snapshots:
                sink(Snapshot("▒" * len(words), index, len(words), index))
            if request.streaming.deltas:
                sink(Delta(f" {word}" if index else word))
            if self.failure is not None:
                return Failed(self.failure)
        images = sum(isinstance(p, ImagePart) for p in parts)
        usage = Usage(len(words) + 81 * images, 81 * images, len(words))
        times = StageTimes(1.0, 2.0, 3.0, 4.0, 10.0, 5.0)
        return Finished("end", " ".join(words), usage, len(words), 7, times, ("an echo",))


def said(request: Request) -> str:
    """The text of the last message."""
    return "".join(part.text for part in request.messages[-1].parts if isinstance(part, TextPart))


def late(client: Client, engine: EchoEngine) -> None:
    """A request to an engine that holds it, whose deadline passes when it has come there: ``DeadlineExceeded``."""
    for timeout in (0.3, 3.0, PATIENCE / 2):  # a machine that stops for a second may not bring it there in the first
        try:
            client.generate("word", timeout=timeout)
        except DeadlineExceeded:
            if engine.requests:
                raise


def config(server: dict[str, Any] | None = None, **media: Any) -> Config:
    return Config(
        server=ServerConfig(**{"port": 0, "drain_seconds": 60.0, **(server or {})}), media=MediaConfig(**media)
    )


@contextlib.asynccontextmanager
async def served(engine: EchoEngine | dict[str, EchoEngine], settings: Config | None = None) -> AsyncIterator[Server]:
    """A started server on the running loop."""
    engines = engine if isinstance(engine, dict) else {engine.info.name: engine}
    server = Server(settings or config(), engines)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.contextmanager
def threaded(engine: EchoEngine | dict[str, EchoEngine], settings: Config | None = None) -> Iterator[str]:
    """A started server on a loop in another thread; gives its address."""
    port: list[int] = []
    up, down = threading.Event(), threading.Event()

    async def serve() -> None:
        async with served(engine, settings) as server:
            port.append(server.port)
            up.set()
            await asyncio.to_thread(down.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert up.wait(PATIENCE)
        yield f"127.0.0.1:{port[0]}"
    finally:
        down.set()
        thread.join()

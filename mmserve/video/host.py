"""What sessions need of each model of a server: its streams, its standing questions, and threads to call them on."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mmserve.config import Config, VideoConfig
from mmserve.encode.decoding import Decoders
from mmserve.encode.sampling import Sampler
from mmserve.engine import Engine
from mmserve.errors import Unimplemented
from mmserve.models.picture import Resize
from mmserve.observe.sessions import SessionMetrics
from mmserve.video.reading import PushReader
from mmserve.video.standing import Standing
from mmserve.video.streams import EngineStreams
from mmserve.video.surroundings import Fetched, Noted, Surroundings, Work


class Host:
    """Sessions' view of one engine."""

    def __init__(self, engine: Engine, config: Config, threads: Threads) -> None:
        self.engine, self._config, self._threads = engine, config, threads
        self.streams = EngineStreams(engine, config.video)
        self._decoders: Decoders = engine.stages.decoders
        try:
            self._standing: Standing | None = Standing(engine.stages.model)
        except Unimplemented:
            self._standing = None

    def reader(self, sampler: Sampler) -> PushReader:
        """What decodes the pushes of one session."""
        return PushReader(self._decoders, sampler, self._config.video.waiting_bytes, self._resize())

    def _resize(self) -> Resize | None:
        """What the model does first to every frame, as one of a clip and as an image by itself."""
        vision = self.engine.stages.model.vision
        if vision is None:
            return None
        first = {vision.first_resize(clip=clip, among=False) for clip in (True, False)}
        return first.pop() if len(first) == 1 else None

    def surroundings(self, noted: Callable[[], Noted], metrics: SessionMetrics, fetched: Fetched) -> Surroundings:
        """What its sessions share; ``noted`` makes what takes note of a question, ``fetched`` has files of URLs."""
        vision = self.engine.stages.model.vision
        return Surroundings(
            self._config.video,
            self._threads.work,
            self._threads.judge,
            self.engine.cancel,
            noted,
            metrics,
            self._standing,
            fetched,
            int(vision.time_period) if vision is not None else 0,
        )


class Threads:
    """Where sessions call what blocks: on a thread each at most, and, what runs a model for them, on one for all."""

    def __init__(self, config: VideoConfig) -> None:
        self._blocking = ThreadPoolExecutor(2 * max(1, config.max_sessions), "mmserve-video")
        self._judging = ThreadPoolExecutor(1, "mmserve-standing", lambda: torch.set_num_threads(1))
        self.work: Work = functools.partial(_run, self._blocking)
        self.judge: Work = functools.partial(_run, self._judging)

    def stop(self) -> None:
        """End them."""
        self._blocking.shutdown(wait=False, cancel_futures=True)
        self._judging.shutdown(wait=False, cancel_futures=True)


async def _run(threads: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(threads, call, *args)


class Hosts:
    """The hosts of a server's engines, each made when it is first asked for; from any thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._threads = Threads(config.video)
        self._lock = threading.Lock()
        self._hosts: dict[Engine, Host] = {}

    def find(self, engine: object) -> Host:
        """The host of ``engine``; raises ``Unimplemented`` where its model takes no sessions."""
        if not isinstance(engine, Engine):
            raise Unimplemented("this model takes no video sessions")
        with self._lock:
            host = self._hosts.get(engine)
            if host is None:
                host = self._hosts[engine] = Host(engine, self._config, self._threads)
            return host

    def takes_sessions(self, engine: object) -> bool:
        """Whether the model of ``engine`` takes sessions."""
        try:
            _ = self.find(engine).streams.model
        except Unimplemented:
            return False
        return True

    def forget(self, engine: object) -> None:
        """Stop the streams of an engine that ends."""
        with self._lock:
            host = self._hosts.pop(engine, None) if isinstance(engine, Engine) else None
        if host is not None:
            host.streams.stop()

    def stop(self) -> None:
        """Stop all streams and threads."""
        with self._lock:
            hosts = list(self._hosts.values())
            self._hosts.clear()
        for host in hosts:
            host.streams.stop()
        self._threads.stop()

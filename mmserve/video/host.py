"""The objects that sessions need for each model of a server: streams, standing questions, and threads."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mmserve.config import Config, VideoConfig
from mmserve.core.info import ModelInfo
from mmserve.encode.decoders import Decoders
from mmserve.encode.sampling import Sampler
from mmserve.engine.engine import Engine
from mmserve.errors import Unimplemented
from mmserve.observe.counters import SessionMetrics
from mmserve.video.base import Streams
from mmserve.video.reading import PushReader
from mmserve.video.session_context import Fetched, FrameQuestions, QuestionRecorder, SessionContext, Work
from mmserve.video.streams import EngineStreams
from mmserve.video.support import SessionSupport, session_support, standing_of

#: Maximum number of sessions whose frames are judged concurrently in this process: judging slows decode.
_JUDGING = 4


@dataclass(frozen=True)
class Parts:
    """The objects that sessions need for one model, local or remote; ``cancel`` ends a request to it.

    ``here``: whether ``standing`` runs the model in this process.
    """

    support: SessionSupport
    streams: Streams
    decoders: Decoders
    standing: FrameQuestions | None
    cancel: Callable[[str], None]
    here: bool = True


class Host:
    """One model for sessions."""

    def __init__(self, parts: Parts, config: Config, threads: Threads) -> None:
        self.support, self.streams = parts.support, parts.streams
        self._parts, self._config, self._threads = parts, config, threads

    def reader(self, sampler: Sampler) -> PushReader:
        """The decoder of one session's pushes."""
        parts = self._parts
        return PushReader(parts.decoders, sampler, self._config.video.waiting_bytes, parts.support.resize)

    def session_context(
        self, recorder: Callable[[], QuestionRecorder], metrics: SessionMetrics, fetched: Fetched
    ) -> SessionContext:
        """The common context of its sessions; ``recorder`` creates the recorder of a question, ``fetched`` downloads
        URLs."""
        parts = self._parts
        return SessionContext(
            self._config.video,
            self._threads.work,
            self._threads.judge if parts.here else self._threads.work,
            parts.cancel,
            recorder,
            metrics,
            parts.standing,
            fetched,
            parts.support.label_period,
        )


def parts_of(engine: Engine, config: Config) -> Parts:
    """The parts of a model in this process."""
    model = engine.stages.model
    streams = EngineStreams(engine, config.video)
    support = session_support(model, engine.stages.capabilities)
    return Parts(support, streams, engine.stages.decoders, standing_of(model), engine.cancel)


class Threads:
    """Threads for blocking calls of sessions: three threads each for most calls, and a few in total for calls that run
    a model.

    A session has at most one frame judged at a time, so sessions take turns on those few.
    """

    def __init__(self, config: VideoConfig) -> None:
        self._blocking = ThreadPoolExecutor(3 * max(1, config.max_sessions), "mmserve-video")
        judging = max(2, min(_JUDGING, os.cpu_count() or 1))
        self._judging = ThreadPoolExecutor(judging, "mmserve-standing", lambda: torch.set_num_threads(1))
        self.work: Work = functools.partial(_run, self._blocking)
        self.judge: Work = functools.partial(_run, self._judging)

    def stop(self) -> None:
        """Stop the threads."""
        self._blocking.shutdown(wait=False, cancel_futures=True)
        self._judging.shutdown(wait=False, cancel_futures=True)


async def _run(threads: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(threads, call, *args)


class Served(Protocol):
    """A model that a server serves. A remote one has ``session_parts``, with the result of ``parts_of``."""

    @property
    def info(self) -> ModelInfo:
        """The model's description."""


class Hosts:
    """The hosts of a server's engines, created on demand; thread-safe."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._threads = Threads(config.video)
        self._lock = threading.Lock()
        self._hosts: dict[Served, Host] = {}

    def find(self, engine: Served) -> Host:
        """The host of ``engine``; raises ``Unimplemented`` if its model does not support sessions."""
        with self._lock:
            host = self._hosts.get(engine)
            if host is None:
                host = self._hosts[engine] = Host(self._parts(engine), self._config, self._threads)
        host.support.check()
        return host

    def takes_sessions(self, engine: Served) -> bool:
        """Whether the model of ``engine`` supports sessions."""
        try:
            self.find(engine)
        except Unimplemented:
            return False
        return True

    def discard(self, engine: Served) -> None:
        """Stop the streams of an engine that is stopped."""
        with self._lock:
            host = self._hosts.pop(engine, None)
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

    def _parts(self, engine: Served) -> Parts:
        if isinstance(engine, Engine):
            parts = parts_of(engine, self._config)
        elif (made := getattr(engine, "session_parts", None)) is not None:
            parts = made(self._config)
        else:
            raise Unimplemented(f"model {engine.info.name!r} takes no video sessions")
        return parts

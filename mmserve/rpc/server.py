"""The gRPC server: all services on one port, from start to graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.config import Config
from mmserve.config.ports import try_port
from mmserve.encode.store import MediaStore
from mmserve.errors import ConfigError
from mmserve.models.names import served_names
from mmserve.observe.endpoint import Endpoint
from mmserve.observe.metrics import Metrics
from mmserve.rpc.access import Access
from mmserve.rpc.cache import CacheService
from mmserve.rpc.connections import connection_options
from mmserve.rpc.decision import Deciding, DecisionService
from mmserve.rpc.engines import EngineLike, Engines
from mmserve.rpc.fetching import Fetcher
from mmserve.rpc.generation import Generations, GenerationService
from mmserve.rpc.health import NOT_SERVING, SERVING, Health
from mmserve.rpc.incoming import Incoming
from mmserve.rpc.loading import Loading
from mmserve.rpc.media import MediaService
from mmserve.rpc.memory_budget import MemoryBudget
from mmserve.rpc.model import ModelService
from mmserve.rpc.quotas import Quotas
from mmserve.rpc.reflection import add_reflection
from mmserve.rpc.reload import Guard, Load, Replacement, unfollowed
from mmserve.rpc.video import VideoService
from mmserve.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    decision_pb2,
    decision_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    media_pb2,
    media_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    video_pb2,
    video_pb2_grpc,
)
from mmserve.video.host import Hosts
from mmserve.video.registry import Registry

logger = logging.getLogger("mmserve.rpc")

SERVICES = tuple(
    service.full_name
    for module in (generation_pb2, decision_pb2, media_pb2, model_pb2, cache_pb2, video_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
)
#: Threads for engines that are loaded later; created on demand.
_LOADED_THREADS = 64
#: Maximum time (seconds) for the last responses to reach clients during shutdown.
_FLUSH_SECONDS = 2.0


class Front(Protocol):
    """Another protocol of the same server, on its own port; used on the server's event loop."""

    async def start(self) -> None:
        """Listen; raises ``ConfigError`` if that fails."""

    async def stop(self, seconds: float) -> None:
        """Stop listening, and allow ``seconds`` for responses in progress. No effect if it has not started."""

    def reload_tls(self, config: Config) -> None:
        """Use the TLS files of ``config``, which are valid, for new connections."""


class Server:
    """Serves ``engines`` (by model name, the first is the default), which it starts, drains and stops.

    ``loading``: names of models whose engines are passed to ``add`` while the server already listens. Until then their
    requests end with UNAVAILABLE, and health is NOT_SERVING.
    """

    def __init__(
        self, config: Config, engines: Mapping[str, EngineLike] = MappingProxyType({}), loading: Sequence[str] = ()
    ) -> None:
        if not engines and not loading:
            raise ConfigError("a server needs at least one model")
        self.config = config
        self.engines = Engines((*engines, *loading))
        self._given = dict(engines)
        self.media = MediaStore(config.media.store_bytes)
        self.metrics = Metrics(self.engines, config.server.metrics_prefixes)
        self.sessions = Registry(config.video, self.metrics.sessions.sessions)
        self.budget = MemoryBudget(config.media.live_bytes)
        self.quotas = Quotas(self.metrics.tenants.limited)
        self._fetcher = Fetcher(config.media, self.budget)
        self.generations = Generations(
            self.engines, self.media, config.media, self.metrics, self.budget, self._fetcher, config.slo
        )
        self.deciding = Deciding(self.engines, self.generations)
        self._fronts: list[Front] = []
        self._hosts = Hosts(config)
        self.port = 0
        self.guard = Guard(config, self.metrics.tenants.refused)
        self._health = Health(SERVICES)
        self._grpc: Any = None
        self._scraped: Endpoint | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # set by ``start``
        self._impaired = False
        self._ending: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        # A drain uses one thread for each engine, and the call that interrupts it needs another; engines that replace
        # others on SIGHUP, or are loaded on request, need threads as well.
        self._threads = ThreadPoolExecutor(4 * len(self.engines.names) + _LOADED_THREADS, "mmserve-engine")
        self._replacement = Replacement(self.engines, config, self._in_thread, self._leave)
        self.loading = Loading(self.engines, config, self._in_thread, self._replacement)

    @property
    def ending(self) -> bool:
        """Whether it drains or has stopped."""
        return self._ending is not None

    @property
    def reading(self) -> bool:
        """Whether a thread is reading the files of a model loaded at run time, which cannot be interrupted."""
        return self._replacement.reading

    def attach(self, front: Front) -> None:
        """Start and stop ``front`` together with the server; call before ``start``."""
        self._fronts.append(front)

    async def start(self) -> int:
        """Listen, start the engines, and return the bound port; raises ``ConfigError`` if that fails."""
        if self._grpc is not None:
            raise RuntimeError("a server starts once")
        self._loop = asyncio.get_running_loop()
        self._grpc = self._build()
        self.port = self._bind()
        started: list[EngineLike] = []
        try:
            if self.config.server.metrics_port:
                self._scraped = Endpoint(self.metrics.served, self.config.server)
                self.guard.endpoint = self._scraped
            for name, engine in self._given.items():
                await self._for_all([engine], "start")
                started.append(engine)
                self.engines.add(name, engine)
            for front in self._fronts:
                await front.start()
            await self._grpc.start()
        except BaseException:
            await self._for_all(started, "stop")
            await self._stop_fronts(0.0)
            await self._grpc.stop(None)
            await self._close_endpoint()
            raise
        self._given.clear()  # so that an unloaded engine is not kept alive
        if loading := ", ".join(self.engines.loading):
            logger.info("listening on %s:%d, loading %s", self.config.server.host, self.port, loading)
        self._announce()
        return self.port

    async def add(self, engine: EngineLike) -> bool:
        """Start an engine and serve its model; health becomes SERVING when no model is loading any more.

        Returns False, with the engine stopped, if the server is already ending.
        """
        await self._for_all([engine], "start")
        if self._ending is not None:
            await self._for_all([engine], "stop")
            return False
        self.engines.add(engine.info.name, engine)
        self._announce()
        return True

    def impair(self, impaired: bool) -> None:
        """Set whether health is NOT_SERVING although requests are answered; thread-safe."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set_impaired, impaired)

    def _set_impaired(self, impaired: bool) -> None:
        self._impaired = impaired
        if self._ending is None:
            self._announce()

    def _announce(self) -> None:
        if self._impaired:
            self._health.set(NOT_SERVING)
        elif not self.engines.loading:
            self._health.set(SERVING)
            logger.info("serving %s on %s:%d", ", ".join(self.engines), self.config.server.host, self.port)

    async def drain(self) -> None:
        """Shut down gracefully: health becomes NOT_SERVING, new requests are refused, running ones get
        ``drain_seconds``."""
        await self._end(self.config.server.drain_seconds)

    async def stop(self) -> None:
        """Shut down immediately: running requests fail with UNAVAILABLE. Also interrupts a ``drain`` in progress."""
        if self._ending is not None and not self._ending.done():
            logger.warning("stopping at once")
            engines = [*self.engines.values(), *self._replacement.leaving]
            await asyncio.gather(self._for_all(engines, "drain", 0.0), self.sessions.drain(0.0))
        await self._end(0.0)

    async def reload(self, read: Callable[[], Config], load: Load | None = None) -> None:
        """Apply the configuration returned by ``read``: its current tokens, tenants and certificates.

        Connections and requests in progress continue. Raises ``ConfigError``, without any change, if something is
        invalid. New models are loaded by ``load``, in the background (``Replacement``).
        """
        config, apply = await self._in_thread(self._read, read)
        apply()
        for front in self._fronts:
            front.reload_tls(config)
        self._replacement.begin(config.models, load)
        for what in unfollowed(self.config, config):
            logger.warning("%s of the configuration differs from what the server runs with: restart it for that", what)
        logger.info("tokens, tenants and certificates are read again")

    def _read(self, read: Callable[[], Config]) -> tuple[Config, Callable[[], None]]:
        config = read()
        served_names(config.models)
        return config, self.guard.read(config)

    async def serve_until_signal(
        self,
        ready: Callable[[], None] = lambda: None,
        read: Callable[[], Config] | None = None,
        load: Load | None = None,
    ) -> None:
        """Serve, after ``start``, until SIGTERM or SIGINT, then drain; a second signal stops immediately.

        ``ready`` is called once signals are handled. On SIGHUP, ``reload`` applies the configuration returned by
        ``read`` (default: the original one, whose files are read again). ``load`` loads its new models.
        """
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        watched = (signal.SIGTERM, signal.SIGINT)
        for number in watched:
            loop.add_signal_handler(number, signals.put_nowait, number)
        hangups = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, hangups.set)
        ready()
        tasks = [
            asyncio.create_task(self._obey(signals)),
            asyncio.create_task(self._follow(hangups, read or (lambda: self.config), load)),
        ]
        try:
            await self._ended.wait()
            await self.drain()  # has ended already: raises its error
        finally:
            for task in tasks:
                task.cancel()
            for number in (*watched, signal.SIGHUP):
                loop.remove_signal_handler(number)

    async def _follow(self, hangups: asyncio.Event, read: Callable[[], Config], load: Load | None) -> None:
        while await hangups.wait():
            hangups.clear()
            try:
                await self.reload(read, load)
            except ConfigError as error:
                logger.error("SIGHUP: the configuration stays as it was: %s", error)
            except Exception:
                logger.exception("SIGHUP: the configuration stays as it was")

    async def _obey(self, signals: asyncio.Queue[signal.Signals]) -> None:
        logger.info("%s: draining", (await signals.get()).name)
        draining = asyncio.create_task(self.drain())
        logger.info("%s again", (await signals.get()).name)
        await self.stop()
        await draining

    async def _end(self, seconds: float) -> None:
        if self._grpc is None:
            return
        if self._ending is None:
            self._ending = asyncio.create_task(self._shut_down(seconds))
        await asyncio.shield(self._ending)

    async def _shut_down(self, seconds: float) -> None:
        self._health.set(NOT_SERVING)
        self._replacement.cancel()
        engines = [*self.engines.values(), *self._replacement.leaving]
        try:
            ended, _ = await asyncio.gather(self._for_all(engines, "drain", seconds), self.sessions.drain(seconds))
            if not all(ended):
                logger.warning("requests were still running after %s seconds and were cancelled", seconds)
        finally:
            self._health.close()
            await asyncio.gather(self._grpc.stop(_FLUSH_SECONDS), self._stop_fronts(_FLUSH_SECONDS))
            await self._in_thread(self._hosts.stop)
            await self._for_all(engines, "stop")
            await self._close_endpoint()
            self._incoming.close()
            self._fetcher.close()
            self._threads.shutdown(wait=False)
            self._ended.set()
            logger.info("stopped")

    async def _stop_fronts(self, seconds: float) -> None:
        await asyncio.gather(*(front.stop(seconds) for front in self._fronts))

    async def _close_endpoint(self) -> None:
        if self._scraped is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._scraped.close)

    async def _leave(self, engine: EngineLike, seconds: float) -> None:
        """Let the sessions of an engine that will stop end within ``seconds``; none can be opened afterwards."""
        await self.sessions.drain(seconds, engine)
        await self._in_thread(self._hosts.discard, engine)
        await self.sessions.drain(0.0, engine)  # sessions opened meanwhile

    async def _for_all(self, engines: Iterable[EngineLike], method: str, *args: float) -> list[Any]:
        """Call a blocking method of several engines in parallel."""
        return await asyncio.gather(*(self._in_thread(getattr(engine, method), *args) for engine in engines))

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a blocking function on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    def _build(self) -> Any:
        config = self.config.server
        self._incoming = Incoming(config, self.budget, self.metrics.message_refused)
        interceptors = [
            Access(self.metrics, log=config.access_log),
            self.guard.auth,
            self.quotas,
            self._incoming,
        ]
        server = grpc.aio.server(interceptors=interceptors, options=connection_options(config))
        generation = GenerationService(self.generations)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        decision_pb2_grpc.add_DecisionServiceServicer_to_server(DecisionService(self.deciding), server)
        media_pb2_grpc.add_MediaServiceServicer_to_server(
            MediaService(self.media, self.config.media, self.metrics.calls), server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self.engines, self._hosts, self.loading), server)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(self.engines, self.generations), server)
        video = VideoService(
            self.engines, self._hosts, self.sessions, self.config, self.metrics, self.quotas, self._fetcher
        )
        video_pb2_grpc.add_VideoServiceServicer_to_server(video, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        add_reflection((*SERVICES, health), server)
        return server

    def _bind(self) -> int:
        config = self.config.server
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            certificates = self.guard.certificates
            if certificates is None:
                return int(self._grpc.add_insecure_port(f"{host}:{config.port}"))
            return int(self._grpc.add_secure_port(f"{host}:{config.port}", certificates.credentials()))
        except RuntimeError as error:
            try_port(config.host, config.port, "port")  # gRPC does not report the reason
            raise ConfigError(f"cannot listen on {host}:{config.port}: {error}") from error

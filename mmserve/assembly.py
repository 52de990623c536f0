"""Assembly of a server from a configuration: creates all parts and connects them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Self

import torch

from mmserve.client import Client
from mmserve.config import Config, resolve
from mmserve.decode.schedulers import load_schedulers
from mmserve.encode.decoding import DecodePool
from mmserve.engine.engine import Engine
from mmserve.http import attach
from mmserve.models.names import served_names
from mmserve.models.registry import load_model
from mmserve.needs import fitted
from mmserve.rpc.server import Server
from mmserve.tiers.caches import Caches

logger = logging.getLogger("mmserve")


def load_engines(config: Config, cache: Caches | None = None) -> Iterator[Engine]:
    """Load one model after another; yields the engine of each, not yet started.

    ``cache``: the caches of engines loaded earlier by the same server. Raises ``ConfigError`` if a checkpoint is
    invalid.
    """
    schedulers = load_schedulers(config.schedulers)
    torch.set_num_threads(resolve(config.engine).torch_threads)
    cache, decoders = cache or Caches.of(config.encoder_cache, config.kv_cache), DecodePool(config.media)
    for entry in config.models:
        model = load_model(entry)
        logger.info(
            "loaded %s%s: %.1f M parameters, %s on %s",
            model.spec.name,
            f" with the companion {model.companion.spec.name}" if model.companion is not None else "",
            model.parameters / 1e6,
            str(model.dtype).removeprefix("torch."),
            model.device,
        )
        engine_config = fitted(config.engine, model, model.device)
        engine = Engine(model, engine_config, config.media, schedulers, cache, decoders)
        logger.info("%s: at most %d tokens in a request", model.spec.name, engine.info.max_tokens)
        logger.info("%s: kernels: %s", model.spec.name, _summary(engine.info.kernels))
        yield engine


def _summary(kernels: Mapping[str, str]) -> str:
    """The implementation of each op, as one line."""
    ops: dict[str, list[str]] = {}
    for op, implementation in sorted(kernels.items()):
        ops.setdefault(implementation, []).append(op)
    return "; ".join(f"{implementation} ({', '.join(names)})" for implementation, names in ops.items())


def build_engines(config: Config) -> dict[str, Engine]:
    """The engines of all models by name, not yet started; raises ``ConfigError`` if a checkpoint is invalid."""
    names = served_names(config.models)
    return dict(zip(names, load_engines(config), strict=True))


class BackgroundServer:
    """A server in a thread of this process, for the demo, one-off generation, benchmarks and tests.

    ``with BackgroundServer(config) as server, server.client() as client``; uses a free port unless one is
    configured.
    """

    def __init__(self, config: Config) -> None:
        self.config = replace(config, server=replace(config.server, host="127.0.0.1"))
        engines = build_engines(self.config)
        self._cache = next(iter(engines.values())).stages.encoder.cache
        self._server = Server(self.config, engines)
        self._server.loading.load = self._load
        attach(self._server)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mmserve-grpc", daemon=True)

    def _load(self, config: Config) -> Iterator[Engine]:
        """Load further engines, which share the cache of the present ones."""
        return load_engines(config, self._cache)

    @property
    def engines(self) -> dict[str, Engine]:
        """The present engines, by model name."""
        return {name: engine for name, engine in self._server.engines.items() if isinstance(engine, Engine)}

    @property
    def address(self) -> str:
        """``host:port`` to connect to."""
        return f"{self.config.server.host}:{self._server.port}"

    def client(self, timeout: float = 60.0) -> Client:
        """A client of the server, with ``timeout`` seconds for each call; returns once the server is ready."""
        client = Client(self.address, timeout=timeout)
        client.wait_ready()
        return client

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

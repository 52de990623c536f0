"""From a configuration to a server: the one place where the parts are put together."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from mmserve.config import Config, resolve
from mmserve.decode.schedulers import load_schedulers
from mmserve.encode.cache import EncoderCache
from mmserve.engine import Engine
from mmserve.errors import ConfigError
from mmserve.models.registry import load_model
from mmserve.rpc.server import Server

logger = logging.getLogger("mmserve")


def build_engines(config: Config) -> dict[str, Engine]:
    """Load every model and make its engine, not yet started; ``ConfigError`` where a checkpoint is wrong."""
    engine_config = resolve(config.engine)
    schedulers = load_schedulers(config.schedulers)
    torch.set_num_threads(engine_config.torch_threads)
    cache = EncoderCache.of(config.encoder_cache)
    engines: dict[str, Engine] = {}
    for entry in config.models:
        model = load_model(entry)
        if model.spec.name in engines:
            raise ConfigError(f"two models are named {model.spec.name!r}; give one another name under [[models]]")
        logger.info(
            "loaded %s%s: %.1f M parameters, %s on %s",
            model.spec.name,
            f" with the companion {model.companion.spec.name}" if model.companion is not None else "",
            model.parameters / 1e6,
            str(model.dtype).removeprefix("torch."),
            model.device,
        )
        engines[model.spec.name] = Engine(model, engine_config, config.media, schedulers, cache)
    return engines


class BackgroundServer:
    """A server on a thread of this process, for the demo, one-off generation, benchmarks and tests.

    ``with BackgroundServer(config) as server: Client(server.address)``; the port is a free one unless configured.
    """

    def __init__(self, config: Config) -> None:
        self.config = replace(config, server=replace(config.server, host="127.0.0.1"))
        self.engines = build_engines(self.config)
        self._server = Server(self.config, self.engines)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mmserve-grpc", daemon=True)

    @property
    def address(self) -> str:
        """``host:port`` to connect to."""
        return f"{self.config.server.host}:{self._server.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

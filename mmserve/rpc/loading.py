"""Loading and unloading of models in a running server (``ModelService.LoadModel`` and ``UnloadModel``)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mmserve.config import Config, ModelConfig
from mmserve.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unimplemented
from mmserve.models.names import served_name
from mmserve.needs import free_memory, memory_needed
from mmserve.rpc.engines import EngineLike, Engines
from mmserve.rpc.reload import Load, Replacement

logger = logging.getLogger("mmserve.rpc")

_MIB = 1 << 20
#: Maximum characters of a name, which is in log lines, metric labels, and errors.
_NAME = 256


class Loading:
    """Loads models in addition to those that serve, and unloads any but the last; used on one event loop.

    Sequentially: the memory of a model is checked before any of it is allocated. ``run`` calls a blocking function on
    another thread; ``load`` is set by servers that can load models.
    """

    def __init__(
        self, engines: Engines, config: Config, run: Callable[..., Awaitable[Any]], replacement: Replacement
    ) -> None:
        self._engines, self._config, self._run, self._replacement = engines, config, run, replacement
        self.load: Load | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def add(self, path: str, name: str = "", dtype: str = "") -> EngineLike:
        """Serve the checkpoint ``path`` in the server's folder as model ``name`` (empty = its folder's).

        Continues if its caller disconnects. Raises ``Unimplemented`` if this server cannot load models, ``NotFound``,
        ``InvalidArgument`` for invalid files, ``FailedPrecondition`` if its name is in use, ``ResourceExhausted`` if
        memory is too small.
        """
        load = self.load
        if load is None:
            raise Unimplemented("models cannot be loaded at run time on a cluster")
        entry = ModelConfig(path=str(self._folder(path)), name=name, dtype=dtype or "auto")
        return await self._shielded(self._add(entry, load))

    async def drop(self, name: str, seconds: float | None = None) -> bool:
        """Stop serving model ``name``; returns when its memory is free.

        Its requests continue for at most ``seconds`` (None = ``drain_seconds``); those left then fail. Returns whether
        all ended by themselves. Raises ``NotFound``, ``Unavailable`` while the model is loading, and
        ``FailedPrecondition`` for the only model that serves.
        """
        return await self._shielded(self._drop(name, seconds))

    async def _shielded(self, work: Any) -> Any:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _add(self, entry: ModelConfig, load: Load) -> EngineLike:
        async with self._replacement.lock:
            name = served_name(entry)
            if not name.isprintable() or len(name) > _NAME:
                raise InvalidArgument.of("name", f"must be at most {_NAME} printable characters")
            if name in self._engines.names:
                raise FailedPrecondition(f"a model {name!r} is already loaded: unload it, or choose another name")
            try:
                await self._replacement.read(check_memory, entry, self._config)
                engines = load(dataclasses.replace(self._config, models=(entry,)))
                engine: EngineLike = await self._replacement.read(next, engines)
            except ConfigError as error:
                raise InvalidArgument.of("path", str(error)) from error
            await self._run(engine.start)
            if self._replacement.ending:
                await self._run(engine.stop)
                raise FailedPrecondition("the server ends")
            self._engines.replace((*self._engines.names, name), {name: engine})
            logger.info("loaded %s; serving %s", name, ", ".join(self._engines))
            return engine

    async def _drop(self, name: str, seconds: float | None) -> bool:
        async with self._replacement.lock:
            if name not in self._engines.names:
                raise NotFound(f"no model {name!r} here; there is {', '.join(self._engines.names)}")
            self._engines.find(name)
            if len(self._engines) == 1:
                raise FailedPrecondition(f"{name!r} is the only model of this server: load another one first")
            names = tuple(each for each in self._engines.names if each != name)
            gone = self._engines.replace(names, {})
            logger.info("unloading %s; serving %s", name, ", ".join(self._engines))
        drain = self._config.server.drain_seconds if seconds is None else seconds
        return await self._replacement.retire(gone, drain)

    def _folder(self, path: str) -> Path:
        allowed = self._config.server.model_folder
        if not allowed:
            raise Unimplemented("models cannot be loaded at run time: [server] model_folder is not set")
        root = Path(allowed).expanduser().resolve()
        try:
            folder = (root / path).resolve()
            if not path or folder == root or not folder.is_relative_to(root):
                raise InvalidArgument.of("path", "must be that of a folder within [server] model_folder")
            if folder.is_dir():
                return folder
        except (OSError, ValueError):  # the name is too long, or contains a null byte
            pass
        raise NotFound(f"[server] model_folder has no folder {path[:_NAME]!r}")


def check_memory(entry: ModelConfig, config: Config) -> None:
    """Raises ``ResourceExhausted`` with the missing amount of memory for a model, ``ConfigError`` for an invalid
    one."""
    needed = memory_needed(entry, config)
    reserve = config.server.load_reserve_bytes
    missing = needed.weights + needed.pages + reserve - free_memory(needed.device)
    if missing > 0:
        raise ResourceExhausted(
            f"no memory for the model {served_name(entry)!r}: {-(-missing // _MIB)} MiB are missing. It takes "
            f"{needed.weights // _MIB} MiB of weights and {needed.pages // _MIB} MiB of K/V pages on {needed.device}, "
            f"and [server] load_reserve_bytes keeps {reserve // _MIB} MiB free: unload a model, or set [engine] "
            "max_running or max_tokens lower"
        )

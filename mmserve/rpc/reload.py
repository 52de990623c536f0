"""Reloading of a running server's configuration: tokens and tenants, certificates, and models."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from mmserve.config import Config, ModelConfig
from mmserve.errors import ConfigError
from mmserve.memory import trim
from mmserve.models.names import served_names
from mmserve.observe.endpoint import Endpoint
from mmserve.rpc.auth import BearerAuth
from mmserve.rpc.certificates import Certificates
from mmserve.rpc.engines import EngineLike, Engines, caches_of
from mmserve.settle import settle
from mmserve.tenants import accepted_tokens

#: Loads the models of a configuration, one after another.
Load = Callable[[Config], Iterator[EngineLike]]

logger = logging.getLogger("mmserve.rpc")

#: Keys of [server], and other tables, that can be reloaded; changes of others require a restart.
_FOLLOWED = ("auth_tokens", "allow_plaintext_tokens", "tls_certificate", "tls_key", "tls_client_ca")
_TABLES = ("models", "tenants")
#: Interval (seconds) of attempts to free an engine: each is a full garbage collection, which blocks other threads.
_FREEING = tuple(0.01 * 2**i for i in range(8))


class Guard:
    """Access control of the server: tokens and certificates."""

    def __init__(self, config: Config, refused: Callable[[str], None]) -> None:
        self.auth = BearerAuth(accepted_tokens(config.tenants, config.server.auth_tokens), refused)
        self.certificates = Certificates(config.server) if config.server.tls_key else None
        self.endpoint: Endpoint | None = None  # of metrics, once it is created

    def read(self, config: Config) -> Callable[[], None]:
        """Read the tokens and certificates of ``config``. Calling the result puts them into use.

        Thread-safe; the result must be called on the server's event loop. Open connections and calls in progress
        continue. Raises ``ConfigError``, without any change, if something is invalid.
        """
        accepted = accepted_tokens(config.tenants, config.server.auth_tokens)
        if self.auth.guards and not accepted:
            raise ConfigError("the new configuration asks for no token: to open the server to all, restart it")
        if bool(config.server.tls_key) != (self.certificates is not None):
            raise ConfigError("[server] tls_key can be set or removed only by a restart")
        use = None if self.certificates is None else self.certificates.read(config.server)

        def apply() -> None:
            self.auth.replace(accepted)
            if use is not None:
                use()
            if self.endpoint is not None:
                self.endpoint.reload_tls(config.server)

        return apply


class Replacement:
    """Replaces the models of ``config`` by those of another configuration; used on one event loop.

    ``run`` calls a blocking function on another thread; ``leave`` lets the sessions of an engine end within a number of
    seconds.
    """

    def __init__(
        self,
        engines: Engines,
        config: Config,
        run: Callable[..., Awaitable[Any]],
        leave: Callable[[EngineLike, float], Awaitable[None]],
    ) -> None:
        self._leave = leave
        self._engines = engines
        self._run = run
        self._config = config
        self._models = config.models
        self.leaving: list[EngineLike] = []  # no longer served; their requests are still ending
        self.lock = asyncio.Lock()  # serialises changes: models are loaded one after another
        self.ending = False
        self.reading = False  # a thread is reading the files of a model, which cannot be interrupted
        self._task: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[bool]] = set()

    def begin(self, models: tuple[ModelConfig, ...], load: Load | None) -> None:
        """Serve ``models`` once the new ones are loaded by ``load``, in the background.

        A model whose entry differs is loaded again. Models no longer served finish their requests, within
        ``drain_seconds``. If a model cannot be loaded, nothing changes. All other settings remain those of the server's
        start.
        """
        if models == self._models:
            return
        why = ""
        if load is None:
            why = "this server cannot load models"
        elif self.ending:
            why = "the server is shutting down"
        elif self._engines.loading or (self._task is not None and not self._task.done()):
            why = "models are still loading; send SIGHUP again later"
        if load is None or why:
            logger.warning("[[models]] differ, and stay as they were: %s", why)
            return
        self._task = asyncio.create_task(self._replace(models, load))

    def cancel(self) -> None:
        """Make no further changes, because the server ends; it also stops the engines in ``leaving``."""
        self.ending = True

    async def read(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a blocking function that reads files of a model."""

        def reading() -> Any:
            self.reading = True
            try:
                return call(*args)
            finally:
                self.reading = False

        return await self._run(reading)

    def retire(self, gone: list[EngineLike], seconds: float) -> Coroutine[Any, Any, bool]:
        """Stop engines of removed models once their requests have ended, after at most ``seconds``, and free their
        memory; empties ``gone``. Returns whether all requests ended by themselves."""
        self.leaving += gone  # immediately, so that they are stopped if the server ends now
        return self._retire(gone, seconds)

    async def _retire(self, gone: list[EngineLike], seconds: float) -> bool:
        stopped: list[weakref.ref[EngineLike]] = []
        in_time = True
        while gone:
            engine = gone.pop(0)
            ended, _ = await asyncio.gather(self._run(engine.drain, seconds), self._leave(engine, seconds))
            if not ended:
                logger.warning("a model was dropped while it had requests, which were cancelled")
                in_time = False
            if self.ending:
                return in_time
            await self._run(engine.stop)
            await self._run(self._unpin, engine)
            self.leaving.remove(engine)
            stopped.append(weakref.ref(engine))
            del engine
        if not self.ending:
            await self._run(release_memory, stopped)
        return in_time

    def _unpin(self, stopped: EngineLike) -> None:
        """Unpin cache entries of a stopped engine that the engine of the same name, if there is one, does not use."""
        caches, successor = caches_of(stopped), self._engines.get(stopped.info.name)
        if caches is not None:
            caches.unpin_in_memory(None if successor is None else caches_of(successor))

    async def _replace(self, models: tuple[ModelConfig, ...], load: Load) -> None:
        async with self.lock:
            gone = await self._replaced(models, load)
        retiring = asyncio.create_task(self.retire(gone, self._config.server.drain_seconds))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    async def _replaced(self, models: tuple[ModelConfig, ...], load: Load) -> list[EngineLike]:
        """Load new models. Returns the engines to be stopped. Models that were loaded on request remain."""
        old = dict(zip(served_names(self._models), self._models, strict=True))
        new = dict(zip(served_names(models), models, strict=True))
        loaded = [name for name in self._engines.names if name not in old and name not in new]
        changed = {name: e for name, e in new.items() if old.get(name) != e or name not in self._engines}
        fresh: dict[str, EngineLike] = {}
        try:
            engines = load(dataclasses.replace(self._config, models=tuple(changed.values())))
            for name in changed:
                if self.ending:
                    break
                fresh[name] = await self.read(next, engines)
                await self._run(fresh[name].start)
            if self.ending:
                raise ConfigError("the server is shutting down")
        except Exception as error:
            cause = None if isinstance(error, ConfigError) else error
            logger.error("[[models]] stay as they were: %s", error, exc_info=cause)
            for engine in fresh.values():
                await self._run(engine.stop)
            return []
        gone = self._engines.replace((*new, *loaded), fresh)
        self._models = models
        logger.info("serving %s", ", ".join(self._engines))
        return gone


def release_memory(gone: Sequence[weakref.ref[EngineLike]]) -> None:
    """Return the memory of stopped engines to the system; blocks until the last references to them are gone, for at
    most some seconds.

    An engine that is still referenced, for example by the thread that has just stopped it, would be frozen by
    ``settle`` and never collected.
    """
    gc.unfreeze()
    for seconds in _FREEING:
        gc.collect()
        if not any(engine() for engine in gone):
            settle()
            break
        time.sleep(seconds)
    else:
        logger.warning("a model that was dropped is still referenced: its memory is freed later")
    trim()


def unfollowed(old: Config, new: Config) -> list[str]:
    """Differences between two configurations that require a restart: tables, and keys of [server]."""
    keys = [f.name for f in dataclasses.fields(old.server) if f.name not in _FOLLOWED]
    changed = [f"[server] {key}" for key in keys if getattr(old.server, key) != getattr(new.server, key)]
    tables = [f.name for f in dataclasses.fields(old) if f.name not in ("server", *_TABLES)]
    return changed + [f"[{table}]" for table in tables if getattr(old, table) != getattr(new, table)]

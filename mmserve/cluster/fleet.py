"""The workers of a cluster: starts, supervises and replaces them, and connects them to their models' coordinators."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from mmserve.cluster import ray_actors
from mmserve.cluster.config import ClusterConfig
from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.draining import Action, Draining
from mmserve.cluster.head import HeadWatch
from mmserve.cluster.member import Member
from mmserve.cluster.messages import Described, Heartbeat, Item
from mmserve.cluster.pace import Pace
from mmserve.cluster.payload_store import SharedPayloadStore
from mmserve.cluster.spares import Loaded, Spares
from mmserve.config import Config, ServerConfig
from mmserve.errors import MMServeError, Unavailable
from mmserve.transfer.nixl import Region, require_nixl
from mmserve.transfer.shared_memory import Ticket, host_id

logger = logging.getLogger("mmserve.cluster")

#: Interval (seconds) of checks of all workers.
_TICK = 0.1
#: Maximum seconds for workers to write their caches to disk when they exit.
_CLOSING = 30.0
#: Delay (seconds) before a worker that failed to start is started again; doubled each time, up to the second value.
_RESTART_SECONDS, _MAX_RESTART_SECONDS = 0.5, 30.0


class Fleet:
    """All workers of a cluster. Call ``start`` after ``ray_actors.start``."""

    def __init__(self, config: Config, cluster: ClusterConfig) -> None:
        self._config, self._cluster = _for_workers(config), cluster
        self._engine = config.engine
        settings = cluster.cluster
        self.members = [Member(i, worker, settings) for i, worker in enumerate(cluster.each)]
        self.coordinators: dict[str, Coordinator] = {}
        self.payloads = SharedPayloadStore(self._host_of, self._reuse)
        self._here = host_id()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        kinds = {member.threads for member in self.members if not member.settings.gpus}
        self._spares = Spares(kinds, settings.spares, self._spare)
        self._pace, self._draining = Pace(), Draining(settings.slow_factor)
        self._placement: ray_actors.Placement | None = None
        self._head: HeadWatch | None = None
        self.head_lost = False
        self.lost = 0  # number of workers that exited, or were given up
        self._failed: Exception | None = None
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def start(self, on_head: Callable[[bool], None] = lambda _lost: None) -> dict[str, Coordinator]:
        """Start all workers and wait until they serve. Returns the coordinator of each model, by name.

        ``on_head`` is called with whether Ray's head is lost, each time that changes. Raises ``ConfigError`` if the
        cluster lacks resources, or a model cannot be loaded, and any other error with which a worker fails to start.
        """
        if self._cluster.cluster.transport == "nixl":
            require_nixl()
        self._placement = ray_actors.Placement(self._cluster)
        for member in self.members:
            self._thread(f"mmserve-worker-{member.name}", partial(self._keep, member))
        self._thread("mmserve-fleet", self._watch)
        with self._changed:
            self._changed.wait_for(lambda: self._failed or all(member.described for member in self.members))
            if self._failed is not None:
                raise self._failed
        self._spares.start()

        def changed(lost: bool) -> None:
            self.head_lost = lost
            on_head(lost)

        self._head = HeadWatch(ray_actors.head(), changed)
        self._head.start()
        return self.coordinators

    def stop(self) -> None:
        """Stop all workers, after they have written their persistent caches to disk."""
        self._stopping = True
        if self._head is not None:
            self._head.stop()
        if self._config.kv_cache.disk_folder:
            self._close_members()
        for member in self.members:
            self._end(member.actor, member.described)
        self._spares.stop()
        for thread in self._threads:
            thread.join(10.0)
        if self._placement is not None and not self.head_lost:
            self._placement.close()
        self.payloads.close()

    @property
    def spares_ready(self) -> int:
        """Number of spares that can replace a worker immediately."""
        return self._spares.ready

    # --- one thread per member ---

    def _keep(self, member: Member) -> None:
        """Keep a process running for ``member``, restarting it when it exits."""
        pause = _RESTART_SECONDS
        while not self._stopping:
            try:
                begun = self._start_member(member)
                self._joined(member, begun.described)
            except Exception as error:  # noqa: BLE001 - the member is started again, whatever went wrong
                self._start_failed(member, error)
                time.sleep(pause)
                pause = min(2 * pause, _MAX_RESTART_SECONDS)
                continue
            pause = _RESTART_SECONDS
            try:
                for items in begun.actor.events():
                    member.silent = 0.0
                    self._deliver(member, items)
                    if member.actor is not begun.actor:
                        break  # it was given up
            except Exception:
                logger.exception("a report of worker %s cannot be read", member.name)
                self._end(begun.actor, begun.described)
            if not self._stopping:
                logger.warning("worker %s (process %d) has ended; it is replaced", member.name, begun.described.pid)
            self._worker_exited(member, begun.actor)

    def _start_failed(self, member: Member, error: Exception) -> None:
        traceback = None if isinstance(error, MMServeError) else error
        logger.error("worker %s could not start: %s", member.name, error, exc_info=traceback)
        actor = member.actor
        self._end(actor, None)
        self._worker_exited(member, actor)
        if not isinstance(error, Unavailable):
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _start_member(self, member: Member) -> Loaded:
        spare = self._spares.take(member.threads) if member.begun and not member.settings.gpus else None
        if spare is None:
            assert self._placement is not None, "workers begin once there is room for them"
            options = self._placement.options(member.index, member.settings)
            member.actor = actor = ray_actors.Actor(options)  # set immediately, so that `stop` can kill it
            spare = self._load(actor, member.threads)
        member.begun += 1
        member.name = f"{member.index}" if member.begun == 1 else f"{member.index}.{member.begun}"
        member.actor = spare.actor
        member.serve(member.roles)
        return spare

    def _spare(self, threads: int) -> Loaded:
        return self._load(ray_actors.Actor({"num_cpus": 0, **ray_actors.forked(self._cluster)}), threads)

    def _load(self, actor: ray_actors.Actor, threads: int) -> Loaded:
        settings = self._cluster.cluster
        here = settings.transport == "shared_memory" or actor.host() == self._here
        transport = settings.transport
        if transport == "auto":
            transport = "shared_memory" if here else "object_store"
        linked = here and transport != "object_store"  # references to Ray's store can only be sent by Ray
        config = replace(self._config, engine=replace(self._config.engine, torch_threads=threads))
        offered, kv_bits = self.payloads.offered, settings.kv_bits
        described = actor.load(config, transport=transport, linked=linked, kv_bits=kv_bits, offered=offered)
        return Loaded(actor, described)

    def _joined(self, member: Member, described: Described) -> None:
        member.silent = 0.0
        with self._lock:
            for name, info in described.models.items():
                if name not in self.coordinators:
                    self.coordinators[name] = Coordinator(
                        info,
                        self._engine,
                        self._cluster.cluster,
                        self.payloads,
                        described.sessions[name],
                        described.adapters[name],
                    )
        for coordinator in self.coordinators.values():
            coordinator.load_adapters(member)  # before it is supervised: it reports nothing yet
        with member.changing:
            with self._lock:
                member.described = described
            logger.info("worker %s (process %d) serves %s", member.name, described.pid, ", ".join(sorted(member.roles)))
            for coordinator in self.coordinators.values():
                coordinator.worker_ready(member)
        with self._changed:
            self._changed.notify_all()

    def _deliver(self, member: Member, items: Sequence[Item]) -> None:
        by_model: dict[str, list[Item]] = defaultdict(list)
        for item in items:
            if isinstance(item, Heartbeat):
                with self._lock:
                    if member.described is not None:  # otherwise it was given up
                        self._pace.record(member.name, item.passes)
                for model in item.stats:
                    by_model[model].append(item)
            else:
                by_model[item.model].append(item)
        for model, own in by_model.items():
            try:
                self.coordinators[model].take(member.name, own)
            except Exception:
                logger.exception("reports of worker %s about %s are lost", member.name, model)

    def _give_up(self, member: Member, actor: ray_actors.Actor | None) -> None:
        """Kill ``actor`` and continue without it, if it is still that of ``member``."""
        with self._lock:
            described = member.described
            if member.actor is not actor:
                return
        self._end(actor, described)
        self._worker_exited(member, actor)

    def _worker_exited(self, member: Member, actor: ray_actors.Actor | None) -> None:
        """``member`` is no longer served by ``actor``; may be repeated. Returns once the coordinators are notified."""
        with member.changing:
            with self._lock:
                if member.actor is not actor:
                    return
                name, described, member.described, member.actor = member.name, member.described, None, None
                self._pace.discard(name)
                self._draining.discard(name)
            member.resume()
            if described is not None:
                self.lost += not self._stopping
                for model, coordinator in list(self.coordinators.items()):
                    with _logged(f"the end of worker {name} at the coordinator of {model}"):
                        coordinator.worker_exited(name)

    def _close_members(self) -> None:
        """Close all workers gracefully, in parallel."""
        actors = [member.actor for member in self.members if member.actor is not None and member.described is not None]
        with ThreadPoolExecutor(len(self.members)) as threads:
            list(threads.map(lambda actor: actor.close(_CLOSING), actors))

    def _end(self, actor: ray_actors.Actor | None, described: Described | None) -> None:
        """Kill a process, even if it is stopped; ``described``: None = it has not started."""
        if described is not None and described.host == self._here:
            with suppress(ProcessLookupError):
                os.kill(described.pid, signal.SIGKILL)
        if actor is not None:
            actor.kill()

    # --- other threads ---

    def _watch(self) -> None:
        before = checked = time.monotonic()
        while not self._stopping:
            time.sleep(_TICK)
            now = time.monotonic()
            passed, before = min(now - before, 2 * _TICK), now  # if this process was delayed, so were the workers
            for member in self.members:
                with _logged(f"the check of worker {member.name}"):
                    self._check_member(member, now, passed)
            for model, coordinator in list(self.coordinators.items()):
                with _logged(f"the check of the requests to {model}"):
                    coordinator.tick(now)
                    if self._cluster.cluster.switching and now - checked >= 1.0:
                        coordinator.switch(now)
            if now - checked >= 1.0:
                checked = now

    def _check_member(self, member: Member, now: float, passed: float) -> None:
        """``passed``: seconds since the last check."""
        actor = member.actor  # read before the rest, so that its replacement is not mistaken for it
        member.flush()
        member.silent += passed
        if member.described is not None and member.silent > self._cluster.cluster.silent_seconds:
            logger.warning("worker %s has been silent for %.1f s: it is given up", member.name, member.silent)
            self._give_up(member, actor)
        elif member.described is not None:
            self._handle_slowness(member, actor, now)

    def _handle_slowness(self, member: Member, actor: ray_actors.Actor | None, now: float) -> None:
        """Drain ``member`` while it is slow, and replace it if it stays slow."""
        others = [each for each in self.members if each is not member and each.described is not None]
        redundant = all(any(role in each.roles for each in others) for role in member.roles)
        with self._lock:
            slowness = self._pace.slowness(member.name)
            action = self._draining.due_action(
                now, member.name, slowness, redundant=redundant, replaceable=self.spares_ready > 0
            )
            if action is None:
                return
            self._pace.reset(member.name)
        logger.warning("worker %s %s: its passes take %.1f times as long as usual", member.name, action.value, slowness)
        if action is Action.REPLACE:
            self._give_up(member, actor)
            return
        with member.changing:
            if member.actor is not actor:
                return  # it exited meanwhile, and has a replacement
            if action is Action.DRAIN:
                member.drain()
                return
            member.resume()
            for coordinator in self.coordinators.values():
                coordinator.worker_ready(member)

    def _host_of(self, name: str) -> str:
        for member in self.members:
            described = member.described  # read once: other threads may clear it
            if member.name == name and described is not None:
                return described.host
        return ""

    def _reuse(self, ticket: Ticket | Region) -> None:
        for member in self.members:
            described = member.described
            if described is not None and described.arena == ticket.address:
                member.reuse(ticket)

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Context that logs exceptions: they must not end the thread, which serves others, too."""
    try:
        yield
    except Exception:
        logger.exception("%s failed", what)


def _for_workers(config: Config) -> Config:
    """``config`` without settings that only the front end needs, especially tokens."""
    return replace(config, server=ServerConfig(otlp_endpoint=config.server.otlp_endpoint), tenants=())

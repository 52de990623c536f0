"""The parts of Ray that a fleet needs: the cluster, its placement group, and the actor of a worker.

Ray is not imported before ``start``, which must precede the creation of any gRPC object.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmserve.cluster import prefork, require_ray
from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.config import ClusterConfig, WorkerSettings
from mmserve.cluster.link import Link, Offered, connected
from mmserve.cluster.messages import STREAM, Described, Item
from mmserve.config import Config
from mmserve.errors import ConfigError, Unavailable

logger = logging.getLogger("mmserve.cluster")

#: Attempts to start a local cluster: a raylet gives up if its helpers take more than 15 seconds.
_ATTEMPTS = 3
#: Settings of a local cluster: no task processes, because there are no tasks; normal priority of workers (Ray's default
#: is "nice" 15); and seconds for which workers and the front end survive the head.
_LOCAL = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}
#: Timeout (seconds) for Ray to shut down.
_ENDING = 30.0
#: Timeout (seconds) for a worker's reply: it may have to read an adapter from a slow disk.
_ANSWERING = 60.0
#: Timeout (seconds) for Ray to reserve resources for all workers.
_PLACING = 20.0


def start(config: ClusterConfig) -> None:
    """Start a Ray cluster on this host, or join one. Raises ``ConfigError`` if that fails."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise a token is written to the user's home
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings = config.cluster
    if settings.address == "local":
        for name, value in _LOCAL.items():  # read when Ray is imported
            os.environ.setdefault(name, value)
    require_ray()
    import ray

    if settings.address != "local":
        try:
            ray.init(address=settings.address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no Ray cluster at {settings.address!r}: {error}") from error
        return
    cpus = sum(worker.cpus for worker in config.each)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=max(1, int(-(-cpus // 1))),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=settings.object_store_mb << 20,
            )
        except Exception as error:
            ray.shutdown()
            if type(error) is not Exception:  # Ray has no specific type for it
                raise
            if attempt == _ATTEMPTS:
                raise ConfigError(f"Ray did not start on this host, {_ATTEMPTS} times: {error}") from error
            logger.warning("Ray did not start on this host, which a busy host may cause; trying again: %s", error)
        else:
            return


def end() -> bool:
    """Leave the cluster; a cluster started by ``start`` is shut down. Returns False if Ray does not shut down, for
    example without its head; its processes then exit with this one."""
    import ray

    thread = threading.Thread(target=ray.shutdown, name="mmserve-ray-end", daemon=True)
    thread.start()
    thread.join(_ENDING)
    return not thread.is_alive()


def forked(config: ClusterConfig) -> dict[str, Any]:
    """Options of actors without GPUs: on a local cluster, forks of a process that has imported everything."""
    return {"runtime_env": {"py_executable": prefork.command()}} if config.cluster.address == "local" else {}


def head() -> str:
    """The address (host:port) of the cluster's head."""
    import ray

    address: str = ray.get_runtime_context().gcs_address
    return address


class Placement:
    """Resources for every worker on the cluster, reserved together: all of them or none."""

    def __init__(self, config: ClusterConfig) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self._forked = forked(config)
        bundles: list[dict[str, float]] = []
        for worker in config.each:
            wanted = {"CPU": worker.cpus, "GPU": worker.gpus}
            bundles.append({name: amount for name, amount in wanted.items() if amount} or {"CPU": 0.01})
        self._group: Any = placement_group(bundles, strategy=config.cluster.placement)
        try:
            ray.get(self._group.ready(), timeout=_PLACING)
        except ray.exceptions.GetTimeoutError as error:
            self.close()
            raise ConfigError(
                f"the Ray cluster has no room for {len(bundles)} workers ({config.cluster.placement}): it would need "
                f"{bundles}, and has {ray.available_resources()}"
            ) from error

    def options(self, index: int, worker: WorkerSettings) -> dict[str, Any]:
        """Options of the actor of worker ``index``."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": worker.cpus,
            "num_gpus": worker.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            **({} if worker.gpus else self._forked),
        }

    def close(self) -> None:
        """Release the resources; waits for the cluster's head."""
        from ray.util import remove_placement_group

        remove_placement_group(self._group)


class Actor:
    """A Ray actor with a worker in it. Calls do not block, except for ``load`` and ``events``.

    Orders to a worker of this host, and its reports, use a ``link`` instead of Ray.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._handle: Any = _actor_class().options(**options).remote()
        self._link: Link | None = None

    def load(self, config: Config, *, transport: str, linked: bool, kv_bits: int, offered: Offered) -> Described:
        """See ``Worker.load``; ``offered``: memory of this process that is sent with orders. Raises its errors, or
        ``Unavailable`` if the actor exits meanwhile."""
        described: Described = self._waited(self._handle.load.remote(config, transport, linked, kv_bits))
        if described.listener:
            self._link = connected(described.listener, offered)
        return described

    def host(self) -> str:
        """The actor's host (see ``host_id``)."""
        host: str = self._waited(self._handle.host.remote())
        return host

    def events(self) -> Iterator[list[Item]]:
        """See ``Worker.events``; ends when the actor exits."""
        if self._link is not None:
            yield from self._link.messages()
            self._link.close()
            return
        import ray

        try:
            for reference in self._handle.events.remote():
                yield ray.get(reference)
        except ray.exceptions.RayError:
            return

    def call(self, name: str, *arguments: Any) -> None:
        """Call the worker's method ``name``, after previous calls."""
        if self._link is not None:
            self._link.send((name, arguments))
        else:
            self._handle.call.remote(name, *arguments)

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        """See ``Worker.ask``; raises ``WorkerEnded`` if the actor exits, or does not reply in time."""
        import ray

        reference = self._asked(model, question, arguments)
        try:
            return ray.get(reference, timeout=_ANSWERING)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise WorkerEnded(f"a worker did not answer: {type(error).__name__}") from error

    def post(self, model: str, question: str, arguments: Sequence[Any]) -> None:
        """See ``workers.Worker.post``."""
        self._asked(model, question, arguments)

    def close(self, seconds: float) -> None:
        """See ``Worker.close``; returns after ``seconds`` at the latest, or when the actor has exited."""
        import ray

        ray.wait([self._handle.call.remote("close")], timeout=seconds)

    def kill(self) -> None:
        """Kill the actor; logs if Ray cannot, for example without its head."""
        import ray

        if self._link is not None:
            self._link.close()
        try:
            ray.kill(self._handle)
        except Exception as error:  # noqa: BLE001 - Ray's, of no common class
            logger.warning("a worker's process could not be ended: %r", error)

    def _asked(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        ask = self._handle.ask.options(concurrency_group="streams") if question.startswith(STREAM) else self._handle.ask
        return ask.remote(model, question, tuple(arguments))

    def _waited(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise Unavailable(f"a worker ended while it started: {type(error).__name__}") from error


def _actor_class() -> Any:
    import ray

    class StageActor:
        """``Worker`` in a separate process, which imports torch when the actor is created."""

        def __init__(self) -> None:
            from mmserve.cluster.worker import Worker

            self._worker = Worker()

        @ray.method(concurrency_group="commands")
        def host(self) -> str:
            from mmserve.transfer.shared_memory import host_id

            return host_id()

        @ray.method(concurrency_group="commands")
        def load(self, config: Config, transport: str, linked: bool, kv_bits: int) -> Described:
            return self._worker.load(config, transport=transport, linked=linked, kv_bits=kv_bits)

        @ray.method(concurrency_group="commands")
        def call(self, name: str, *arguments: Any) -> None:
            getattr(self._worker, name)(*arguments)

        @ray.method(concurrency_group="questions")
        def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
            return self._worker.ask(model, question, arguments)

        @ray.method(concurrency_group="events", num_returns="streaming")
        def events(self) -> Iterator[list[Item]]:
            yield from self._worker.events()

    remote: Any = ray.remote
    groups = {"commands": 1, "questions": 1, "streams": 1, "events": 1}
    return remote(max_restarts=0, max_task_retries=0, concurrency_groups=groups)(StageActor)

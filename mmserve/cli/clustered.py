"""Engines whose stages run on the workers of a Ray cluster, for ``mmserve serve --cluster``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mmserve.cluster import ray_actors
from mmserve.cluster.config import load_cluster
from mmserve.cluster.metrics import FleetMetrics
from mmserve.config import Config
from mmserve.errors import ConfigError, FailedPrecondition
from mmserve.rpc.engines import EngineLike

if TYPE_CHECKING:
    from mmserve.rpc.server import Server


class Clustered:
    """Starts or joins the cluster described by ``file`` in its constructor, which must precede any gRPC object."""

    def __init__(self, settings: Config, file: Path) -> None:
        self._cluster = load_cluster(file)
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--cluster needs Linux: its processes share memory by memfd and abstract unix sockets")
        ray_actors.start(self._cluster)
        from mmserve.cluster.fleet import Fleet  # imports torch

        self._fleet = Fleet(settings, self._cluster)
        self._impair: Callable[[bool], None] = lambda _lost: None

    def attach(self, server: Server) -> None:
        """Make ``server`` report the state of the fleet; to be called before ``engines``."""
        server.metrics.registry.register(FleetMetrics(self._fleet))
        self._impair = server.impair

    def engines(self) -> Iterator[EngineLike]:
        """Start the workers; yields all models once all workers are ready."""
        yield from self._fleet.start(self._impair).values()

    def replacements(self, settings: Config) -> Iterator[EngineLike]:
        """The models of a cluster cannot be changed while it serves: raises ``FailedPrecondition``."""
        raise FailedPrecondition("a server with --cluster cannot load other models: restart it")

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started by this process."""
        self._fleet.stop()
        if not ray_actors.end():  # the interpreter would not exit either: it waits for Ray
            logging.shutdown()
            sys.stdout.flush()
            os._exit(1 if sys.exc_info()[0] else 0)

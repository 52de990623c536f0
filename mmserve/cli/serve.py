"""Serve models over gRPC, and over HTTP on request, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import mmserve
from mmserve.check import Finding, check, findings
from mmserve.cli.options import add_config, existing, print_json, read_config, read_tables
from mmserve.cluster import require_ray
from mmserve.cluster.config import load_cluster
from mmserve.config import Config
from mmserve.config.ports import try_port
from mmserve.errors import ConfigError
from mmserve.http import attach, require_packages
from mmserve.models.names import HUB, local_folder, served_names
from mmserve.observe.logs import FORMATS
from mmserve.rpc.engines import EngineLike
from mmserve.settle import settle

logger = logging.getLogger("mmserve")

if TYPE_CHECKING:  # these import torch
    from mmserve.cli.clustered import Clustered
    from mmserve.rpc.server import Server
    from mmserve.tiers.caches import Caches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve serve``."""
    add_config(parser)
    parser.add_argument(
        "--http",
        type=int,
        metavar="PORT",
        help="also serve the HTTP APIs (OpenAI's, Anthropic's and others) and the playground (extra mmserve[http])",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="run the stages on Ray workers that FILE (TOML) describes (extra mmserve[ray])",
    )
    parser.add_argument(
        "--log-format", choices=FORMATS, default="text", help="format of log lines: text (the default) or JSON objects"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not serve: check the configuration, ports, certificates and models, and report every problem",
    )
    parser.add_argument("--json", action="store_true", help="with --check: print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Serve; binds the port before models load, and prints the address once all models are ready."""
    if arguments.http is not None:
        arguments.set.append(f"server.http_port={arguments.http}")
    if arguments.check:
        return _check(arguments)
    if arguments.json:
        raise ConfigError("--json needs --check; use --log-format json for a log of JSON objects")
    settings = read_config(arguments)
    names = served_names(settings.models)
    for model in settings.models:
        if not model.path.startswith(HUB):
            local_folder(model.path)  # a missing folder is reported before the port is bound
    if arguments.cluster:
        existing("--cluster", Path(arguments.cluster))
        require_ray()
    server = settings.server
    if server.http_port:
        require_packages()
    for host, key in ((server.host, "port"), (server.host, "http_port"), (server.metrics_host, "metrics_port")):
        if port := getattr(server, key):
            try_port(host, port, key)  # a port in use is reported before PyTorch is imported
    logger.info("mmserve %s: importing PyTorch", mmserve.__version__)
    source: _Local | Clustered = _Local(settings)
    if arguments.cluster:
        from mmserve.cli.clustered import Clustered

        source = Clustered(settings, Path(arguments.cluster))  # before any gRPC object
    from mmserve.observe import traces
    from mmserve.rpc.server import Server  # imports torch, which takes seconds: only by this command

    end_traces = traces.configure(settings.server.otlp_endpoint)

    async def serve() -> _Loader:
        server = Server(settings, loading=names)
        source.attach(server)
        front = attach(server)
        where = f"{settings.server.host}:{await server.start()}"
        if front is not None:
            where += f", and over HTTP on {settings.server.host}:{front.port}"
        loader = _Loader(source, server, f"mmserve serves {', '.join(names)} on {where}")
        await server.serve_until_signal(loader.start, lambda: read_config(arguments), source.replacements)
        return loader

    try:
        asyncio.run(serve()).close()
    finally:
        source.close()
        end_traces()
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Print the result of each check (``--check``); exit code 0 if there are no problems."""
    found = []
    for finding in chain(_checked_cluster(arguments.cluster), check(*read_tables(arguments))):
        found.append(finding)
        if not arguments.json:
            print(f"{finding.part}: {finding.problem or 'ok'}", flush=True)  # at once: importing PyTorch takes seconds
    problems = any(finding.problem for finding in found)
    if arguments.json:
        print_json({"ok": not problems, "findings": [asdict(finding) for finding in found]})
    return 1 if problems else 0


def _checked_cluster(file: str | None) -> Iterator[Finding]:
    """Problems of the cluster description ``file``; yields nothing if it is None."""
    if file:
        yield from findings("cluster", require_ray, lambda: load_cluster(Path(file)))


class _Local:
    """Engines that run in this process."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._cache: Caches | None = None  # shared by all engines

    def attach(self, server: Server) -> None:
        """Let ``server`` load further models in this process; it obtains all other state from its engines."""
        server.loading.load = self.replacements

    def engines(self) -> Iterator[EngineLike]:
        """Load the models one after another."""
        from mmserve.assembly import load_engines  # imports torch, which takes seconds

        for engine in load_engines(self._settings):
            self._cache = engine.stages.encoder.cache
            yield engine
            engine.warm()

    def replacements(self, settings: Config) -> Iterator[EngineLike]:
        """Load the models of ``settings`` while the present ones serve; they share one cache."""
        from mmserve.assembly import load_engines

        for engine in load_engines(settings, self._cache):
            engine.warm()
            yield engine

    def close(self) -> None:
        """Does nothing: the server has stopped each engine."""


class _Loader:
    """Loads the models one after another in a thread and passes each to ``server``; prints ``ready`` after the last.

    Stops the server if a model cannot be loaded.
    """

    def __init__(self, source: _Local | Clustered, server: Server, ready: str) -> None:
        self._source = source
        self._server = server
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mmserve-load", daemon=True)

    def start(self) -> None:
        """Start loading."""
        self._thread.start()

    def close(self) -> None:
        """To be called after the server has stopped: raises the error of loading, or exits the process if it is not
        done."""
        self._thread.join(0.5)
        if self._error is not None:
            raise self._error
        # reading gigabytes cannot be interrupted, and the result is no longer needed
        if self._thread.is_alive() or self._server.reading:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)

    def _run(self) -> None:
        try:
            for engine in self._source.engines():
                if not asyncio.run_coroutine_threadsafe(self._server.add(engine), self._loop).result():
                    return
            settle()
            print(self._ready, flush=True)
        except BaseException as error:  # noqa: BLE001 - raised again by ``close``, on the main thread
            self._error = error
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop)

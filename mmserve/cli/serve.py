"""Serve models over gRPC until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio

from mmserve.cli.options import add_config, read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve serve``."""
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve; prints the address once requests are welcome."""
    from mmserve.assembly import build_engines  # loads torch: `mmserve --help` need not wait for it
    from mmserve.rpc.server import Server
    from mmserve.settle import settle

    settings = read_config(arguments)
    engines = build_engines(settings)

    async def serve() -> None:
        server = Server(settings, engines)
        where = f"{settings.server.host}:{await server.start()}"
        for engine in engines.values():
            engine.warm()
        settle()
        await server.serve_until_signal(
            lambda: print(f"mmserve serves {', '.join(engines)} on {where}", flush=True), lambda: read_config(arguments)
        )

    asyncio.run(serve())
    return 0

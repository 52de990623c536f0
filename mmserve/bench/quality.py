"""Accuracy of every task with a 95% interval, through the whole server: ``mmserve bench quality``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mmserve.assembly import BackgroundServer
from mmserve.bench.settings import measured_config, measured_policies
from mmserve.client import Client, Options
from mmserve.errors import ConfigError
from mmserve.reference.evaluate import evaluate
from mmserve.reference.tasks import TASKS


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Rows of ``task, n, accuracy, low, high`` for the tasks and policies that the arguments name."""
    tasks = arguments.tasks.split(",") if arguments.tasks else list(TASKS)
    unknown = set(tasks) - set(TASKS)
    if unknown:
        raise ConfigError(f"no task is called {sorted(unknown)[0]!r}; there are {', '.join(TASKS)}")
    with BackgroundServer(measured_config(arguments)) as server:
        with Client(server.address) as client:
            model = client.describe()
        recompute, commit = measured_policies(arguments, model)
        options: Options = {"recompute": recompute, "commit": commit}
        if arguments.block_length:
            options["block_length"] = arguments.block_length
        rows = evaluate(
            server.address, tasks=tasks, limit=arguments.limit, seed=arguments.seed, options=options, progress=progress
        )
    return {
        "rows": [asdict(row) for row in rows],
        "settings": {
            "model": model.name,
            "recompute": recompute,
            "commit": commit,
            "block_length": arguments.block_length or model.block_length,
            "seed": arguments.seed,
        },
    }

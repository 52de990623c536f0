"""Accuracy of every task with a 95% interval, measured end to end on a server: ``mmserve bench quality``."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress
from mmserve.bench.settings import measured_config, measured_policies, named_tasks
from mmserve.client import Client, Options
from mmserve.reference.evaluate import evaluate
from mmserve.reference.tasks import TASKS


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Rows of ``task, n, accuracy, low, high`` for the tasks and policies given by the arguments."""
    tasks = named_tasks(arguments, TASKS)
    with BackgroundServer(measured_config(arguments)) as server:
        with Client(server.address) as client:
            model = client.describe()
        policies = measured_policies(arguments, model)
        options: Options = {**policies, "block_length": arguments.block_length or None}
        rows = evaluate(
            server.address, tasks=tasks, limit=arguments.limit, seed=arguments.seed, options=options, progress=progress
        )
    return {
        "rows": [asdict(row) for row in rows],
        "settings": {
            "model": model.name,
            **policies,
            "block_length": arguments.block_length or model.block_length,
            "seed": arguments.seed,
        },
    }

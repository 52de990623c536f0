"""Accuracy of every task with a 95% interval, through the whole server: ``mmserve bench quality``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mmserve.assembly import BackgroundServer
from mmserve.cli.options import read_config
from mmserve.client import Options
from mmserve.reference.evaluate import evaluate


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Rows of ``task, n, accuracy, low, high`` for the policies that the arguments name."""
    options: Options = {
        "recompute": arguments.recompute or "none",
        "commit": arguments.commit or "low_confidence",
    }
    with BackgroundServer(read_config(arguments)) as server:
        rows = evaluate(server.address, limit=arguments.limit, seed=arguments.seed, options=options, progress=progress)
    return {"rows": [asdict(row) for row in rows], "settings": {**options, "seed": arguments.seed}}

"""Stages on a Ray cluster of this host against one process: ``mmserve bench cluster``.

``--tasks`` names the sections, each a module with ``run(arguments, progress) -> {"rows", "measures", "settings"}``; all
by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mmserve.cluster import ray_actors
from mmserve.cluster.config import cluster_config
from mmserve.errors import ConfigError

#: Section to its module.
SECTIONS = {
    "transfer": "mmserve.bench.cluster_transfer",
    "ahead": "mmserve.bench.cluster_ahead",
    "overhead": "mmserve.bench.cluster_overhead",
    "kills": "mmserve.bench.cluster_kills",
    "switching": "mmserve.bench.cluster_switching",
    "sharding": "mmserve.bench.cluster_sharding",
}


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """The rows and measures of the sections, and the settings of each."""
    names = [name for name in arguments.tasks.split(",") if name] or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ConfigError(f"--tasks of `cluster`: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    ray_actors.start(cluster_config({"workers": [{"roles": "epd", "cpus": 8.0}]}))
    report: dict[str, Any] = {"rows": [], "measures": [], "settings": {}}
    try:
        for name in names:
            found = import_module(SECTIONS[name]).run(arguments, progress)
            report["rows"] += found["rows"]
            report["measures"] += [{**measure, "name": f"{name}: {measure['name']}"} for measure in found["measures"]]
            report["settings"][name] = found["settings"]
    finally:
        ray_actors.end()
    return report

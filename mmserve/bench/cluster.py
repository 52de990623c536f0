"""Stages on a Ray cluster of this host compared with one process: ``mmserve bench cluster``."""

from __future__ import annotations

import argparse

from mmserve.bench.measures import Figures, Progress
from mmserve.bench.sections import run_sections
from mmserve.cluster import ray_actors
from mmserve.cluster.config import cluster_config

SECTIONS = {
    name: f"cluster_{name}" for name in ("transfer", "ahead", "coded", "overhead", "kills", "switching", "sharding")
}


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """The report of the sections given by ``--tasks``."""
    ray_actors.start(cluster_config({"workers": [{"roles": "epd", "cpus": 8.0}]}))
    try:
        return run_sections(arguments, progress, SECTIONS)
    finally:
        ray_actors.end()

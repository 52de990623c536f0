"""Load tests of a server from outside: ``mmserve bench serve``; by default the sections that suit any server."""

from __future__ import annotations

import argparse

from mmserve.bench.measures import Figures, Progress
from mmserve.bench.sections import run_sections

SECTIONS = {"load": "serve_load", "stall": "serve_stall", "prefix": "serve_prefix"}


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """The report of the sections given by ``--tasks``."""
    return run_sections(arguments, progress, SECTIONS, default=["load"])

"""What a server does under load from outside: ``mmserve bench serve``; by default what any server can be asked."""

from __future__ import annotations

import argparse

from mmserve.bench.measures import Figures, Progress
from mmserve.bench.sections import run_sections

SECTIONS = {"load": "serve_load", "stall": "serve_stall", "prefix": "serve_prefix"}


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """The report of the sections that ``--tasks`` names."""
    return run_sections(arguments, progress, SECTIONS, default=["load"])

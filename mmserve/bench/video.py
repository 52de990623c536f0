"""What streams of video cost, and how right answers about them are: ``mmserve bench video``."""

from __future__ import annotations

import argparse

from mmserve.bench.measures import Figures, Progress
from mmserve.bench.sections import run_sections
from mmserve.bench.video_plot import plot

#: Sections in the order in which they are run.
SECTIONS = {name: f"video_{name}" for name in ("decoding", "files", "accuracy", "sessions", "watches", "long", "cuts")}


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """The report of the sections that ``--tasks`` names, and the plot that ``--plot`` asks for."""
    report = run_sections(arguments, progress, SECTIONS)
    if arguments.plot is not None:
        plot(report["rows"], arguments.plot)
        progress(f"wrote {arguments.plot}")
    return report

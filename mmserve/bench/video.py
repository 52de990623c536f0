"""What streams of video cost, and how right answers about them are: ``mmserve bench video``.

Each section is a module with ``run(arguments, progress) -> {"rows": [...], "measures": [...], "settings": {...}}``;
``--tasks`` names those that are run, by default all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mmserve.bench.video_plot import plot
from mmserve.errors import ConfigError

#: Section to its module, in the order in which they are run.
SECTIONS = {
    "decoding": "mmserve.bench.video_decoding",
    "files": "mmserve.bench.video_files",
    "accuracy": "mmserve.bench.video_accuracy",
    "sessions": "mmserve.bench.video_sessions",
    "watches": "mmserve.bench.video_watches",
    "long": "mmserve.bench.video_long",
    "cuts": "mmserve.bench.video_cuts",
}


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """The rows and measures of the sections, the settings of each, and the plot that ``--plot`` asks for."""
    names = [name for name in arguments.tasks.split(",") if name] or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ConfigError(f"--tasks of `video`: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    report: dict[str, Any] = {"rows": [], "measures": [], "settings": {}}
    for name in names:
        found = import_module(SECTIONS[name]).run(arguments, progress)
        report["rows"] += found["rows"]
        report["measures"] += [{**measure, "name": _named(name, measure["name"])} for measure in found["measures"]]
        report["settings"][name] = found["settings"]
    if arguments.plot is not None:
        plot(report["rows"], arguments.plot)
        progress(f"wrote {arguments.plot}")
    return report


def _named(section: str, measure: str) -> str:
    """The name of a measure with its section in front."""
    return measure if measure.startswith(f"{section}: ") else f"{section}: {measure}"

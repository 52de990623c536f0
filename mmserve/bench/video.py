"""Streams of video, section by section: ``mmserve bench video --tasks decoding,accuracy,…``.

Each section is a module with ``run(arguments, progress) -> {"rows": [...], "measures": [...], "settings": {...}}``;
a row names its section as ``measured``. Measures are made by ``mmserve.bench.measures``.
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
    "accuracy": "mmserve.bench.video_accuracy",
    "sessions": "mmserve.bench.video_sessions",
    "watches": "mmserve.bench.video_watches",
    "long": "mmserve.bench.video_long",
    "cuts": "mmserve.bench.video_cuts",
}


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """The rows and measures of the sections that ``--tasks`` names, by default of all."""
    names = [name for name in arguments.tasks.split(",") if name] or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ConfigError(f"--tasks of `video`: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    rows: list[dict[str, Any]] = []
    measures: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    for name in names:
        found = import_module(SECTIONS[name]).run(arguments, progress)
        rows += found["rows"]
        measures += [{**measure, "name": f"{name}: {measure['name']}"} for measure in found["measures"]]
        settings[name] = found["settings"]
    if arguments.plot is not None:
        plot(rows, arguments.plot)
        progress(f"wrote {arguments.plot}")
    return {"rows": rows, "measures": measures, "settings": settings}

"""What video costs: ``mmserve bench video``, a section for each name in ``--tasks`` (default all)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mmserve.errors import ConfigError

#: Section to the module whose ``run(arguments, progress)`` returns its rows, measures and settings.
SECTIONS = {"decoding": "mmserve.bench.video_decoding"}


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """The rows and measures of the sections, and the settings of each."""
    names = [name for name in arguments.tasks.split(",") if name] or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ConfigError(f"--tasks of `video`: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    report: dict[str, Any] = {"rows": [], "measures": [], "settings": {}}
    for name in names:
        figures = import_module(SECTIONS[name]).run(arguments, progress)
        report["rows"] += figures["rows"]
        report["measures"] += figures["measures"]
        report["settings"][name] = figures["settings"]
    return report

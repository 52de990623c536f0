"""What a server does under load from outside: ``mmserve bench serve``.

``--tasks`` names the sections, each a module with ``run(arguments, progress) -> {"rows", "measures", "settings"}``; by
default the one that any server can be asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mmserve.errors import ConfigError

#: Section to its module.
SECTIONS = {
    "load": "mmserve.bench.serve_load",
    "stall": "mmserve.bench.serve_stall",
    "prefix": "mmserve.bench.serve_prefix",
}


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """The rows and measures of the sections, and the settings of each."""
    names = [name for name in arguments.tasks.split(",") if name] or ["load"]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ConfigError(f"--tasks of `serve`: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    report: dict[str, Any] = {"rows": [], "measures": [], "settings": {}}
    for name in names:
        found = import_module(SECTIONS[name]).run(arguments, progress)
        report["rows"] += found["rows"]
        report["measures"] += [{**measure, "name": f"{name}: {measure['name']}"} for measure in found["measures"]]
        report["settings"][name] = found["settings"]
    return report

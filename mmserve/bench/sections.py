"""Benchmarks in sections: each is a module with ``run(arguments, progress) -> {"rows", "measures", "settings"}``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import import_module

from mmserve.bench.measures import Figures, Progress, as_text
from mmserve.bench.settings import named_tasks


def run_sections(
    arguments: argparse.Namespace, progress: Progress, sections: dict[str, str], default: Iterable[str] = ()
) -> Figures:
    """The report of the sections given by ``--tasks``, by default ``default`` or all; with the settings of each
    section.

    ``sections`` maps names to modules of this package.
    """
    report: Figures = {"rows": [], "measures": [], "settings": {}}
    for name in named_tasks(arguments, sections, default):
        found = import_module(f"mmserve.bench.{sections[name]}").run(arguments, progress)
        report["rows"] += found["rows"]
        for measure in found["measures"]:
            own = measure["name"].removeprefix(f"{name}: ")
            report["measures"].append({**measure, "name": f"{name}: {own}"})
            progress(as_text(report["measures"][-1]))  # at once, in case a later section fails
        report["settings"][name] = found["settings"]
    return report

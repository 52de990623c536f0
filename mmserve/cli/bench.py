"""Run a benchmark and print its results."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

from mmserve.bench.measures import as_text
from mmserve.cli.benchmarks import BENCHMARKS
from mmserve.cli.options import add_json, print_json, require_plot, show_progress
from mmserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve bench``: one subcommand for each benchmark, with its own options."""
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        command = names.add_parser(name, help=benchmark.summary.replace("%", "%%"), description=benchmark.summary)
        for add in benchmark.options:
            add(command)
        add_json(command)
        # without SUPPRESS it would overwrite the option given before NAME
        command.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log more")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, with progress on stderr, and print a table or one JSON object."""
    require_plot(getattr(arguments, "plot", None))
    from mmserve.observe.machine import describe  # imports torch

    counts = {name: getattr(arguments, name) for name in ("limit", "repeats", "concurrent") if name in arguments}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name} must be at least 1, not {count}")
    if "repeats" in counts and counts["repeats"] * counts.get("limit", 2) < 2:
        raise ConfigError("a benchmark needs at least 2 measurements: --limit 2 or --repeats 2")
    with redirect_stdout(sys.stderr):  # stdout holds only the result; Ray writes to stdout, too
        figures = import_module(f"mmserve.bench.{BENCHMARKS[arguments.name].module}").run(arguments, show_progress)
    report = {"bench": arguments.name, **figures, "machine": describe()}
    if arguments.json:
        print_json(report)
    else:
        for row in [*report.get("rows", []), *report.get("kv_reductions", [])]:
            print(_line(row))
        for measure in report.get("measures", []):
            print(as_text(measure))
        if "search" in report:
            print(_line({"measured": "search", **report["search"]}))
    return 0


def _line(row: dict[str, Any]) -> str:
    keys = (
        "measured",
        "stage",
        "op",
        "case",
        "tower",
        "tiles",
        "task",
        "recompute",
        "commit",
        "pruner",
        "kv_reduction",
    )
    names = [str(row[key]) for key in keys if key in row]
    rest = [f"{key} {value}" for key, value in row.items() if str(value) not in names]
    return f"{' × '.join(names)}: {', '.join(rest)}"

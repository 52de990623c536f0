"""Run a benchmark: pairs measured side by side in one process, accuracy beside speed."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mmserve.cli.options import add_config, add_json, print_json
from mmserve.errors import ConfigError

#: Benchmark to the module whose ``run(arguments, progress)`` returns its figures.
BENCHMARKS = {
    "attacks": "mmserve.bench.attacks",
    "attention": "mmserve.bench.attention",
    "constraint": "mmserve.bench.constraint",
    "decode": "mmserve.bench.decode",
    "kernels": "mmserve.bench.kernels",
    "load": "mmserve.bench.load",
    "peers": "mmserve.bench.peers",
    "quality": "mmserve.bench.quality",
    "reuse": "mmserve.bench.reuse",
    "scoring": "mmserve.bench.scoring",
    "serving": "mmserve.bench.serving",
    "video": "mmserve.bench.video",
    "vision": "mmserve.bench.vision",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve bench``."""
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument(
        "--limit",
        type=int,
        default=16,
        metavar="N",
        help="scenes, a task each; rounds of `kernels` and, at most, of `scoring` (default 16)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds over the scenes (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="which scenes are drawn (default 0)")
    parser.add_argument(
        "--tasks",
        default="",
        metavar="A,B,…",
        help="tasks of `quality`, `decode`, `attention`, `reuse` and `vision`; of `constraint` scenes, schemas and "
        "search; of `attacks` attacks; of `kernels` ops; of `video` sections (default all)",
    )
    parser.add_argument(
        "--recompute",
        help="cache policy of `quality`, `constraint`, `attention`, `reuse` and `vision` (default plain decoding's), "
        "of `load` (default the model's) and of `decode` (default all)",
    )
    parser.add_argument(
        "--commit",
        help="commit policy of `quality`, `constraint`, `attention`, `reuse` and `vision` (default plain decoding's), "
        "of `load` (default the model's) and of `decode` (default all)",
    )
    parser.add_argument(
        "--block-length", type=int, default=0, metavar="N", help="tokens of a block of `quality` (default the model's)"
    )
    parser.add_argument(
        "--concurrent", type=int, default=1, help="requests at once in `decode` and `vision` (default 1)"
    )
    parser.add_argument(
        "--pruners",
        default="",
        metavar="A,B,…",
        help="pruners of `scoring`, and with K/V reductions of `vision` (default all)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="PNG of accuracy against speed, of `decode`, tokens, of `vision`, density, of `attention`, or budget, of "
        "`video`, there with memory over time",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep rows of `attention` here, and take those that are there"
    )
    parser.add_argument(
        "--clients", default="", metavar="N,N,…", help="clients at once in `load`, a row each (default 1,4,16,64,200)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="how long sessions of `video` last (default 60)"
    )
    parser.add_argument(
        "--hours", type=float, default=8.0, metavar="H", help="hours of the stream of `video`'s `long` (default 8)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows of `kernels` here")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads in `peers` (default 1)")
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", help="interpreter that has vLLM, which `peers` then measures too"
    )
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, with progress on stderr, and print a table or one JSON object."""
    from mmserve.observe.machine import describe  # loads torch

    if min(arguments.limit, arguments.repeats, arguments.concurrent) < 1 or arguments.limit * arguments.repeats < 2:
        raise ConfigError("--limit, --repeats and --concurrent must be at least 1, and 2 measurements the least of all")
    figures = import_module(BENCHMARKS[arguments.name]).run(arguments, _progress)
    report = {"bench": arguments.name, **figures, "machine": describe()}
    if arguments.json:
        print_json(report)
    else:
        for row in [*report["rows"], *report.get("kv_reductions", [])]:
            print(_line(row))
        if "search" in report:
            print(_line({"measured": "search", **report["search"]}))
    return 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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

"""Plan a cluster: profile the stages, and find the layout of workers with the highest goodput."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmserve.cli.options import add_common, print_json, require_plot, show_progress
from mmserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve plan``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--measure", action="store_true", help="measure the stages of --model on this machine, and fit their costs"
    )
    what.add_argument(
        "--sweep", action="store_true", help="goodput for a range of targets, and attainment for a range of loads"
    )
    what.add_argument(
        "--fleet", metavar="RATE,…", help="number of workers for these rates (requests a second), for example 1e3,1e6"
    )
    what.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="predict how long --layout takes for N requests at once, with and without role switching",
    )
    what.add_argument(
        "--validate",
        type=int,
        metavar="N",
        help="ask a server N requests at once, and compare its time with the prediction for --layout",
    )
    parser.add_argument(
        "--costs", default="epdserve", metavar="FILE", help="file written by --measure, or 'epdserve' (the default)"
    )
    parser.add_argument(
        "--workload",
        default="",
        metavar="FILE",
        help="kinds of requests (JSON), or 'epdserve' (default: the workload in the file of --costs)",
    )
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="number of workers (default 8)")
    parser.add_argument(
        "--ttft", type=float, default=1.4, metavar="S", help="target for the time to the first token (default 1.4 s)"
    )
    parser.add_argument(
        "--tpot", type=float, default=0.04, metavar="S", help="target for the time per further token (default 0.04 s)"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.9,
        metavar="X",
        help="share of requests that must meet both targets (default 0.9)",
    )
    parser.add_argument(
        "--layout", default="", metavar="6e1p1d", help="number of workers of each role, for --batch and --validate"
    )
    parser.add_argument("--switches", action="store_true", help="the server of --validate switches roles under load")
    parser.add_argument(
        "--cores", type=int, metavar="N", help="cores that all workers share (default: one device for each)"
    )
    parser.add_argument(
        "--requests", type=int, default=400, metavar="N", help="requests of each simulated run (default 400)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the arrivals (default 1)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="rounds of --measure and --validate (default 5)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file that --measure writes (default costs.json)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="with --sweep: also draw the figures to this PNG file"
    )
    add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan, with progress on stderr, and print tables or one JSON object."""
    from mmserve.plan import command

    _check(arguments)
    report, text = command.run(arguments, show_progress)
    if arguments.json:
        print_json(report)
    else:
        print(text)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name in ("workers", "requests", "rounds", "cores", "batch", "validate"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name} must be at least 1, not {given}")
    for name in ("ttft", "tpot"):
        if not getattr(arguments, name) > 0:
            raise ConfigError(f"--{name} must be above 0 seconds")
    if not 0 < arguments.share <= 1:
        raise ConfigError(f"--share must be above 0 and at most 1, not {arguments.share}")
    if arguments.plot is not None and not arguments.sweep:
        raise ConfigError("--plot needs --sweep")
    require_plot(arguments.plot)
    if (arguments.batch or arguments.validate) and not arguments.layout:
        raise ConfigError("--layout is required: the workers of each role, for example 1e1p4d")

"""Plan a cluster: what stages cost, and which layout of workers keeps your targets at the highest rate."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmserve.cli.options import add_common, print_json, show_progress
from mmserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve plan``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measure", action="store_true", help="measure the stages of --model here, and fit their costs")
    what.add_argument("--sweep", action="store_true", help="goodput over targets, and attainment over load")
    what.add_argument("--fleet", metavar="RATE,…", help="workers for so many requests a second, as in 1e3,1e6")
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
        "--costs", default="epdserve", metavar="FILE", help="of `--measure --out`, or 'epdserve' (the default)"
    )
    parser.add_argument(
        "--workload",
        default="",
        metavar="FILE",
        help="kinds of requests (JSON), or 'epdserve' (default: that of --costs)",
    )
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="workers to lay out (default 8)")
    parser.add_argument("--ttft", type=float, default=1.4, metavar="S", help="target: first token (default 1.4 s)")
    parser.add_argument(
        "--tpot", type=float, default=0.04, metavar="S", help="target: each further one (default 0.04 s)"
    )
    parser.add_argument("--share", type=float, default=0.9, help="share of requests that keep both (default 0.9)")
    parser.add_argument("--layout", default="", metavar="6e1p1d", help="workers by role, for --batch and --validate")
    parser.add_argument("--switches", action="store_true", help="the server of --validate switches roles under load")
    parser.add_argument("--cores", type=int, metavar="N", help="cores that all workers share (default one device each)")
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="of each simulated run (default 400)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals (default 1)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of --measure and --validate (default 5)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --measure writes (default costs.json)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG of --sweep")
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
        raise ConfigError("--plot is for --sweep")
    if (arguments.batch or arguments.validate) and not arguments.layout:
        raise ConfigError("--layout is needed: the workers to predict, as in 1e1p4d")

"""The benchmarks of ``mmserve bench`` and the options of each; imports neither torch nor the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmserve.cli.options import add_config, add_server

#: Adds one option, or a few that belong together, to a benchmark's parser.
Option = Callable[[argparse.ArgumentParser], object]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: one line on what it measures, and its options beside ``--json`` and ``--verbose``.

    ``module`` has ``run(arguments, progress)``, which returns the figures.
    """

    module: str
    summary: str
    options: tuple[Option, ...]


def _limit(what: str, default: int = 16) -> Option:
    return lambda parser: parser.add_argument(
        "--limit", type=int, default=default, metavar="N", help=f"{what} (default {default})"
    )


def _repeats(what: str) -> Option:
    return lambda parser: parser.add_argument("--repeats", type=int, default=3, metavar="N", help=f"{what} (default 3)")


def _tasks(what: str) -> Option:
    return lambda parser: parser.add_argument("--tasks", default="", metavar="A,B,…", help=f"{what} (default all)")


def _policies(default: str) -> Option:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--recompute", metavar="NAME", help=f"cache policy (default {default})")
        parser.add_argument("--commit", metavar="NAME", help=f"commit policy (default {default})")

    return add


def _concurrent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrent", type=int, default=1, metavar="N", help="requests at once (default 1)")


def _block_length(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-length", type=int, default=0, metavar="N", help="tokens of a block (default the model's)"
    )


def _pruners(what: str) -> Option:
    return lambda parser: parser.add_argument("--pruners", default="", metavar="A,B,…", help=f"{what} (default all)")


def _plot(what: str) -> Option:
    return lambda parser: parser.add_argument("--plot", type=Path, metavar="FILE", help=f"PNG of {what}")


def _resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep rows here, and take those that are there")


def _clients(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clients", default="", metavar="N,N,…", help="clients at once, a row each (default 1,4,16,64,200)"
    )


def _durations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="length of `files`, `sessions`, `watches` and `cuts` (default 60)",
    )
    parser.add_argument(
        "--hours", type=float, default=8.0, metavar="H", help="length of the stream of `long` (default 8)"
    )


def _open_loop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates", default="1,2,4", metavar="R,R,…", help="requests a second, a load each (default 1,2,4)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="length of a load (default 30)")
    parser.add_argument(
        "--burst", type=int, default=1, metavar="N", help="requests that arrive at once (default 1: Poisson arrivals)"
    )
    parser.add_argument(
        "--mix", default="", metavar="KIND=W,…", help="weights of text, image and video (default what the model takes)"
    )
    parser.add_argument(
        "--first-token", type=float, default=1.4, metavar="S", help="target of the first text (default 1.4)"
    )
    parser.add_argument(
        "--per-token", type=float, default=0.04, metavar="S", help="target of each token after it (default 0.04)"
    )
    parser.add_argument("--slo-class", default="", metavar="NAME", help="class of all requests (default none)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="deadline of each request (default 60)"
    )


def _csv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows here")


def _peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads (default 1)")
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", help="interpreter that has vLLM, which is then measured too"
    )


def _suites(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="MaskBench's or JSON-Schema-Test-Suite's files")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="so many schemas of a suite by chance (default all)"
    )
    parser.add_argument(
        "--mode",
        default="strict",
        choices=("strict", "validate", "lenient"),
        help="the constraint mode (default strict)",
    )
    parser.add_argument(
        "--schema-option", action="append", default=[], metavar="NAME", help="as of `mmserve generate`; give several"
    )


def _seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="which items are drawn (default 0)")


_PLAIN = "plain decoding's"
_SCENES = _limit("scenes, a task each")
_SCENE_TASKS = _tasks("tasks of the bundled model's scenes")

#: Benchmarks by name.
BENCHMARKS = {
    "attacks": Benchmark(
        "mmserve.bench.attacks", "What hostile requests cost everybody else", (_tasks("attacks"), _seed, add_config)
    ),
    "attention": Benchmark(
        "mmserve.bench.attention",
        "What sparse attention and quantised K/V do to logits and answers",
        (_SCENES, _SCENE_TASKS, _policies(_PLAIN), _seed, _plot("accuracy against density"), _resume, add_config),
    ),
    "constraint": Benchmark(
        "mmserve.bench.constraint",
        "What constraints do to answers, and what they cost",
        (
            _limit("scenes"),
            _repeats("rounds over the scenes"),
            _tasks("any of scenes, schemas and search"),
            _policies(_PLAIN),
            _seed,
            add_config,
        ),
    ),
    "decisions": Benchmark(
        "mmserve.bench.decisions",
        "What many typed questions cost beside one, and how right their probabilities are",
        (
            _limit("questions about scenes", 600),
            _repeats("rounds of one question and 32, in turn"),
            _tasks("any of picture, context, accuracy, order"),
            _seed,
            add_config,
        ),
    ),
    "decode": Benchmark(
        "mmserve.bench.decode",
        "What each pair of policies gains, and what it costs in accuracy",
        (
            _SCENES,
            _SCENE_TASKS,
            _policies("all"),
            _concurrent,
            _seed,
            _plot("accuracy against speed"),
            add_config,
        ),
    ),
    "http": Benchmark(
        "mmserve.bench.http",
        "What viewers of drafts cost, and what the HTTP front does",
        (_repeats("rounds with viewers and without"), _tasks("any of viewers, slow, front"), _seed, add_config),
    ),
    "kernels": Benchmark(
        "mmserve.bench.kernels",
        "How fast each attention and cache op is, beside others' implementations",
        (_limit("rounds"), _tasks("ops"), _csv),
    ),
    "load": Benchmark(
        "mmserve.bench.load",
        "A mixed load from many clients at once over real sockets",
        (_limit("requests of a row"), _clients, _policies("the model's"), _seed, add_config),
    ),
    "peers": Benchmark(
        "mmserve.bench.peers",
        "Next-token decoding beside other engines",
        (_repeats("rounds of all engines"), _peers, add_config),
    ),
    "quality": Benchmark(
        "mmserve.bench.quality",
        "Accuracy of every task with a 95% interval, through the whole server",
        (_SCENES, _SCENE_TASKS, _policies(_PLAIN), _block_length, _seed, add_config),
    ),
    "reuse": Benchmark(
        "mmserve.bench.reuse",
        "What reused K/V of images do to logits, answers and times",
        (_SCENES, _SCENE_TASKS, _policies(_PLAIN), _seed, add_config),
    ),
    "schemas": Benchmark(
        "mmserve.bench.schema_suites",
        "Public suites of JSON schemas: how many are admitted, and whether answers under them are right",
        (_suites, _repeats("answers drawn under each schema"), _seed, _resume),
    ),
    "scoring": Benchmark(
        "mmserve.bench.scoring",
        "What pruners' scores and choices take beside the tower's own run",
        (_limit("rounds, at most"), _pruners("pruners"), add_config),
    ),
    "cluster": Benchmark(
        "mmserve.bench.cluster",
        "Stages on a Ray cluster of this host against one process: transfers, overhead, killed workers, role "
        "switching, one request's images on several workers",
        (_tasks("sections: transfer, overhead, kills, switching, sharding"), _repeats("rounds")),
    ),
    "serve": Benchmark(
        "mmserve.bench.serve",
        "An open-loop load of text, images and videos: goodput under targets; and what a long prompt does to streams",
        (
            lambda parser: parser.add_argument(
                "--tasks", default="", metavar="A,B", help="sections: load, stall, prefix (default load)"
            ),
            _open_loop,
            _repeats("rounds of `stall` and `prefix`"),
            _policies("the model's"),
            _seed,
            add_server,
            add_config,
        ),
    ),
    "serving": Benchmark(
        "mmserve.bench.serving",
        "Time, forwards and throughput of the server, over real gRPC",
        (_SCENES, _repeats("rounds over the scenes"), _seed, add_config),
    ),
    "tools": Benchmark(
        "mmserve.bench.tools",
        "Tool calls: how many have valid arguments, and how many are the right ones",
        (_limit("requests, of which each needs a tool", 500), _concurrent, _seed, add_config),
    ),
    "video": Benchmark(
        "mmserve.bench.video",
        "What streams of video cost, and how right answers about them are",
        (
            _limit("streams of `accuracy`, frames of `watches`"),
            _repeats("rounds of `decoding`, `files` and `watches`"),
            _tasks("sections: decoding, files, accuracy, sessions, watches, long, cuts"),
            _durations,
            _seed,
            _plot("accuracy by budget, and of memory over time"),
            add_config,
        ),
    ),
    "vision": Benchmark(
        "mmserve.bench.vision",
        "What pruning visual tokens saves, and what it costs in accuracy",
        (
            _SCENES,
            _SCENE_TASKS,
            _policies(_PLAIN),
            _pruners("pruners and K/V reductions"),
            _concurrent,
            _seed,
            _plot("accuracy against tokens"),
            add_config,
        ),
    ),
}

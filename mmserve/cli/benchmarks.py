"""The benchmarks of ``mmserve bench`` and the options of each; imports neither torch nor the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.cli.options import add_config, add_server
from mmserve.core.constraint import ConstraintMode

#: Adds one option, or a few that belong together, to a benchmark's parser.
Option = Callable[[argparse.ArgumentParser], object]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: one line on what it measures, and its options beside ``--json`` and ``--verbose``.

    ``module``, of ``mmserve.bench``, has ``run(arguments, progress)``, which returns the figures.
    """

    module: str
    summary: str
    options: tuple[Option, ...]


def _option(name: str, what: str, default: Any = "", metavar: str = "N", unset: str = "") -> Option:
    """The option ``name``, of its default's type; ``unset``: what it then is, where the default does not show that."""
    kind = type(default)
    shown = unset or (f"{default:g}" if kind is float else default)
    text = f"{what} (default {shown})"
    return lambda parser: parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)


def _file(name: str, what: str, metavar: str = "FILE") -> Option:
    return lambda parser: parser.add_argument(name, type=Path, metavar=metavar, help=what)


def _limit(what: str, default: int = 16) -> Option:
    return _option("--limit", what, default)


def _repeats(what: str) -> Option:
    return _option("--repeats", what, 3)


def _tasks(what: str, unset: str = "all") -> Option:
    return _option("--tasks", what, metavar="A,B,…", unset=unset)


def _pruners(what: str) -> Option:
    return _option("--pruners", what, metavar="A,B,…", unset="all")


def _plot(what: str) -> Option:
    return _file("--plot", f"PNG of {what}")


def _policies(default: str) -> tuple[Option, ...]:
    return (
        lambda parser: parser.add_argument("--recompute", metavar="NAME", help=f"cache policy (default {default})"),
        lambda parser: parser.add_argument("--commit", metavar="NAME", help=f"commit policy (default {default})"),
    )


_BLOCK_LENGTH = _option("--block-length", "tokens of a block", 0, unset="the model's")
_CLIENTS = _option("--clients", "clients at once, a row each", metavar="N,N,…", unset="1,4,16,64,200")
_CONCURRENT = _option("--concurrent", "requests at once", 1)
_RESUME = _file("--resume", "keep rows here, and take those that are there")
_SEED = _option("--seed", "which items are drawn", 0)
_DURATIONS = (
    _option("--seconds", "length of `files`, `sessions`, `watches` and `cuts`", 60.0, "S"),
    _option("--hours", "length of the stream of `long`", 8.0, "H"),
)
_OPEN_LOOP = (
    _option("--rates", "requests a second, a load each", "1,2,4", "R,R,…"),
    _option("--seconds", "length of a load", 30.0, "S"),
    _option("--burst", "requests that arrive at once", 1, unset="1: Poisson arrivals"),
    _option("--mix", "weights of text, image and video", metavar="KIND=W,…", unset="what the model takes"),
    _option("--first-token", "target of the first text", 1.4, "S"),
    _option("--per-token", "target of each token after it", 0.04, "S"),
    _option("--slo-class", "class of all requests", metavar="NAME", unset="none"),
    _option("--timeout", "deadline of each request", 60.0, "S"),
)
_PEERS = (
    _option("--threads", "torch threads", 1),
    _file("--vllm-python", "interpreter that has vLLM, which is then measured too", "PATH"),
)
_SUITES = (
    _file("--data", "MaskBench's or JSON-Schema-Test-Suite's files", "DIR"),
    _option("--sample", "so many schemas of a suite by chance", 0, unset="all"),
    lambda parser: parser.add_argument(
        "--mode", default="strict", choices=list(ConstraintMode), help="the constraint mode (default strict)"
    ),
    lambda parser: parser.add_argument(
        "--schema-option", action="append", default=[], metavar="NAME", help="as of `mmserve generate`; give several"
    ),
)
_PLAIN = "plain decoding's"
_SCENES = _limit("scenes, a task each")
_SCENE_TASKS = _tasks("tasks of the bundled model's scenes")

#: Benchmarks by name.
BENCHMARKS = {
    "attacks": Benchmark("attacks", "What hostile requests cost other clients", (_tasks("attacks"), _SEED, add_config)),
    "attention": Benchmark(
        "attention",
        "What sparse attention and quantised K/V do to logits and answers",
        (_SCENES, _SCENE_TASKS, *_policies(_PLAIN), _SEED, _plot("accuracy against density"), _RESUME, add_config),
    ),
    "constraint": Benchmark(
        "constraint",
        "What constraints do to answers, and what they cost",
        (
            _limit("scenes"),
            _repeats("rounds over the scenes"),
            _tasks("any of scenes, schemas and search"),
            *_policies(_PLAIN),
            _SEED,
            add_config,
        ),
    ),
    "decisions": Benchmark(
        "decisions",
        "What many typed questions cost beside one, and how right their probabilities are",
        (
            _limit("questions about scenes", 600),
            _repeats("rounds of one question and 32, in turn"),
            _tasks("any of picture, context, accuracy, order"),
            _SEED,
            add_config,
        ),
    ),
    "decode": Benchmark(
        "decode",
        "What each pair of policies gains, and what it costs in accuracy",
        (_SCENES, _SCENE_TASKS, *_policies("all"), _CONCURRENT, _SEED, _plot("accuracy against speed"), add_config),
    ),
    "http": Benchmark(
        "http",
        "What viewers of drafts cost, and what the HTTP front does",
        (_repeats("rounds with viewers and without"), _tasks("any of viewers, slow, front"), _SEED, add_config),
    ),
    "kernels": Benchmark(
        "kernels",
        "How fast each attention and cache op is, beside others' implementations",
        (_limit("rounds"), _tasks("ops"), _file("--csv", "also write the rows here")),
    ),
    "load": Benchmark(
        "load",
        "A mixed load from many clients at once over real sockets",
        (_limit("requests of a row"), _CLIENTS, *_policies("the model's"), _SEED, add_config),
    ),
    "peers": Benchmark(
        "peers",
        "Next-token decoding beside other engines; passes and answers of diffusion models beside llama.cpp",
        (_repeats("rounds of all engines"), _limit("sums of the bundled diffusion model", 40), *_PEERS, add_config),
    ),
    "quality": Benchmark(
        "quality",
        "Accuracy of every task with a 95% interval, through the whole server",
        (_SCENES, _SCENE_TASKS, *_policies(_PLAIN), _BLOCK_LENGTH, _SEED, add_config),
    ),
    "reuse": Benchmark(
        "reuse",
        "What reused K/V of images do to logits, answers and times",
        (_SCENES, _SCENE_TASKS, *_policies(_PLAIN), _SEED, add_config),
    ),
    "schemas": Benchmark(
        "schema_suites",
        "Public suites of JSON schemas: how many are admitted, and whether answers under them are right",
        (*_SUITES, _repeats("answers drawn under each schema"), _SEED, _RESUME),
    ),
    "scoring": Benchmark(
        "scoring",
        "What pruners' scores and choices take beside the tower's own run",
        (_limit("rounds, at most"), _pruners("pruners"), add_config),
    ),
    "cluster": Benchmark(
        "cluster",
        "Stages on a Ray cluster of this host against one process: transfers, overhead, killed workers, role "
        "switching, one request's images on several workers",
        (_tasks("sections: transfer, ahead, coded, overhead, kills, switching, sharding"), _repeats("rounds")),
    ),
    "serve": Benchmark(
        "serve",
        "An open-loop load of text, images and videos: goodput under targets; and what a long prompt does to streams",
        (
            _tasks("sections: load, stall, prefix", "load"),
            *_OPEN_LOOP,
            _repeats("rounds of `stall` and `prefix`"),
            *_policies("the model's"),
            _SEED,
            add_server,
            add_config,
        ),
    ),
    "serving": Benchmark(
        "serving",
        "Time, forwards and throughput of the server, over real gRPC",
        (_SCENES, _repeats("rounds over the scenes"), _SEED, add_config),
    ),
    "tools": Benchmark(
        "tools",
        "Tool calls: how many have valid arguments, and how many are the right ones",
        (_limit("requests, of which each needs a tool", 500), _CONCURRENT, _SEED, add_config),
    ),
    "video": Benchmark(
        "video",
        "What streams of video cost, and how right answers about them are",
        (
            _limit("streams of `accuracy`, frames of `watches`"),
            _repeats("rounds of `decoding`, `files` and `watches`"),
            _tasks("sections: decoding, files, accuracy, sessions, watches, long, cuts"),
            *_DURATIONS,
            _SEED,
            _plot("accuracy by budget, and of memory over time"),
            add_config,
        ),
    ),
    "vision": Benchmark(
        "vision",
        "What pruning visual tokens saves, and what it costs in accuracy",
        (
            _SCENES,
            _SCENE_TASKS,
            *_policies(_PLAIN),
            _pruners("pruners and K/V reductions"),
            _CONCURRENT,
            _SEED,
            _plot("accuracy against tokens"),
            add_config,
        ),
    ),
}

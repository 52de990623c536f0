"""The benchmarks of ``mmserve bench`` and their options; imports neither torch nor the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.cli.options import add_config, add_server
from mmserve.core.constraint import ConstraintMode

#: Adds one option, or several related ones, to the parser of a benchmark.
Option = Callable[[argparse.ArgumentParser], object]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: one line on what it measures, and its options besides ``--json`` and ``--verbose``.

    ``module``, in ``mmserve.bench``, has ``run(arguments, progress)``, which returns the results.
    """

    module: str
    summary: str
    options: tuple[Option, ...]


def _option(name: str, what: str, default: Any = "", metavar: str = "N", unset: str = "") -> Option:
    """The option ``name``, of its default's type; ``unset``: the effective value to show, if the default does not show
    it."""
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
    return _file("--plot", f"also draw {what} to this PNG file")


def _policies(default: str) -> tuple[Option, ...]:
    return (
        lambda parser: parser.add_argument(
            "--recompute", metavar="NAME", help=f"recompute policy (default: {default})"
        ),
        lambda parser: parser.add_argument("--commit", metavar="NAME", help=f"commit policy (default: {default})"),
    )


_BLOCK_LENGTH = _option("--block-length", "tokens of a block", 0, unset="the model's")
_CLIENTS = _option("--clients", "numbers of concurrent clients to measure", metavar="N,N,…", unset="1,4,16,64,200")
_CONCURRENT = _option("--concurrent", "concurrent requests", 1)
_RESUME = _file("--resume", "save finished rows to this file, and skip rows that it already has")
_SEED = _option("--seed", "seed of the items", 0)
_DURATIONS = (
    _option("--seconds", "length of `files`, `sessions`, `watches` and `cuts`", 60.0, "S"),
    _option("--hours", "length of the stream of `long`", 8.0, "H"),
)
_OPEN_LOOP = (
    _option("--rates", "request rates (requests a second) to measure", "1,2,4", "R,R,…"),
    _option("--seconds", "duration of each load", 30.0, "S"),
    _option("--burst", "requests that arrive together", 1, unset="1: Poisson arrivals"),
    _option("--mix", "weights of text, image and video requests", metavar="KIND=W,…", unset="what the model supports"),
    _option("--first-token", "target for the time to the first text", 1.4, "S"),
    _option("--per-token", "target for each further token", 0.04, "S"),
    _option("--slo-class", "service class of all requests", metavar="NAME", unset="none"),
    _option("--timeout", "deadline of each request", 60.0, "S"),
)
_PEERS = (
    _option("--threads", "torch threads", 1),
    _file("--vllm-python", "Python interpreter with vLLM installed, to measure vLLM too", "PATH"),
)
_SUITES = (
    _file("--data", "folder with the files of MaskBench or JSON-Schema-Test-Suite", "DIR"),
    _option("--sample", "random sample of this many schemas", 0, unset="all"),
    lambda parser: parser.add_argument(
        "--mode", default="strict", choices=list(ConstraintMode), help="constraint mode (default strict)"
    ),
    lambda parser: parser.add_argument(
        "--schema-option", action="append", default=[], metavar="NAME", help="as in `mmserve generate`; may be repeated"
    ),
)
_PLAIN = "that of plain decoding"
_SCENES = _limit("items of each task")
_SCENE_TASKS = _tasks("tasks about scenes")

#: Benchmarks by name.
BENCHMARKS = {
    "attacks": Benchmark(
        "attacks", "What hostile requests cost other clients", (_tasks("attacks to run"), _SEED, add_config)
    ),
    "attention": Benchmark(
        "attention",
        "What sparse attention and quantised K/V change in logits and answers",
        (_SCENES, _SCENE_TASKS, *_policies(_PLAIN), _SEED, _plot("accuracy against density"), _RESUME, add_config),
    ),
    "constraint": Benchmark(
        "constraint",
        "What constraints change in answers, and what they cost",
        (
            _limit("number of scenes"),
            _repeats("rounds over the scenes"),
            _tasks("parts to run: scenes, schemas, search"),
            *_policies(_PLAIN),
            _SEED,
            add_config,
        ),
    ),
    "decisions": Benchmark(
        "decisions",
        "What many typed questions cost compared with one, their accuracy and their calibration",
        (
            _limit("number of questions about scenes", 600),
            _repeats("rounds of one question and of 32, in turn"),
            _tasks("parts to run: picture, context, accuracy, order"),
            _SEED,
            add_config,
        ),
    ),
    "decode": Benchmark(
        "decode",
        "Speed and accuracy of each pair of policies",
        (_SCENES, _SCENE_TASKS, *_policies("all"), _CONCURRENT, _SEED, _plot("accuracy against speed"), add_config),
    ),
    "http": Benchmark(
        "http",
        "What clients that watch drafts cost, and the overhead of the HTTP server",
        (_repeats("rounds with and without viewers"), _tasks("parts to run: viewers, slow, front"), _SEED, add_config),
    ),
    "kernels": Benchmark(
        "kernels",
        "Speed of each attention and cache kernel, compared with other implementations",
        (_limit("number of rounds"), _tasks("kernels to run"), _file("--csv", "also write the rows to this file")),
    ),
    "load": Benchmark(
        "load",
        "A mixed load from many concurrent clients over real sockets",
        (_limit("number of distinct requests"), _CLIENTS, *_policies("the model's"), _SEED, add_config),
    ),
    "peers": Benchmark(
        "peers",
        "Autoregressive decoding compared with vLLM and transformers; diffusion models compared with llama.cpp",
        (_repeats("rounds of all engines"), _limit("sums for the bundled diffusion model", 40), *_PEERS, add_config),
    ),
    "quality": Benchmark(
        "quality",
        "Accuracy of every task with a 95% interval, through the whole server",
        (_SCENES, _SCENE_TASKS, *_policies(_PLAIN), _BLOCK_LENGTH, _SEED, add_config),
    ),
    "reuse": Benchmark(
        "reuse",
        "What K/V reuse of images changes in logits, answers and times",
        (_SCENES, _SCENE_TASKS, *_policies(_PLAIN), _SEED, add_config),
    ),
    "schemas": Benchmark(
        "schema_suites",
        "Public suites of JSON schemas: how many are accepted, and whether answers under them are valid",
        (*_SUITES, _repeats("answers generated under each schema"), _SEED, _RESUME),
    ),
    "scoring": Benchmark(
        "scoring",
        "Time of the pruners' scoring and selection relative to the vision tower",
        (_limit("largest number of rounds"), _pruners("pruners to run"), add_config),
    ),
    "cluster": Benchmark(
        "cluster",
        "Stages on a Ray cluster of this host compared with one process: transfers, overhead, killed workers, role "
        "switching, one request's images on several workers",
        (
            _tasks("parts to run: transfer, ahead, coded, overhead, kills, switching, sharding"),
            _repeats("number of rounds"),
        ),
    ),
    "serve": Benchmark(
        "serve",
        "An open-loop load of text, images and videos: goodput under latency targets; the effect of a long prompt on "
        "running streams; the prefix cache",
        (
            _tasks("parts to run: load, stall, prefix", "load"),
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
        "Latency, forward passes and throughput of the server over gRPC",
        (_SCENES, _repeats("rounds over the scenes"), _SEED, add_config),
    ),
    "tools": Benchmark(
        "tools",
        "Tool calls: how many have valid arguments, and how many are correct",
        (_limit("number of requests, each of which needs a tool", 500), _CONCURRENT, _SEED, add_config),
    ),
    "video": Benchmark(
        "video",
        "Cost of video streams, and accuracy of answers about them",
        (
            _limit("streams of `accuracy`, frames of `watches`"),
            _repeats("rounds of `decoding`, `files` and `watches`"),
            _tasks("parts to run: decoding, files, accuracy, sessions, watches, long, cuts"),
            *_DURATIONS,
            _SEED,
            _plot("accuracy by budget, and memory over time,"),
            add_config,
        ),
    ),
    "vision": Benchmark(
        "vision",
        "Speed and accuracy of each pruner of visual tokens",
        (
            _SCENES,
            _SCENE_TASKS,
            *_policies(_PLAIN),
            _pruners("pruners and K/V evictions to run"),
            _CONCURRENT,
            _SEED,
            _plot("accuracy against visual tokens"),
            add_config,
        ),
    ),
}

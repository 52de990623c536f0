"""Answer typed questions about a context with probabilities, without generating text."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mmserve.cli.options import add_common, connected, existing, print_json, requested_model
from mmserve.client import Choice, Score, YesNo
from mmserve.errors import InvalidArgument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve decide``."""
    several: dict[str, object] = {"action": "append", "default": []}
    parser.add_argument("context", help="text that the questions are about; '-' reads it from stdin, '' is no text")
    parser.add_argument("--image", type=Path, metavar="FILE", help="an image; may be repeated", **several)  # type: ignore[arg-type]
    parser.add_argument("--video", type=Path, metavar="FILE", help="a video; may be repeated", **several)  # type: ignore[arg-type]
    for flag, form, what in (
        ("--yes-no", "TEXT", "a yes-or-no question"),
        ("--choice", "TEXT=A|B|…", "a question with the options of its answer"),
        ("--score", "TEXT=LOW-HIGH", "a question with a number as its answer"),
    ):
        parser.add_argument(
            flag,
            dest="questions",
            action="append",
            type=partial(_question, flag),
            metavar=form,
            help=f"{what}; may be repeated, also together with the other kinds",
        )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="deadline in seconds (default 120)")
    add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    """Send the questions, and print one answer with its probabilities a line."""
    context = sys.stdin.read() if arguments.context == "-" else arguments.context
    if not arguments.questions:
        raise InvalidArgument.of("questions", "at least one is needed: --yes-no, --choice or --score")
    images = [existing("--image", path).read_bytes() for path in arguments.image]
    videos = [existing("--video", path).read_bytes() for path in arguments.video]
    with connected(arguments) as client:
        decided = client.decide(
            context,
            arguments.questions,
            images,
            videos=videos,
            model=requested_model(arguments),
            timeout=arguments.timeout,
        )
    if arguments.json:
        print_json(asdict(decided))
        return 0
    for question, answer in zip(arguments.questions, decided, strict=True):
        shares = ", ".join(f"{name} {p:.1%}" for name, p in answer.probabilities.items())
        mean = "" if answer.expected is None else f", mean {answer.expected:.2f}"
        print(f"{question.text} {answer.answer} ({shares}{mean}; mass {answer.mass:.3f})")
    return 0


def _question(flag: str, text: str) -> YesNo | Choice | Score:
    """The question given as the value of ``flag``; raises ``argparse.ArgumentTypeError`` if it is malformed."""
    if flag == "--yes-no":
        return YesNo(text)
    asked, equals, rest = text.rpartition("=")
    if flag == "--choice" and equals:
        return Choice(asked, [option.strip() for option in rest.split("|")])
    low, dash, high = rest.partition("-")
    if flag == "--score" and equals and dash and low.strip().isdecimal() and high.strip().isdecimal():
        return Score(asked, int(low), int(high))
    form = "TEXT=A|B" if flag == "--choice" else "TEXT=LOW-HIGH"
    raise argparse.ArgumentTypeError(f"must be {form}, not {text!r}")

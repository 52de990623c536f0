"""Start a server with the bundled model, ask questions about generated images and clips, and check the answers.

Each question is asked twice: with the default policies, and with plain decoding. With ``--video`` the scenes are pushed
into a video session instead (``demo_video.py``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmserve.bench.measures import share_by_task
from mmserve.cli import demo_video
from mmserve.cli.options import add_common, connected, print_json, requested_model
from mmserve.cli.screen import CanvasLine, empty_note
from mmserve.client import Client, Finished, Options, Snapshot
from mmserve.errors import ConfigError, MMServeError
from mmserve.reference.evaluate import MediaFiles, canvas, item, media_files
from mmserve.reference.images import SHORT_TASKS
from mmserve.reference.items import Question
from mmserve.reference.tasks import correct

#: The tasks of the questions, repeated in this order.
ROUND = ("count", "color", "position", "what", "json", "comparison", "yes_no", "direction", "arithmetic", "which")
#: Number of canvas snapshots printed for one answer if stdout is not a terminal.
PRINTED_SNAPSHOTS = 4


@dataclass(frozen=True)
class Item:
    """One question of the demo and its results; times in milliseconds. ``plain_…``: with plain decoding."""

    task: str
    question: str
    expected: str
    answer: str
    correct: bool
    ttft_ms: float
    total_ms: float
    forwards: int
    tokens: int
    plain_ms: float
    plain_forwards: int
    plain_correct: bool
    same: bool  # whether plain decoding gives the same answer
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve demo``."""
    parser.add_argument("--items", type=int, default=10, metavar="N", help="number of questions (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenes (default 0)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="also write the images and clips to this folder")
    demo_video.add_arguments(parser)
    add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask the questions, print and check the answers; exit code 0 if every request was answered."""
    if arguments.items < 1:
        raise ConfigError(f"--items must be at least 1, not {arguments.items}")
    if arguments.video:
        return demo_video.run(arguments)
    printer = _Printer(quiet=arguments.json)
    items: list[Item] = []
    model = requested_model(arguments)
    with connected(arguments) as client:
        client.wait_ready(timeout=60)
        printer.line(f"Serving on {client.target}. {arguments.items} questions about newly drawn scenes:")
        for number, (media, question) in enumerate(_questions(arguments.items, arguments.seed), start=1):
            if arguments.save is not None:
                _save(arguments.save, f"{number:03}-{question.task}", media)
            printer.question(number, question)
            items.append(_ask(client, model, media, question, printer))
            printer.answer(items[-1])
    right = sum(asked.correct for asked in items)
    answered = not any(asked.error for asked in items)
    if arguments.json:
        from mmserve.observe.machine import describe

        print_json(
            {
                "ok": answered,
                "items": [asked.__dict__ for asked in items],
                "accuracy": round(right / max(1, len(items)), 4),
                "accuracy_by_task": _by_task(items),
                **_totals(items),
                "machine": describe(),
            }
        )
    else:
        totals = _totals(items)
        printer.line(
            f"\n{right} of {len(items)} right, in {totals['total_ms'] / 1000:.1f} s. Plain decoding (one token a step, "
            f"no cache): {sum(asked.plain_correct for asked in items)} right, {sum(asked.same for asked in items)} "
            f"answers the same, in {totals['plain_ms'] / 1000:.1f} s. The default is {totals['speedup']:g} times as "
            "fast."
        )
    return 0 if answered else 1


def _questions(count: int, seed: int) -> Iterator[tuple[MediaFiles, Question]]:
    """``count`` questions with the tasks of ``ROUND`` in turn, each about newly generated media."""
    for index in range(count):
        task = ROUND[index % len(ROUND)]
        thing, question = item(task, index, seed)
        yield media_files(task, thing), question


def _ask(client: Client, model: str, media: MediaFiles, question: Question, printer: _Printer) -> Item:
    answer = _answered(client, model, media, question, printer)
    plain = _answered(client, model, media, question, None) if not answer.error else answer
    return Item(
        question.task,
        question.text,
        question.answer,
        answer.text,
        correct(question, answer.text),
        answer.first_ms,
        answer.total_ms,
        answer.forwards,
        answer.tokens,
        plain.total_ms,
        plain.forwards,
        correct(question, plain.text),
        plain.text == answer.text,
        answer.error or plain.error,
    )


@dataclass(frozen=True)
class _Answered:
    """One answer; times in milliseconds."""

    text: str = ""
    first_ms: float = 0.0
    total_ms: float = 0.0
    forwards: int = 0
    tokens: int = 0
    error: str = ""


def _answered(client: Client, model: str, media: MediaFiles, question: Question, printer: _Printer | None) -> _Answered:
    """The answer with the default policies, shown by ``printer`` while it is generated; with plain decoding if None."""
    started = time.monotonic()
    finished: Finished | None = None
    options: Options = {"model": model or None, "max_new_tokens": canvas(question.task), "videos": media["videos"]}
    if printer is None:
        options["quality"] = "exact"
    try:
        shows = printer is not None and not printer.quiet
        for event in client.stream(question.text, media["images"], snapshots=shows, **options):
            if isinstance(event, Snapshot) and printer is not None:
                printer.canvas(event)
            elif isinstance(event, Finished):
                finished = event
    except MMServeError as raised:
        return _Answered(total_ms=_since(started), error=f"{raised.code}: {raised.message}")
    if finished is None:
        return _Answered(total_ms=_since(started), error="UNAVAILABLE: the server ended the stream without an answer")
    first = round(finished.times.first_token, 1)
    return _Answered(finished.text, first, _since(started), finished.forwards, finished.usage.completion_tokens)


def _since(started: float) -> float:
    return round(1000 * (time.monotonic() - started), 1)


def _totals(items: list[Item]) -> dict[str, float]:
    """Totals of both ways of decoding: times, accuracy with plain decoding, and the number of equal answers."""
    total, plain = sum(asked.total_ms for asked in items), sum(asked.plain_ms for asked in items)
    return {
        "plain_accuracy": round(sum(asked.plain_correct for asked in items) / len(items), 4),
        "same": round(sum(asked.same for asked in items) / len(items), 4),
        "total_ms": round(total, 1),
        "plain_ms": round(plain, 1),
        "speedup": round(plain / total, 2),
        "forwards": sum(asked.forwards for asked in items),
        "plain_forwards": sum(asked.plain_forwards for asked in items),
    }


def _save(folder: Path, name: str, media: MediaFiles) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(media["images"], start=1):
        (folder / f"{name}-{index}.png").write_bytes(data)
    for index, data in enumerate(media["videos"], start=1):
        (folder / f"{name}-{index}.mp4").write_bytes(data)


def _by_task(items: list[Item]) -> dict[str, float]:
    """Accuracy of each task, and of all short questions about one image."""
    short = [("short", asked.correct) for asked in items if asked.task in SHORT_TASKS]
    return dict(sorted(share_by_task([*((asked.task, asked.correct) for asked in items), *short]).items()))


class _Printer:
    """Output of the demo for people: on stdout, or nothing with ``quiet`` (``--json``)."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._screen = CanvasLine()
        self._printed = 0

    def line(self, text: str) -> None:
        print(text, file=sys.stderr if self.quiet else sys.stdout, flush=True)

    def question(self, number: int, question: Question) -> None:
        self._printed = 0
        if not self.quiet:
            print(f"\n{number:3}. {question.text}", flush=True)
        elif number % 10 == 0:
            self.line(f"{number} asked")

    def canvas(self, snapshot: Snapshot) -> None:
        if self._screen.live:
            self._screen.show(snapshot.text)
        elif snapshot.committed * PRINTED_SNAPSHOTS >= snapshot.total * (self._printed + 1):
            self._printed = snapshot.committed * PRINTED_SNAPSHOTS // snapshot.total
            print(f"     {snapshot.text}", flush=True)

    def answer(self, asked: Item) -> None:
        self._screen.clear()
        if self.quiet:
            return
        if asked.error:
            print(f"     no answer: {asked.error}")
            return
        verdict = "right" if asked.correct else f"WRONG, it is {asked.expected}"
        same = "the same" if asked.same else "another answer"
        answer = asked.answer or empty_note("end")
        print(
            f"     {answer}   [{verdict}; {asked.total_ms:.0f} ms, forward passes: {asked.forwards}; "
            f"plain decoding: {asked.plain_ms:.0f} ms, {asked.plain_forwards}, {same}]",
            flush=True,
        )

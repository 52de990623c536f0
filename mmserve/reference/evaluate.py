"""How often the answers are right: fresh items of every task, asked over gRPC, with 95% intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypedDict

from mmserve.client import Client, Options
from mmserve.reference.clips import h264
from mmserve.reference.items import TEST_SEEDS, Frames, Question
from mmserve.reference.scenes import png
from mmserve.reference.tasks import SUBJECTS, TASKS, correct, sample

#: Canvas (tokens) asked for, by task; 16 for the others.
CANVAS = {"caption": 48, "json": 128, "differs": 32, "arithmetic": 64}
SHORT_CANVAS = 16
#: Questions in flight at once: the answers do not depend on it.
CONCURRENT = 8
#: How far the test seeds of one task's, and of one evaluation seed's, items lie from the next one's.
TASK_STRIDE, SEED_STRIDE = 50_021, 10_007


class MediaFiles(TypedDict):
    """The media of a question, as the client takes them."""

    images: list[bytes]
    videos: Sequence[bytes]


@dataclass(frozen=True)
class Row:
    """Accuracy of one task, with its Wilson interval at 95%."""

    task: str
    n: int
    accuracy: float
    low: float
    high: float


def item(task: str, index: int, seed: int) -> tuple[Any, Question]:
    """The ``index``-th test item of ``seed`` for ``task``: what is asked about, and the question; never trained on."""
    position = list(TASKS).index(task) * TASK_STRIDE + seed * SEED_STRIDE + index
    return sample(task, random.Random(TEST_SEEDS[position % len(TEST_SEEDS)]))


def media_files(task: str, thing: Any) -> MediaFiles:
    """The media of an item as files: PNG pictures and H.264 clips."""
    media = SUBJECTS[TASKS[task]].media(thing)
    return MediaFiles(
        images=[png(m) for m in media if not isinstance(m, Frames)],
        videos=[h264(m) for m in media if isinstance(m, Frames)],
    )


def canvas(task: str) -> int:
    """Tokens to ask for."""
    return CANVAS.get(task, SHORT_CANVAS)


def evaluate(
    target: str,
    *,
    tasks: Sequence[str],
    limit: int,
    seed: int,
    options: Options,
    progress: Callable[[str], None],
) -> list[Row]:
    """Ask ``limit`` questions of each task of the server at ``target``, decoded by ``options``."""
    rows = []
    with Client(target, timeout=600) as client, ThreadPoolExecutor(CONCURRENT) as pool:
        client.wait_ready()

        def right(asked: tuple[Any, Question]) -> bool:
            thing, question = asked
            media = media_files(question.task, thing)
            wanted: Options = {"max_new_tokens": canvas(question.task), **options, "videos": media["videos"]}
            return correct(question, client.generate(question.text, media["images"], **wanted).text)

        for task in tasks:
            progress(f"{task}: {limit} questions")
            rows.append(row(task, sum(pool.map(right, [item(task, index, seed) for index in range(limit)])), limit))
    return rows


def row(task: str, right: int, n: int) -> Row:
    """Accuracy and Wilson interval of ``right`` out of ``n``."""
    z = 1.959964
    share, spread = right / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return Row(task, n, round(share, 4), round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4))

"""How often the answers are right: fresh scenes of every task, asked over gRPC, with 95% intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mmserve.client import Client, Options
from mmserve.reference.scenes import TASKS, TEST_SEEDS, Question, Scene, correct, sample

#: Canvas (tokens) asked for, by task.
CANVAS = {"count": 16, "color": 16, "position": 16, "what": 16, "yes_no": 16, "json": 64}
#: Questions in flight at once: the answers do not depend on it.
CONCURRENT = 8
#: How far the test seeds of one task's, and of one evaluation seed's, items lie from the next one's.
TASK_STRIDE, SEED_STRIDE = 150_001, 10_007


@dataclass(frozen=True)
class Row:
    """Accuracy of one task, with its Wilson interval at 95%."""

    task: str
    n: int
    accuracy: float
    low: float
    high: float


def item(task: str, index: int, seed: int) -> tuple[Scene, Question]:
    """The ``index``-th test scene of ``seed`` with a question of ``task``; never seen in training."""
    position = TASKS.index(task) * TASK_STRIDE + seed * SEED_STRIDE + index
    return sample(random.Random(TEST_SEEDS[position % len(TEST_SEEDS)]), task)


def evaluate(
    target: str, *, limit: int, seed: int, options: Options, progress: Callable[[str], None], token: str | None = None
) -> list[Row]:
    """Ask ``limit`` questions of each task of the server at ``target``, decoded as ``options`` say."""
    rows = []
    with Client(target, timeout=600, token=token) as client, ThreadPoolExecutor(CONCURRENT) as pool:
        client.wait_ready()

        def right(asked: tuple[Scene, Question]) -> bool:
            scene, question = asked
            wanted: Options = {"max_new_tokens": CANVAS[question.task], **options}
            return correct(question, client.generate(question.text, [scene.png()], **wanted).text)

        for task in TASKS:
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

"""Speed-up and accuracy of each pair of policies: ``mmserve bench decode``.

Every pair of recompute and commit policy answers the same generated items as the baseline (``none`` ×
``low_confidence``, one token a step; ``last`` for a next-token model), group by group in turn, so that noise affects
all equally. The requested length is that of the true answer rounded up to a block, so that skipped padding gives no
advantage.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress, quartiles, share_by_task
from mmserve.bench.plots import drawn
from mmserve.bench.settings import measured_config, named_tasks
from mmserve.client import Client, DkvDecode, EarlyCommit, Guided, Options, Result
from mmserve.reference.evaluate import MediaFiles, item, media_files
from mmserve.reference.items import Question
from mmserve.reference.tasks import TASKS, correct

Pair = tuple[str, str]
BASELINE: Pair = ("none", "low_confidence")
#: Pairs of next-token models: decode with a K/V cache, compared with no cache and with speculative decoding.
CAUSAL_BASELINE: Pair = ("last", "low_confidence")
CAUSAL_PAIRS: tuple[Pair, ...] = (("none", "low_confidence"), ("last", "ngram"), ("last", "draft_model"))
#: Tasks with long answers, where speed-ups matter, and with short ones for each kind of media.
DEFAULT_TASKS = ("json", "caption", "arithmetic", "differs", "count", "when")
#: Each policy with the baseline's partner, then combinations. Pairs that a model does not support are skipped.
PAIRS: tuple[Pair, ...] = (
    ("prefix", "low_confidence"),
    ("dual", "low_confidence"),
    ("dkv_decode", "low_confidence"),
    ("free_cache", "low_confidence"),
    ("adaptive", "low_confidence"),
    ("none", "random"),
    ("dkv_greedy", "random"),
    ("none", "threshold"),
    ("none", "factor"),
    ("none", "confident"),
    ("none", "entropy_bound"),
    ("none", "edit"),
    ("none", "learned"),
    ("none", "early_commit"),
    ("none", "early_commit, whole answer"),
    ("none", "guided"),
    ("none", "guided, top 8"),
    ("free_cache", "guided"),
    ("dkv_decode", "early_commit"),
    ("dual", "early_commit"),
    ("dkv_decode", "threshold"),
    ("dual", "threshold"),
    ("dkv_decode", "learned"),
    ("dual", "learned"),
    ("dual", "early_commit + threshold"),
    ("block", "low_confidence"),
    ("block", "threshold"),
    ("block", "learned"),
    ("block", "early_commit"),
)


def _whole_answer(canvas: int) -> EarlyCommit:
    """Commits everything once at most a quarter of a remaining token is expected to be wrong."""
    return EarlyCommit(mistakes=0.25, answer_length=canvas)


#: Policies of ``PAIRS`` with parameters, some of which depend on the requested canvas.
SPECIAL: dict[str, Callable[[int], Any]] = {
    "dkv_decode": lambda _canvas: DkvDecode(refresh=8),
    "early_commit + threshold": lambda _canvas: EarlyCommit(base="threshold"),
    "early_commit, whole answer": _whole_answer,
    "guided, top 8": lambda _canvas: Guided(top_k=8),
}


@dataclass(frozen=True)
class Asked:
    """One item: its media as files, the question, and the requested number of tokens."""

    media: MediaFiles
    question: Question
    canvas: int


@dataclass(frozen=True)
class Group:
    """Results of one group of items with one pair, and the time of the whole group (seconds)."""

    tasks: list[str]
    results: list[Result]
    right: list[bool]
    seconds: float


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each pair; ``speedup`` is the median over groups of the ratio of the baseline's time to the pair's."""
    tasks = named_tasks(arguments, TASKS, DEFAULT_TASKS)
    with BackgroundServer(measured_config(arguments)) as server, server.client(600) as client:
        described = client.describe()
        baseline, every = (BASELINE, PAIRS) if described.diffusion else (CAUSAL_BASELINE, CAUSAL_PAIRS)
        known = {*described.recompute_policies, *described.commit_policies}
        every = tuple(p for p in every if all(re.split(r"\W", name)[0] in known for name in p))
        pairs = _pairs(arguments.recompute, arguments.commit, baseline, every)
        tokenizer = server.engines[described.name].stages.model.tokenizer
        block = described.block_length
        asked = [_asked(task, i, arguments.seed, tokenizer, block) for i in range(arguments.limit) for task in tasks]
        groups = _measure(client, asked, (baseline, *pairs), arguments.concurrent, progress)
    rows = [_row(pair, groups[pair], groups[baseline]) for pair in (baseline, *pairs)]
    if arguments.plot is not None:
        _plot(rows, arguments.plot)
        progress(f"wrote {arguments.plot}")
    return {
        "rows": rows,
        "settings": {
            "model": described.name,
            "tasks": tasks,
            "items": len(asked),
            "block_length": block,
            "concurrent": arguments.concurrent,
            "prefix_cache": False,
            "seed": arguments.seed,
        },
    }


def _pairs(recompute: str | None, commit: str | None, baseline: Pair, every: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """All pairs, or the one given by the arguments."""
    if recompute is None and commit is None:
        return every
    named = (recompute or baseline[0], commit or baseline[1])
    return () if named == baseline else (named,)


def _policies(pair: Pair, canvas: int) -> tuple[Any, ...]:
    return tuple(SPECIAL[name](canvas) if name in SPECIAL else name for name in pair)


def _asked(task: str, index: int, seed: int, tokenizer: PreTrainedTokenizerBase, block: int) -> Asked:
    thing, question = item(task, index, seed)
    length = len(tokenizer.encode(question.answer, add_special_tokens=False)) + 1
    return Asked(media_files(task, thing), question, -(-length // block) * block)


def _measure(
    client: Client, asked: Sequence[Asked], pairs: Sequence[Pair], concurrent: int, progress: Progress
) -> dict[Pair, list[Group]]:
    """Each group of ``concurrent`` items with every pair, one after another."""
    groups: dict[Pair, list[Group]] = defaultdict(list)
    with ThreadPoolExecutor(concurrent) as pool:

        def answer(pair: Pair, one: Asked) -> Result:
            recompute, commit = _policies(pair, one.canvas)
            options: Options = {
                "max_new_tokens": one.canvas,
                "recompute": recompute,
                "commit": commit,
                "videos": one.media["videos"],
            }
            return client.generate(one.question.text, one.media["images"], **options)

        answer(pairs[0], asked[0])  # warm-up
        for start in range(0, len(asked), concurrent):
            group = asked[start : start + concurrent]
            progress(f"{start} of {len(asked)} items")
            for pair in pairs:
                begun = time.monotonic()
                results = list(pool.map(lambda one, pair=pair: answer(pair, one), group))
                seconds = time.monotonic() - begun
                right = [correct(one.question, r.text) for one, r in zip(group, results, strict=True)]
                groups[pair].append(Group([one.question.task for one in group], results, right, seconds))
    return groups


def _row(pair: Pair, groups: list[Group], baseline: list[Group]) -> Figures:
    results, against = ([r for group in of for r in group.results] for of in (groups, baseline))
    ratios = [b.seconds / g.seconds for g, b in zip(groups, baseline, strict=True)]
    low, middle, high = quartiles(ratios)
    tokens = sum(r.usage.completion_tokens for r in results)
    return {
        "recompute": pair[0],
        "commit": pair[1],
        "accuracy": _share(groups),
        "baseline_accuracy": _share(baseline),
        "accuracy_by_task": share_by_task(answer for g in groups for answer in zip(g.tasks, g.right, strict=True)),
        "same_as_baseline": round(statistics.mean(r.text == b.text for r, b in zip(results, against, strict=True)), 4),
        "forwards": round(statistics.mean(r.forwards for r in results), 2),
        "baseline_forwards": round(statistics.mean(r.forwards for r in against), 2),
        "speedup": round(middle, 2),
        "speedup_quartiles": [round(low, 2), round(high, 2)],
        "tokens_per_forward": round(tokens / sum(r.forwards for r in results), 2),
        "recomputed_tokens": round(statistics.mean(r.recomputed_tokens for r in results), 1),
        "tokens_per_second": round(tokens / sum(g.seconds for g in groups), 1),
        "ttft_ms": round(statistics.median(r.times.first_token for r in results), 1),
    }


def _share(groups: list[Group]) -> float:
    right = [answer for group in groups for answer in group.right]
    return round(sum(right) / len(right), 4)


def _plot(rows: list[Figures], path: Path) -> None:
    """Plot speed-up with its quartiles, and accuracy, a row a pair, fastest first, as PNG."""
    ordered = sorted(rows, key=lambda row: row["speedup"])
    lines = range(len(ordered))
    middle = [row["speedup"] for row in ordered]
    low, high = ([row["speedup_quartiles"][i] for row in ordered] for i in (0, 1))
    whiskers = [[m - v for m, v in zip(middle, low, strict=True)], [v - m for m, v in zip(middle, high, strict=True)]]
    with drawn(path, 9, 1.2 + 0.27 * len(ordered)) as figure:
        speed, accuracy = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        speed.errorbar(middle, lines, xerr=whiskers, fmt="o", color="#0072b2", ecolor="#56b4e9", capsize=2)
        speed.axvline(1, color="#999999", linewidth=1, linestyle=":")
        speed.set(xscale="log", xlabel="speed, times the baseline (median, quartiles)")
        speed.set_yticks(lines, [f"{row['recompute']} × {row['commit']}" for row in ordered], fontsize=8)
        accuracy.plot([row["accuracy"] for row in ordered], lines, "o", color="#d55e00")
        accuracy.axvline(rows[0]["accuracy"], color="#999999", linewidth=1, linestyle=":")
        accuracy.set(xlim=(-0.03, 1.03), xlabel="accuracy (dotted: the baseline's)")

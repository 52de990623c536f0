"""Savings and accuracy of pruning visual tokens: ``mmserve bench vision``.

Every pruner at every keep ratio answers the same generated questions about pictures, question by question in turn, or
``--concurrent`` of them at once, so that noise affects all equally. For next-token models ``kv_reductions`` reports the
same for dropping K/V during decode, at shares of the prompt. Caches are disabled, except for ``again``, in which every
picture is asked about twice.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress
from mmserve.bench.plots import drawn
from mmserve.bench.scoring import decoder_shares, scored_by, tower_shares
from mmserve.bench.settings import measured_config, measured_policies, named_tasks
from mmserve.client import (
    Blend,
    Client,
    ExpectedAttention,
    HeavyHitters,
    LegoLink,
    Options,
    RandomReuse,
    Result,
    SinkWindow,
    Usage,
    VisualCache,
)
from mmserve.config import Config, EncoderCacheConfig
from mmserve.core.policies.image_reuse import ImageReuse
from mmserve.core.policies.kv_reduction import KvReduction
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.vision import LlavaVision
from mmserve.prune import PRUNERS
from mmserve.prune.base import judged_by_decoder
from mmserve.reference.evaluate import canvas, item, media_files
from mmserve.reference.images import SHORT_TASKS
from mmserve.reference.items import Question
from mmserve.reference.tasks import TASKS, correct

RATIOS = (0.5, 0.25, 0.125, 0.05)
#: Minimum number of K/V positions that are kept: attention sinks and one more.
_LEAST = 5
_REDUCTIONS: dict[str, Callable[[int], KvReduction]] = {
    "heavy_hitters": HeavyHitters,
    "expected_attention": ExpectedAttention,
    "sink_window": SinkWindow,
}
#: Number of pictures asked about twice, and the reuse rules that this is repeated with.
AGAIN = 32
REUSING: dict[str, ImageReuse] = {"blend": Blend(), "lego_link": LegoLink(), "random_reuse": RandomReuse()}
#: A result, and whether it is correct.
Answer = tuple[Result, bool]
#: Rounds of tower runs and pruner scoring.
SCORING_ROUNDS = 30


@dataclass(frozen=True)
class Setting:
    """A pruner and its amount; no amount = no pruning."""

    pruner: str
    amount: str = "keep_ratio"
    value: float = 1.0

    def options(self, _whole: Usage | None) -> Options:
        """The request options of this setting."""
        if self.pruner == "none":
            return {}
        found: Options = {"pruner": self.pruner}  # type: ignore[typeddict-item]
        found[self.amount] = self.value  # type: ignore[literal-required]
        return found


@dataclass(frozen=True)
class Reduced:
    """A reduction of K/V to a share of the prompt's positions, or of its visual ones, after the first token."""

    name: str
    ratio: float

    def options(self, whole: Usage | None) -> Options:
        """The request options of this setting; ``whole``: the usage without the reduction.

        Raises ``ValueError`` if ``whole`` is None.
        """
        if whole is None:
            raise ValueError("a reduction is a share of what is held without one: that is measured first")
        if self.name == "visual_cache":
            return {"kv_reduction": VisualCache(max(1, round(whole.visual_tokens * self.ratio)), outputs=1)}
        return {"kv_reduction": _REDUCTIONS[self.name](max(_LEAST, round(whole.prompt_tokens * self.ratio)))}


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each setting (times are medians, milliseconds), and one for a repeated picture."""
    pictured = [task for task, kind in TASKS.items() if kind in ("image", "json")]
    tasks = named_tasks(arguments, pictured, SHORT_TASKS)
    config = measured_config(arguments)
    asked = [item(task, index, arguments.seed) for index in range(arguments.limit) for task in tasks]
    with BackgroundServer(config) as server, server.client(600) as client:
        described = client.describe()
        model = server.engines[described.name].stages.model
        if not isinstance(model, LoadedModel) or model.vision is None:
            raise ConfigError(f"{described.name} takes no images")
        settings = _chosen(arguments.pruners, _settings(described.pruners), described.kv_reductions)
        decoding = measured_policies(arguments, described)
        _ask(client, *asked[0], decoding)  # warm-up
        answers: dict[Setting | Reduced, list[Answer]] = defaultdict(list)
        with ThreadPoolExecutor(arguments.concurrent) as pool:
            for start in range(0, len(asked), arguments.concurrent):
                progress(f"{start} of {len(asked)} questions, {len(settings)} times each")
                group = asked[start : start + arguments.concurrent]
                for setting in settings:
                    whole = [result.usage for result, _right in answers[settings[0]][start:]]
                    given: list[Options] = [
                        {**decoding, **setting.options(whole[i] if whole else None)} for i in range(len(group))
                    ]
                    results = pool.map(lambda one, options: _ask(client, one[0], one[1], options), group, given)
                    answers[setting] += [(r, correct(one[1], r.text)) for one, r in zip(group, results, strict=True)]
        pruned = [setting for setting in settings if isinstance(setting, Setting)]
        costs = _scoring(model, sorted({s.pruner for s in pruned} - {"none"}))
    rows = [_row(s, answers[s], answers[settings[0]], _token_bytes(model), costs.get(s.pruner)) for s in pruned]
    if arguments.plot is not None:
        _plot(rows, arguments.plot)
        progress(f"wrote {arguments.plot}")
    return {
        "rows": rows,
        "kv_reductions": [
            _reduced_row(s, answers[s], answers[settings[0]]) for s in settings if isinstance(s, Reduced)
        ],
        "again": _again(config, asked[:AGAIN], decoding),
        "again_reusing": {
            name: _again(config, asked[:AGAIN], decoding, rule)
            for name, rule in REUSING.items()
            if name in described.image_reuses
        },
        "settings": {
            "model": described.name,
            "tasks": tasks,
            "items": len(asked),
            **decoding,
            "concurrent": arguments.concurrent,
            "seed": arguments.seed,
            "prefix_cache": False,
            "encoder_cache": False,
        },
    }


def _settings(pruners: Sequence[str]) -> list[Setting]:
    """All settings, beginning with no pruning."""
    found = [Setting("none")]
    for name in pruners:
        if name != "none":
            found += [Setting(name, "keep_ratio", value) for value in RATIOS]
    return found


def _chosen(names: str, settings: Sequence[Setting], reductions: Sequence[str]) -> list[Setting | Reduced]:
    """No pruning, and the settings of the pruners and reductions in ``names`` ("A,B,…"; "" = all)."""
    known = {s.pruner for s in settings} | set(reductions)
    wanted = set(names.split(",")) if names else known
    if unknown := wanted - known:
        raise ConfigError(
            f"the model has no pruner or K/V reduction {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}"
        )
    return [
        *(s for s in settings if s.pruner in {*wanted, "none"}),
        *(Reduced(name, ratio) for name in reductions if name in wanted for ratio in RATIOS),
    ]


def _ask(client: Client, thing: Any, question: Question, options: Options) -> Result:
    wanted: Options = {"max_new_tokens": canvas(question.task), **options}
    return client.generate(question.text, media_files(question.task, thing)["images"], **wanted)


def _token_bytes(model: LoadedModel) -> int:
    """Bytes of the K/V of one position."""
    c = model.decoder.config
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * model.dtype.itemsize


def _row(
    setting: Setting, answers: list[Answer], whole: list[Answer], token: int, cost: tuple[float, float, float] | None
) -> Figures:
    results = [result for result, _right in answers]
    accuracy, unpruned = (sum(right for _result, right in of) / len(of) for of in (answers, whole))

    def median(pick: Callable[[Result], float], digits: int = 2) -> float:
        return round(statistics.median(map(pick, results)), digits)

    return {
        "pruner": setting.pruner,
        setting.amount: setting.value,
        "accuracy": round(accuracy, 4),
        "of_unpruned": round(accuracy / unpruned, 4) if unpruned else 0.0,
        "visual_tokens": round(statistics.mean(r.usage.visual_tokens for r in results), 1),
        "encode_ms": median(lambda r: r.times.encode),
        "prefill_ms": median(lambda r: r.times.prefill),
        "ttft_ms": median(lambda r: r.times.first_token),
        "kv_bytes": round(statistics.mean(r.usage.prompt_tokens for r in results) * token),
        **({"scoring_share": list(cost), **scored_by(setting.pruner)} if cost is not None else {}),
    }


def _reduced_row(setting: Reduced, answers: list[Answer], whole: list[Answer]) -> Figures:
    accuracy, unreduced = (sum(right for _result, right in of) / len(of) for of in (answers, whole))
    return {
        "kv_reduction": setting.name,
        "keep_ratio": setting.ratio,
        "accuracy": round(accuracy, 4),
        "of_unreduced": round(accuracy / unreduced, 4) if unreduced else 0.0,
        "kv_positions": round(statistics.mean(r.usage.kv_positions for r, _right in answers), 1),
        "kv_positions_unreduced": round(statistics.mean(r.usage.kv_positions for r, _right in whole), 1),
    }


def _scoring(model: LoadedModel, pruners: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """Quartiles of a pruner's cost for a picture of one tile relative to the tower's time (``bench scoring``)."""
    if not isinstance(model.vision, LlavaVision) or model.vision.anyres is not None:
        return {}
    late = [name for name in pruners if judged_by_decoder(PRUNERS[name]())]
    early = [name for name in pruners if name not in late]
    vision = model.vision
    later = tuple(vision.later or ())
    found = tower_shares(vision.tower, vision.select_layer, early, 1, SCORING_ROUNDS, later=later)
    found |= {name: share for name, (share, _layers) in decoder_shares(model, late, SCORING_ROUNDS).items()}
    return {name: one.share for name, one in found.items()}


def _again(
    config: Config, asked: Sequence[tuple[Any, Question]], decoding: Options, reuse: ImageReuse | None = None
) -> Figures:
    """The first request with a picture compared with a second, equal one; one denoising step each, so that the time to
    the first token is that of encode and prefill.

    Both caches are enabled: next-token models skip the prompt's prefill, too; with ``reuse``, the first request creates
    the picture's K/V and the second reuses them. A third request is answered in full.
    """
    first, second, right = [], [], []
    options: Options = {**decoding, "image_reuse": reuse}
    briefly: Options = {**options, "steps": 1}
    cached = replace(config.engine, prefix_cache=True)
    with BackgroundServer(replace(config, engine=cached, encoder_cache=EncoderCacheConfig())) as server:
        engine = next(iter(server.engines.values()))
        with Client(server.address, timeout=600) as client:
            client.wait_ready()
            client.generate("?", max_new_tokens=4)  # warm-up
            for thing, question in asked:
                once, twice = (_ask(client, thing, question, briefly).times for _ in range(2))
                first.append(once)
                second.append(twice)
                right.append(correct(question, _ask(client, thing, question, options).text))
        made = engine.stats().token_cache.made
    return {
        "pictures": len(asked),
        "encoded": made,
        "encode_ms": [round(statistics.median(t.encode for t in of), 2) for of in (first, second)],
        "ttft_ms": [round(statistics.median(t.first_token for t in of), 2) for of in (first, second)],
        "ttft_speedup": round(
            statistics.median(a.first_token / b.first_token for a, b in zip(first, second, strict=True)), 2
        ),
        "accuracy": round(statistics.mean(right), 4),
    }


def _plot(rows: list[Figures], path: Path) -> None:
    """Plot accuracy against visual tokens, a line a pruner, as PNG."""
    with drawn(path, 8, 5) as figure:
        import matplotlib  # installed, as the figure exists

        axes = figure.subplots()
        lines: dict[str, list[Figures]] = defaultdict(list)
        for row in rows:
            lines[row["pruner"]].append(row)
        axes.plot([rows[0]["visual_tokens"]], [rows[0]["accuracy"]], "k*", markersize=10, label="none")
        for index, name in enumerate(name for name in lines if name != "none"):
            ordered = sorted([*lines[name], rows[0]], key=lambda row: row["visual_tokens"])
            style = "--" if name in ("random", "resize") else "-"
            tokens = [row["visual_tokens"] for row in ordered]
            accuracy, color = [row["accuracy"] for row in ordered], matplotlib.colormaps["tab20"](index * 2 % 19)
            axes.plot(tokens, accuracy, style, color=color, marker="o", markersize=4, label=name)
        axes.set(xscale="log", xlabel="visual tokens", ylabel="accuracy (dashed: the baselines)", ylim=(0, 1.03))
        axes.legend(fontsize=8)

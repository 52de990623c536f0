"""The effect of constraints on answers, and their costs: ``mmserve bench constraint``.

Each item is requested with and without its constraint, one request at a time and in turn, so that noise affects both
equally: scenes as JSON with the schema of exactly the requested fields, with all steps and with a quarter of them, and
documents of many kinds that the model was not trained on, for which only validity is checked, by an independent
validator (jsonschema-rs).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from mmserve.assembly import BackgroundServer
from mmserve.bench import search
from mmserve.bench.measures import Figures, Progress
from mmserve.bench.schemas import SCHEMAS
from mmserve.bench.settings import measured_config, measured_policies, named_tasks
from mmserve.client import Client, Options, Result
from mmserve.core.info import ModelInfo
from mmserve.reference.evaluate import MediaFiles, canvas, item, media_files
from mmserve.reference.images import schema_asked
from mmserve.reference.items import Question
from mmserve.reference.tasks import correct

#: The parts of the benchmark; ``search`` uses no model.
PARTS = ("scenes", "schemas", "search")
#: Tokens a step in the reduced setting, for models that can commit several tokens a step.
FEWER = 4
#: Token limit of a document of a built-in schema.
DOCUMENT_CANVAS = 96
NOTHING = MediaFiles(images=[], videos=[])


@dataclass(frozen=True)
class Asked:
    """One item of a part; ``question`` includes the correct answer if there is one."""

    part: str
    text: str
    media: MediaFiles
    schema: dict[str, Any]
    canvas: int
    question: Question | None = None


@dataclass(frozen=True)
class Variant:
    """The settings of a request."""

    part: str
    steps: str  # "all", or "1/4"
    constrained: bool


@dataclass(frozen=True)
class Answered:
    """The result of a request; ``exact`` is None if there is no reference answer."""

    result: Result
    valid: bool
    exact: bool | None


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each part, number of steps, and with and without the constraint; and ``search`` if selected."""
    parts = named_tasks(arguments, PARTS)
    report: dict[str, Any] = {"rows": [], "settings": {"parts": parts, "seed": arguments.seed}}
    asked = [*_scenes(arguments), *_documents(arguments)]
    asked = [one for one in asked if one.part in parts]
    if asked:
        with BackgroundServer(measured_config(arguments)) as server, server.client(600) as client:
            model = client.describe()
            policies = measured_policies(arguments, model)
            answered = _ask_all(client, asked, model, policies, progress)
        report["rows"] = [_row(variant, answers) for variant, answers in answered.items()]
        report["settings"] |= {"model": model.name, **policies, "prefix_cache": False}
    if "search" in parts:
        report["search"] = search.run(arguments.repeats, arguments.seed, progress)
    return report


def _scenes(arguments: argparse.Namespace) -> Iterator[Asked]:
    for index in range(arguments.limit):
        scene, question = item("json", index, arguments.seed)
        schema = schema_asked(question.text)
        yield Asked("scenes", question.text, media_files("json", scene), schema, canvas("json"), question)


def _documents(arguments: argparse.Namespace) -> Iterator[Asked]:
    for wanted in SCHEMAS[: arguments.limit]:
        yield Asked("schemas", f"Give JSON with {wanted.name}.", NOTHING, wanted.schema, DOCUMENT_CANVAS)


def _ask_all(
    client: Client, asked: list[Asked], model: ModelInfo, policies: Options, progress: Progress
) -> dict[Variant, list[Answered]]:
    """The results of each item with each variant, requested one after another."""
    answered: dict[Variant, list[Answered]] = defaultdict(list)
    _ask(client, asked[0], Variant(asked[0].part, "all", constrained=True), policies)  # warm-up
    for number, one in enumerate(asked):
        progress(f"{number} of {len(asked)} items")
        for steps in ("all", f"1/{FEWER}") if model.diffusion else ("all",):
            for constrained in (False, True):
                variant = Variant(one.part, steps, constrained)
                answered[variant].append(_judged(one, _ask(client, one, variant, policies)))
    return answered


def _ask(client: Client, one: Asked, variant: Variant, policies: Options) -> Result:
    options: Options = {**policies, "max_new_tokens": one.canvas, "videos": one.media["videos"]}
    if variant.steps != "all":
        options["steps"] = one.canvas // FEWER
    schema = one.schema if variant.constrained else None
    return client.generate(one.text, one.media["images"], schema=schema, **options)


def _judged(one: Asked, result: Result) -> Answered:
    judge = jsonschema_rs.validator_for(one.schema, validate_formats=True)
    try:
        valid = judge.is_valid(json.loads(result.text))
    except ValueError:
        valid = False
    return Answered(result, valid, None if one.question is None else correct(one.question, result.text))


def _row(variant: Variant, answers: list[Answered]) -> Figures:
    results = [answer.result for answer in answers]
    exact = [answer.exact for answer in answers if answer.exact is not None]
    took = [result.constraint for result in results if result.constraint is not None]
    steps = search.percentiles([ms for each in took for ms in each.step_ms]) if took else {"p50": None, "p99": None}
    every = sum(each.steps for each in took)
    return {
        "task": variant.part,
        "steps": variant.steps,
        "constrained": variant.constrained,
        "items": len(answers),
        "valid_share": round(statistics.mean(answer.valid for answer in answers), 4),
        "exact_share": round(statistics.mean(exact), 4) if exact else None,
        "fallback_share": round(sum(each.fallbacks for each in took) / every, 4) if took else None,
        "late": sum(each.late for each in took) if took else None,
        "step_ms_p50": steps["p50"],
        "step_ms_p99": steps["p99"],
        "forward_share": _forward_share([(each.search_seconds, each.forward_seconds) for each in took]),
        "tokens_per_step": round(sum(r.usage.completion_tokens for r in results) / sum(r.forwards for r in results), 2),
    }


def _forward_share(seconds: list[tuple[float, float]]) -> float | None:
    """Median over answers of the ratio of the constraint's time to that of the forward passes."""
    shares = [constraint / forward for constraint, forward in seconds if forward > 0]
    return round(statistics.median(shares), 4) if shares else None

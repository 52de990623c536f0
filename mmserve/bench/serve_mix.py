"""The requests of a mixed load and their times: questions of the bundled models' tasks, each with its own media."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from mmserve.bench.open_loop import Asked
from mmserve.client import Options
from mmserve.core.info import ModelInfo
from mmserve.errors import ConfigError
from mmserve.reference.evaluate import canvas, item, media_files
from mmserve.reference.tasks import correct

#: The tasks of each kind of request, in turn.
TASKS: dict[str, tuple[str, ...]] = {
    "text": ("arithmetic",),
    "image": ("count", "color", "what", "caption", "json"),
    "video": ("direction", "order", "when"),
}
#: Weights of the kinds in the default mix.
USUAL = {"text": 2.0, "image": 2.0, "video": 1.0}


def mix_of(text: str, model: ModelInfo) -> dict[str, float]:
    """The weights by kind in ``text`` (``text=4,image=1``); by default those of ``USUAL`` that ``model`` supports.

    Raises ``ConfigError`` for unknown kinds, or kinds that the model does not support.
    """
    takes = {"text": True, "image": model.images, "video": model.videos}
    if not text:
        return {kind: weight for kind, weight in USUAL.items() if takes[kind]}
    found: dict[str, float] = {}
    for part in text.split(","):
        kind, equals, weight = part.partition("=")
        try:
            found[kind] = float(weight) if equals else 1.0
        except ValueError:
            found[kind] = -1.0
        if kind not in TASKS or not 0 <= found[kind] < float("inf"):
            raise ConfigError(f"--mix takes KIND=WEIGHT of {', '.join(TASKS)}, separated by commas, not {part!r}")
        if not takes[kind]:
            raise ConfigError(f"--mix: the model {model.name!r} takes no {kind}")
    if not sum(found.values()):
        raise ConfigError(f"--mix: no kind of {text!r} has a weight above 0")
    return found


def requests(drawn: Sequence[str], seed: int, options: Options) -> list[Asked]:
    """A request for each kind in ``drawn``, all different; ``options`` apply to all."""
    counts: Counter[str] = Counter()
    made = []
    for kind in drawn:
        task = TASKS[kind][counts[kind] % len(TASKS[kind])]
        thing, question = item(task, counts[kind], seed)
        counts[kind] += 1
        media = media_files(task, thing)
        own: Options = {"max_new_tokens": canvas(task), **options}
        if media["videos"]:
            own["videos"] = media["videos"]
        made.append(Asked(kind, question.text, tuple(media["images"]), own, partial(correct, question)))
    return made


def weights_text(weights: Mapping[str, float]) -> str:
    """``weights`` in the syntax of ``mix_of``."""
    return ",".join(f"{kind}={weight:g}" for kind, weight in weights.items())


def arrival_times(rate: float, seconds: float, *, seed: int, burst: int = 1) -> list[float]:
    """Ascending times in ``[0, seconds)`` of a Poisson process with ``rate`` arrivals a second on average.

    ``burst``: number of simultaneous arrivals; bursts are rarer accordingly. Raises ``ValueError`` if ``rate`` or
    ``seconds`` is not above 0, or ``burst`` below 1.
    """
    if not (rate > 0 and seconds > 0 and burst >= 1):
        raise ValueError(f"no arrivals are drawn at {rate} a second for {seconds} seconds in bursts of {burst}")
    generator = np.random.default_rng([seed, 0])
    times: list[float] = []
    now = generator.exponential(burst / rate)
    while now < seconds:
        times += [float(now)] * burst
        now += generator.exponential(burst / rate)
    return times


def kinds(count: int, weights: Mapping[str, float], *, seed: int) -> list[str]:
    """The kinds of ``count`` requests, drawn in the ratio of ``weights``; independent of the rate.

    Raises ``ValueError`` if no weight is above 0, or one is below 0.
    """
    shares = np.array(list(weights.values()), dtype=float)
    if not len(shares) or (shares < 0).any() or not shares.sum() > 0:
        raise ValueError(f"no mix of requests: {dict(weights)}")
    drawn = np.random.default_rng([seed, 1]).choice(len(shares), size=count, p=shares / shares.sum())
    names = list(weights)
    return [names[int(i)] for i in drawn]

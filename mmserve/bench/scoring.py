"""Cost of pruners' scoring and selection relative to the vision tower: ``mmserve bench scoring``.

Measured on the served model's tower and on a randomly initialized one of the size of CLIP ViT-L/14-336, for a picture
of one tile and one of eight. A tower runs once a round with the outputs of all pruners recorded, so that differences of
two runs do not hide shares of less than a per cent. Times are CPU time of one thread.

For pruners scored by the decoder (``scored_by``), its first layers run on the whole prompt before the scores exist:
``layers_ms``, a part of ``scoring_ms`` that the shortened prefill must compensate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from mmserve.bench.measures import Figures, Progress
from mmserve.bench.settings import measured_config
from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount
from mmserve.decode.decoder_pruning import DecoderPruning
from mmserve.errors import ConfigError
from mmserve.models.attended import PromptAttention
from mmserve.models.base import LoadedModel
from mmserve.models.evidence import Watched, layers_of
from mmserve.models.registry import load_model
from mmserve.models.vision import LlavaVision
from mmserve.prune import PRUNERS, Pruner, pruners_for
from mmserve.prune.base import GridView, judged_by_decoder

#: Text tokens of the prompt, and positions of the answer, for pruners scored by the decoder.
_TEXT, _ANSWER = 24, 8
#: Maximum seconds of one measurement beyond the minimum rounds; minimum rounds; seconds between lines of progress.
SECONDS, FEWEST, _SHOWN = 100.0, 3, 10.0
#: Numbers of tiles of a picture.
TILES = (1, 8)
#: Dimensions of LLaVA's and CLIP's openai/clip-vit-large-patch14-336.
_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Share:
    """Milliseconds of a tower's run and of a pruner's scoring and selection, and the ratio of the latter to the former:
    quartiles over rounds."""

    tower_ms: float
    scoring_ms: float
    share: tuple[float, float, float]
    rounds: int

    @classmethod
    def of(cls, towers: Sequence[float], costs: Sequence[float]) -> Share:
        """From seconds, round by round."""
        shares = [cost / tower for cost, tower in zip(costs, towers, strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
        tower, cost = (round(1e3 * statistics.median(of), 3) for of in (towers, costs))
        return cls(tower, cost, (round(low, 4), round(middle, 4), round(high, 4)), len(shares))

    def row(self) -> Figures:
        """The columns of a report."""
        shares = {"tower_ms": self.tower_ms, "scoring_ms": self.scoring_ms, "scoring_share": list(self.share)}
        return {**shares, "rounds": self.rounds}


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each tower, number of tiles and pruner, of ``--limit`` rounds, or of as many as ``paced`` allows."""
    if arguments.limit < 2:
        raise ConfigError("`bench scoring` gives quartiles: --limit must be at least 2 rounds")
    [settings, *_others] = measured_config(arguments).models
    model = load_model(settings)
    if not isinstance(model, LoadedModel) or not isinstance(model.vision, LlavaVision):
        raise ConfigError(f"{model.spec.name} has no CLIP-style tower with a projector, which is what is measured")
    torch.set_num_threads(1)  # CPU time is measured for one thread
    vision = model.vision
    large: Any = CLIPVisionModel(CLIPVisionConfig(**_LARGE)).eval().requires_grad_(False)
    towers: list[tuple[str, Any, int, Sequence[nn.Module]]] = [
        (model.spec.name, vision.tower, vision.select_layer, tuple(vision.later or ())),
        ("CLIP ViT-L/14-336, random", large, -2, ()),
    ]
    rows = []
    for name, tower, select, later in towers:
        names = _chosen(arguments.pruners, [n for n in pruners_for(vision.evidence) if n != "none"])
        for tiles in TILES if names else ():

            def note(text: str, of: str = f"{name}, {tiles} tiles") -> None:
                progress(f"{of}: {text}")

            found = tower_shares(tower, select, names, tiles, arguments.limit, note, later=later)
            rows += [{"tower": name, "tiles": tiles, "pruner": n, **found[n].row(), **scored_by(n)} for n in names]
    asking = [n for n in _chosen(arguments.pruners, list(PRUNERS)) if judged_by_decoder(PRUNERS[n]())]
    asked = decoder_shares(model, asking, arguments.limit, lambda text: progress(f"{model.spec.name}, decoder: {text}"))
    rows += [
        {"tower": model.spec.name, "tiles": 1, "pruner": n, **share.row(), **scored_by(n), "layers_ms": layers}
        for n, (share, layers) in asked.items()
    ]
    bounds = {"rounds": arguments.limit, "seconds": SECONDS, "fewest_rounds": FEWEST}
    return {"rows": rows, "settings": {"model": model.spec.name, "dtype": str(model.dtype), **bounds}}


def paced(rounds: int, progress: Progress) -> Iterator[int]:
    """Yield round numbers 0, 1, … ``rounds``; round 0 is a warm-up that is not to be counted.

    After ``FEWEST`` rounds, no round starts that would end after ``SECONDS`` at the average so far. A measurement takes
    longer only if ``FEWEST + 1`` rounds do, which is logged after the first.
    """
    begun, shown = time.monotonic(), 0.0
    for number in range(rounds + 1):
        seconds = time.monotonic() - begun
        each = seconds / number if number else 0.0
        if number > FEWEST and seconds + each > SECONDS:
            progress(f"{seconds:.0f} s: {number - 1} rounds of {rounds} must suffice")
            return
        if number == 1:
            expected = min(rounds + 1, max(FEWEST + 1, int(SECONDS / max(each, 1e-9))))
            progress(f"a round takes {each:.1f} s: about {each * expected:.0f} s for {expected - 1} of {rounds}")
        elif not number or seconds - shown > _SHOWN:
            shown = seconds
            progress(f"round {number} of {rounds}")
        yield number


def scored_by(name: str) -> dict[str, str]:
    """Columns that identify the source of a pruner's scores; shares of tower time are comparable for equal sources
    only."""
    return {"scored_by": "decoder" if judged_by_decoder(PRUNERS[name]()) else "tower"}


def _chosen(names: str, known: Sequence[str]) -> list[str]:
    return [name for name in known if not names or name in names.split(",")]


def _quarter(pruner: Pruner) -> Amount:
    return Amount("keep_ratio", 0.25)


@torch.inference_mode()
def tower_shares(
    tower: nn.Module,
    select: int,
    names: Sequence[str],
    tiles: int,
    rounds: int,
    progress: Progress = lambda _text: None,
    *,
    later: Sequence[nn.Module] = (),
) -> dict[str, Share]:
    """The cost of the pruners ``names`` relative to a CLIP-style ``tower`` for a picture of ``tiles`` tiles.

    ``later``: the tower's layers after those that compute the features (``Watched``). ``rounds`` is the maximum;
    ``paced`` may stop earlier (``Share.rounds``).
    """
    config: Any = tower.config
    side = config.image_size // config.patch_size
    first = int(hasattr(tower.get_submodule("embeddings"), "class_embedding"))
    like = next(tower.parameters())
    noise = torch.randn(tiles, 3, config.image_size, config.image_size, generator=torch.Generator().manual_seed(0))
    pixels, layers = noise.to(like.device, like.dtype), layers_of(tower)
    pruners = {name: PRUNERS[name]() for name in names}
    towers: list[float] = []
    costs: dict[str, list[float]] = defaultdict(list)
    for _round in paced(rounds, progress):
        spent = dict.fromkeys(names, 0.0)
        watching: dict[str, Watched] = {}
        with ExitStack() as stack:
            for name, pruner in pruners.items():
                begun = time.thread_time()
                watching[name] = Watched(layers, select, pruner.needs, later=later)
                stack.enter_context(watching[name].running())
                spent[name] += time.thread_time() - begun
            begun = time.thread_time()
            hidden = tower(pixels, output_hidden_states=True).hidden_states
            towers.append(time.thread_time() - begun)
        for name, pruner in pruners.items():
            begun = time.thread_time()
            seen = watching[name].evidence(hidden, first=first)
            views = [GridView(side, side, {kind: values[i] for kind, values in seen.items()}) for i in range(tiles)]
            pruner.plans(views, _quarter(pruner))
            costs[name].append(spent[name] + time.thread_time() - begun)
    return {name: Share.of(towers[1:], costs[name][1:]) for name in names}


@torch.inference_mode()
def decoder_shares(
    model: LoadedModel, names: Sequence[str], rounds: int, progress: Progress = lambda _text: None
) -> dict[str, tuple[Share, float]]:
    """The cost of the decoder-scored pruners ``names`` relative to the tower for a picture of one tile, and the part in
    milliseconds (median) of the layers that run before the scores exist.

    The prompt has ``_TEXT`` tokens after the picture and, for masked diffusion, an answer of ``_ANSWER``. Rounds are as
    in ``tower_shares``.
    """
    vision = model.vision
    if not names or not isinstance(vision, LlavaVision):
        return {}
    config: Any = vision.tower.config
    pixels = torch.randn(1, 3, config.image_size, config.image_size).to(model.device, model.dtype)
    if vision.anyres is not None:
        raise ConfigError("pruners by the decoder are measured on pictures of one tile, which this model has not")
    [picture] = vision.encode([{"pixels": pixels}], frozenset(), clip=False)
    attention = _Timed(model)
    pruning, rows = DecoderPruning(model, attention), len(picture.tokens)
    grids = (tuple(grid.patches.numpy() for grid in picture.grids),)
    prompt = Encoded(np.zeros(rows + _TEXT, np.int64), np.arange(rows), picture.tokens, grids=grids)
    towers: list[float] = []
    costs: dict[str, list[float]] = defaultdict(list)
    layers: dict[str, list[float]] = defaultdict(list)
    for _round in paced(rounds, progress):
        begun = time.thread_time()
        vision.encode([{"pixels": pixels}], frozenset(), clip=False)
        towers.append(time.thread_time() - begun)
        for name in names:
            pruner = PRUNERS[name]()
            begun = time.thread_time()
            pruning.prune(prompt, pruner, _quarter(pruner), _ANSWER)
            layers[name].append(attention.layers)
            costs[name].append(time.thread_time() - begun)
    return {
        name: (Share.of(towers[1:], costs[name][1:]), round(1e3 * statistics.median(layers[name][1:]), 3))
        for name in names
    }


class _Timed(PromptAttention):
    """Records the CPU time (seconds) of its last run of the layers."""

    layers = 0.0

    def run_before(self, *given: Any) -> Tensor:
        begun = time.thread_time()
        found = super().run_before(*given)
        self.layers = time.thread_time() - begun
        return found

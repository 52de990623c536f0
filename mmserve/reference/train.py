"""Train a bundled model: ``python -m mmserve.reference.train``; stopped, it resumes where it was.

Two objectives share data, tokenizer and tower: ``diffusion`` (LLaDA's masked loss, cross-entropy at masked positions
over the masking rate; arXiv 2502.09992) and ``causal`` (next token). Stage 1 trains the tower alone, with labels of
every patch and of the picture: with a trained tower, the decoder learns to use pictures in a tenth of the steps. Stage
2 trains everything, with the auxiliary loss added to the main one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from mmserve.models.checkpoint import ADAPTER
from mmserve.observe.machine import describe
from mmserve.reference.auxiliary import AuxiliaryHeads
from mmserve.reference.batch import Batch
from mmserve.reference.copying import Guide
from mmserve.reference.data import collate, draw
from mmserve.reference.decisions import DECISIONS
from mmserve.reference.exported import read_exported
from mmserve.reference.heldout import quick_accuracy
from mmserve.reference.losses import PADDING, PIECEWISE, causal_loss, diffusion_loss, mask_answers, piecewise
from mmserve.reference.low_rank import add_low_rank, read_adapter
from mmserve.reference.model import ReferenceModel, mixed_precision
from mmserve.reference.optimizers import Optimizers
from mmserve.reference.parallel import Processes
from mmserve.reference.plot import plot
from mmserve.reference.recipe import MIXES, OBJECTIVES, RECIPES, TRAINED, Recipe
from mmserve.reference.stream_frames import SeenFrames
from mmserve.reference.streams import training_clips
from mmserve.reference.tokenizer import MASK, token_id, train_tokenizer

#: Vocabulary rows: the tokenizer's size rounded up to a multiple of 64.
VOCAB_MULTIPLE = 64
#: Steps between lines of the log, saved states, and measurements of the accuracy; the last step has all three.
LOG_EVERY, SAVE_EVERY, MEASURE_EVERY = 100, 200, 1000


class Steps(Dataset[Batch]):
    """The batch of each training step, for a loader: drawn from the step's number alone."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        processes: Processes,
        frames: SeenFrames | None = None,
    ) -> None:
        self.recipe, self.tokenizer, self.processes, self.frames = recipe, tokenizer, processes, frames

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> Batch:
        recipe = self.recipe
        scenes_only = step < recipe.tower_steps + recipe.scene_steps
        causal = recipe.objective == "causal"
        packed = causal or step < recipe.packed_steps
        kind, samples, canvas = draw(
            step, recipe.seed, scenes_only=scenes_only, packed=packed, scale=recipe.scale, mix=recipe.mix, causal=causal
        )
        samples = self.processes.share(samples)
        batch = collate(kind, samples, 0 if causal else canvas, self.tokenizer)
        if kind == "stream" and self.frames is not None:
            batch = replace(batch, visual=self.frames.of([window for window, _questions in samples]))
        return batch


class Run:
    """A training run: state, one step, and its checkpoint."""

    def __init__(self, recipe: Recipe, folder: Path, device: torch.device) -> None:
        if recipe.objective not in OBJECTIVES:
            raise SystemExit(f"objective {recipe.objective!r} is not known; it is one of {OBJECTIVES}")
        if recipe.trained not in TRAINED:
            raise SystemExit(f"trained {recipe.trained!r} is not known; it is one of {TRAINED}")
        if (recipe.trained == "adapter") != (recipe.rank > 0):
            raise SystemExit("--rank is that of --trained adapter, at least 1")
        if recipe.guide and recipe.objective == "causal" and not any(kind in DECISIONS for kind in MIXES[recipe.mix]):
            raise SystemExit("--guide of the objective causal is for typed questions: that model copies without it")
        if "stream" in MIXES[recipe.mix] and recipe.trained == "all":
            raise SystemExit(
                f"the mix {recipe.mix!r} has windows of streams, whose frames are encoded once: add --trained decoder"
            )
        torch.manual_seed(recipe.seed)
        self.recipe, self.folder, self.device = recipe, folder, device
        self.processes = Processes()
        self.tokenizer: PreTrainedTokenizerFast = train_tokenizer()
        self.mask_id = token_id(self.tokenizer, MASK)
        vocab = -(-len(self.tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        causal = recipe.objective == "causal"
        self.model = ReferenceModel(vocab, causal=causal).to(device)
        sizes = self.model.tower.config.hidden_size, self.model.decoder.config.hidden_size
        self.heads = AuxiliaryHeads(*sizes).to(device)
        self.average = ReferenceModel(vocab, causal=causal).to(device)
        self.average.load_state_dict(self.model.state_dict())
        if recipe.trained != "all":
            for part in (self.model.tower, self.model.projector):
                part.requires_grad_(False)
        self.optimizers = Optimizers(self.model, self.heads, recipe)
        self.done = 0
        self.skipped = 0  # steps of this process whose gradients were not finite: they change nothing
        self.seconds = 0.0
        self.before: dict[str, Any] | None = None  # the run that this one took its first weights from

    def compile(self) -> None:
        """Compile the trained layers once for all shapes: about a fifth less time a step."""
        for layer in (*self.model.decoder.layers, *self.model.tower.encoder.layers):
            layer.compile(dynamic=True)

    def step(self, batch: Batch) -> dict[str, Any]:
        """One optimisation step; returns its figures, tensors still on the device."""
        recipe, step = self.recipe, self.done
        batch = batch.to(self.device)
        with mixed_precision(self.device):
            visual, auxiliary, right = self._visual_tokens(batch)
            if step < recipe.tower_steps:
                loss = main = auxiliary
                changes = torch.zeros(())
            else:
                main, hidden = self._main_loss(visual, batch)
                changes = torch.zeros((), device=self.device)
                if batch.changes is not None and recipe.auxiliary_weight:
                    changes = self.heads.changes(hidden[batch.visual_at], batch.changes)
                loss = main + recipe.auxiliary_weight * (auxiliary + changes)
        loss.backward()
        trained = [p for p in (*self.model.parameters(), *self.heads.parameters()) if p.requires_grad]
        self.processes.average(trained)
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        if norm.isfinite():
            self.optimizers.step(self._rate(step))
        else:
            self.optimizers.clear()
            self.skipped += 1
        self.done += 1
        self._average()
        kind = "tower" if step < recipe.tower_steps else batch.kind
        return {"kind": kind, "loss": main.detach(), "tower": right, "changes": changes.detach()}

    def _visual_tokens(self, batch: Batch) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Visual tokens, auxiliary loss, and the share of pictures that the tower's heads label without fault."""
        zero = torch.zeros((), device=self.device)
        if batch.visual is not None:
            return batch.visual, zero, None
        if batch.pixels is None:
            return None, zero, None
        if self.recipe.trained != "all":
            with torch.no_grad():
                return self.model.visual(self.model.image_features(batch.pixels)[0], pooled=batch.pooled), zero, None
        features, pooled = self.model.image_features(batch.pixels)
        auxiliary, right = (zero, None) if batch.labels is None else self.heads.tower(features, pooled, batch.labels)
        return self.model.visual(features, pooled=batch.pooled), auxiliary, right

    def _main_loss(self, visual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.model.causal:
            guide = Guide.causal(batch) if self.recipe.guide else None
            loss, hidden = causal_loss(self.model, visual, batch, guide)
            return (loss if guide is None else loss + self.recipe.guide * guide.loss()), hidden
        generator = torch.Generator().manual_seed((self.recipe.seed * 1_000_003 + self.done) * 64 + self.processes.rank)
        share = 0.0 if batch.packed else PIECEWISE.get(batch.kind, 0.0)
        by_pieces = float(torch.rand((), generator=generator)) < share
        if by_pieces and batch.changes is None:
            batch = batch.with_padding(PADDING)
        guided = not batch.packed or batch.option_labels is not None
        guide = Guide.of(batch) if self.recipe.guide and guided else None
        if by_pieces:
            trained, ids, weight = piecewise(batch, self.mask_id, generator, guide)
        else:
            trained, (ids, weight) = batch, mask_answers(batch, self.mask_id, self.recipe.lowest_rate, generator)
        loss, hidden = diffusion_loss(self.model, visual, trained, ids, weight, guide)
        if guide is not None:
            loss = loss + self.recipe.guide * guide.loss()
        return loss, hidden[:, : batch.ids.shape[1]]

    def _rate(self, step: int) -> float:
        """Warm-up, then cosine, anew for each stage."""
        tower = self.recipe.tower_steps
        done, total = (step, tower) if step < tower else (step - tower, self.recipe.steps - tower)
        return min(1.0, (done + 1) / self.recipe.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done / total)))

    @torch.no_grad()
    def _average(self) -> None:
        decay = min(self.recipe.ema, (1 + self.done) / (10 + self.done))
        mine: list[Tensor] = list(self.average.parameters())
        theirs: list[Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(mine, theirs, 1 - decay)

    def save(self) -> None:
        """Write the state so that a run killed at any moment finds a whole one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": asdict(self.recipe),
            "done": self.done,
            "seconds": self.seconds,
            "before": self.before,
            "machine": describe(),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers.all],
        }
        temporary = self.folder / "state.tmp"
        torch.save(state, temporary)
        temporary.replace(self.folder / "state.pt")

    def resume(self) -> bool:
        """Take up the folder's state, if there is one; exits where another recipe made it."""
        path = self.folder / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True, map_location=self.device)
        if state["recipe"] != asdict(self.recipe):
            raise SystemExit(f"{path} was made by another recipe: {state['recipe']}; name another --out or remove it")
        self.done, self.seconds, self.before = state["done"], state["seconds"], state.get("before")
        self._add_adapter()
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(self.optimizers.all, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return True

    def begin_from(self, folder: Path) -> None:
        """Start with the averaged weights of the run in ``folder``, or with those of an exported model, or of an
        adapter in its folder ``adapters``."""
        path = folder / "state.pt"
        if (folder / ADAPTER).exists():
            self._begin_exported(folder.parent.parent)
            self._add_adapter()
            self._begin_adapter(folder)
            return
        if (folder / "config.json").exists():
            self._begin_exported(folder)
            self._add_adapter()
            return
        if not path.exists():
            raise SystemExit(f"{path} is not there: name the folder of a run that was trained before, or of a model")
        state = torch.load(path, weights_only=True, map_location=self.device)
        goes_on = state["recipe"].get("rank", 0) > 0  # with the adapter of that run, which has the same rank
        if goes_on:
            self._add_adapter()
        self.model.load_state_dict(state["average"])
        self.average.load_state_dict(state["average"])
        self.heads.load_state_dict(state["heads"])
        self.before = {key: state.get(key) for key in ("recipe", "done", "seconds", "machine", "before")}
        if not goes_on:
            self._add_adapter()

    def _add_adapter(self) -> None:
        """Add the adapter to the weights, which are loaded now; nothing for other recipes."""
        if self.recipe.trained == "adapter":
            for model in (self.model, self.average):
                add_low_rank(model, self.recipe.rank, output=self.recipe.output)
            self.average.load_state_dict(self.model.state_dict())
            self.optimizers = Optimizers(self.model, self.heads, self.recipe)

    def _begin_adapter(self, folder: Path) -> None:
        try:
            for model in (self.model, self.average):
                read_adapter(model, folder)
        except ValueError as error:
            raise SystemExit(f"{error}: give --rank and --output as they were") from None
        self._begun_from_card(folder / "README.md")

    def _begin_exported(self, folder: Path) -> None:
        if self.recipe.trained == "all":
            raise SystemExit(f"{folder} has no heads of the tower: add --trained decoder")
        for model in (self.model, self.average):
            read_exported(folder, model)
        self._begun_from_card(folder / "MODEL_CARD.md")

    def _begun_from_card(self, card: Path) -> None:
        self.before = {"card": card.read_text(encoding="utf-8") if card.exists() else ""}


def main() -> None:
    """Train, or go on training, by the command line's recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", choices=RECIPES, default="cpu")
    parser.add_argument("--objective", choices=OBJECTIVES, default="diffusion")
    parser.add_argument("--out", type=Path, help="folder of state, log and plot (default runs/OBJECTIVE)")
    parser.add_argument(
        "--begin",
        type=Path,
        metavar="RUN",
        help="start with the weights of this run's folder, or of a model's, or of an adapter's",
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads; leave cores to what else runs")
    parser.add_argument("--compile", action="store_true", help="fuse the layers' operations (needs a C++ compiler)")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw batches (0 = this one)")
    changeable = [field for field in fields(Recipe) if field.name != "objective"]
    for field in changeable:
        kind: dict[str, Any] = {"type": type(field.default)}
        if isinstance(field.default, bool):
            kind = {"action": argparse.BooleanOptionalAction, "default": None}
        parser.add_argument(f"--{field.name.replace('_', '-')}", **kind, help="in place of the recipe's")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    given = {field.name: getattr(arguments, field.name) for field in changeable}
    changes = {name: value for name, value in given.items() if value is not None}
    recipe = replace(RECIPES[arguments.recipe], objective=arguments.objective, **changes)
    device = torch.device("cuda" if arguments.recipe == "gpu" else "cpu")
    run = Run(recipe, arguments.out or Path("runs") / arguments.objective, device)
    resumed = run.resume()
    if arguments.begin is not None and not resumed:
        run.begin_from(arguments.begin)
    elif recipe.trained == "adapter" and not resumed:
        raise SystemExit("an adapter is added to the weights of a model: name it by --begin")
    if arguments.compile:
        run.compile()
    parameters = sum(p.numel() for p in run.model.parameters()) / 1e6
    if run.processes.first:
        print(f"{parameters:.2f} M parameters, {'resumed at' if resumed else 'from'} step {run.done}", flush=True)
    train(run, workers=arguments.workers)


def train(run: Run, *, workers: int) -> None:
    """Run to the recipe's last step; logs, measures and saves on the way."""
    run.folder.mkdir(parents=True, exist_ok=True)
    steps = range(run.done, run.recipe.steps)
    frames = None
    if "stream" in MIXES[run.recipe.mix]:
        frames = SeenFrames.kept(run.folder / "frames.pt", run.model, training_clips())
    batches = Steps(run.recipe, run.tokenizer, run.processes, frames)
    loader = DataLoader(batches, batch_size=None, sampler=steps, num_workers=workers)
    mean: dict[str, float] = {}
    begun, before, first = time.monotonic(), run.seconds, run.done
    for batch in loader:
        figures = run.step(batch)
        if run.done % 10 == 0 or run.device.type == "cpu":
            kind, loss = figures["kind"], float(figures["loss"])
            if math.isfinite(loss):
                mean[kind] = 0.95 * mean.get(kind, loss) + 0.05 * loss
            if (changes := float(figures["changes"])) > 0:
                mean[f"{kind}_changes"] = 0.95 * mean.get(f"{kind}_changes", changes) + 0.05 * changes
        spent = time.monotonic() - begun
        run.seconds = before + spent
        last = run.done == run.recipe.steps
        if (run.done % LOG_EVERY == 0 or last) and run.processes.first:
            line: dict[str, Any] = {"step": run.done, "seconds": round(run.seconds)}
            line |= {f"loss_{k}": round(v, 4) for k, v in sorted(mean.items())}
            if run.skipped:
                line["skipped"] = run.skipped
            if figures["tower"] is not None:
                line["tower"] = round(float(figures["tower"]), 3)
            if (run.done % MEASURE_EVERY == 0 or last) and run.done > run.recipe.tower_steps:
                line |= quick_accuracy(run.average, run.tokenizer, run.recipe)
            if run.done % SAVE_EVERY == 0:
                run.save()
            with (run.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            left = spent / (run.done - first) * (run.recipe.steps - run.done) / 60
            print(line, f"about {left:.0f} min left at this pace", flush=True)
    if run.processes.first:
        run.save()
        print(_plot(run.folder), flush=True)
    run.processes.close()


def _plot(folder: Path) -> str:
    """Draw the run's log; returns what was done."""
    try:
        return f"wrote {plot(folder)}"
    except ImportError:
        return "no plot of the log: matplotlib is missing (pip install 'mmserve[plots]')"


if __name__ == "__main__":
    main()

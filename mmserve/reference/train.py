"""Train the bundled model: ``python -m mmserve.reference.train --out runs/reference``; resumes where it stopped.

Stage 1 teaches the tower alone (labels of every patch and of the picture): with a tower that already sees, the
decoder learns to look ten times sooner. Stage 2 trains everything with the masked-diffusion loss of LLaDA
(cross-entropy at masked positions over the masking rate; arXiv 2502.09992) beside the teaching loss.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mmserve.reference.data import Batch, collate, draw
from mmserve.reference.model import ReferenceModel, TeachingHeads
from mmserve.reference.parallel import Processes
from mmserve.reference.tokenizer import MASK, token_id, train_tokenizer

#: Vocabulary rows: the tokenizer's size rounded up to a multiple of 64.
VOCAB_MULTIPLE = 64
#: Share of rows whose every answer token is masked: then only the picture tells.
ALL_MASKED = 0.4
#: Masking rates of captions: what is left must tell which shape is meant, as their order is random.
CAPTION_RATES = (0.3, 0.85)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result; recorded in the checkpoint."""

    tower_steps: int = 800
    looking_steps: int = 1500  # steps of stage 2 whose batches are JSON and captions: they teach to find things
    steps: int = 6000
    json_share: float = 0.15  # of the batches, later
    caption_share: float = 0.35
    muon_lr: float = 2.5e-3
    adam_lr: float = 1.8e-3
    warmup: int = 150
    teaching: float = 0.3
    ema: float = 0.998
    lowest_rate: float = 0.08
    seed: int = 0

    def shares(self, step: int) -> dict[str, float]:
        """How often each kind of batch is drawn at ``step``."""
        if step < self.tower_steps + self.looking_steps:
            return {"json": 0.5, "caption": 0.5}
        return {
            "json": self.json_share,
            "caption": self.caption_share,
            "short": 1 - self.json_share - self.caption_share,
        }


class Optimizers:
    """Muon for the matrices of the towers' and decoder's layers, AdamW for everything else."""

    def __init__(self, model: ReferenceModel, heads: TeachingHeads, recipe: Recipe) -> None:
        matrices: list[Tensor] = []
        rest: list[Tensor] = list(heads.parameters())
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() == 2 and ".layers." in name
            (matrices if is_matrix else rest).append(parameter)
        self.rates = (recipe.muon_lr, recipe.adam_lr)
        self.all: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )

    def step(self, factor: float) -> None:
        for optimizer, rate in zip(self.all, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def mask_answers(batch: Batch, mask_id: int, lowest_rate: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masked ids ``[B, T]`` and the loss weight of each position ``[B, T]`` (0 where not masked).

    A row masks each answer token with its own rate, drawn uniformly, or all of them (``ALL_MASKED`` of rows). Of rows
    with more than one block, half are masked as block-wise decoding meets them: what stands left of a random block is
    known, what stands right of it is masked and carries no loss.
    """
    rows = len(batch.ids)

    def uniform() -> Tensor:
        return torch.rand(rows, 1, generator=generator)

    rate = uniform() * (1 - lowest_rate) + lowest_rate
    if batch.kind == "caption":
        rate = CAPTION_RATES[0] + uniform() * (CAPTION_RATES[1] - CAPTION_RATES[0])
    else:
        rate = torch.where(uniform() < ALL_MASKED, torch.ones(rows, 1), rate)
    drawn = torch.rand(batch.ids.shape, generator=generator) < rate
    blocks = batch.block.amax(1, keepdim=True) + 1
    current = (uniform() * blocks).long()
    blockwise = (uniform() < 0.5) & (blocks > 1)
    inside, right = batch.block == current, batch.block > current
    answer = batch.share > 0
    masked = answer & torch.where(blockwise, (drawn & inside) | right, drawn)
    weight = masked * batch.share / rate
    weight = torch.where(blockwise, weight * inside * blocks, weight)
    return torch.where(masked, mask_id, batch.ids), weight


def diffusion_loss(model: ReferenceModel, features: Tensor, batch: Batch, ids: Tensor, weight: Tensor) -> Tensor:
    """Weighted cross-entropy of the masked answer tokens, averaged over rows."""
    chosen = weight > 0
    logits = model(features, ids, batch.image_at, batch.seen)[chosen].float()
    loss = F.cross_entropy(logits, batch.ids[chosen], reduction="none")
    return (loss * weight[chosen]).sum() / len(ids)


class Run:
    """A training run: state, one step, and its checkpoint."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.folder = recipe, folder
        self.processes = Processes()
        self.tokenizer: PreTrainedTokenizerFast = train_tokenizer()
        self.mask_id = token_id(self.tokenizer, MASK)
        vocab = -(-len(self.tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.model = ReferenceModel(vocab)
        self.heads = TeachingHeads(self.model.tower.config.hidden_size)
        self.average = ReferenceModel(vocab)
        self.average.load_state_dict(self.model.state_dict())
        self.optimizers = Optimizers(self.model, self.heads, recipe)
        self.done = 0
        self.seconds = 0.0
        self.before: dict[str, Any] | None = None  # the run whose weights this one began with, and its recipe

    def step(self) -> dict[str, float | str]:
        """One optimisation step; returns its figures."""
        recipe, step = self.recipe, self.done
        kind, samples, canvas = draw(step, recipe.seed, recipe.shares(step))
        batch = collate(kind, self.processes.share(samples), canvas, self.tokenizer)
        generator = torch.Generator().manual_seed((recipe.seed * 1_000_003 + step) * 64 + self.processes.rank)
        with torch.autocast("cpu", torch.bfloat16):
            features, pooled = self.model.look(batch.pixels)
            teaching, right = self.heads(features, pooled, batch.labels)
            if step < recipe.tower_steps:
                loss = main = teaching
            else:
                ids, weight = mask_answers(batch, self.mask_id, recipe.lowest_rate, generator)
                main = diffusion_loss(self.model, features, batch, ids, weight)
                loss = main + recipe.teaching * teaching
        loss.backward()
        trained = [*self.model.parameters(), *self.heads.parameters()]
        self.processes.average(trained)
        nn.utils.clip_grad_norm_(trained, 1.0)
        self.optimizers.step(self._rate(step))
        self.done += 1
        self._average()
        return {"kind": kind, "loss": main.item(), "teaching": teaching.item(), "tower": right.item()}

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
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": asdict(self.recipe),
            "done": self.done,
            "seconds": self.seconds,
            "before": self.before,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers.all],
        }
        temporary = self.folder / "state.tmp"
        torch.save(state, temporary)
        temporary.replace(self.folder / "state.pt")

    def resume(self) -> bool:
        path = self.folder / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise SystemExit(f"{path} was made by another recipe: {state['recipe']}; name another --out or remove it")
        self.done, self.seconds, self.before = state["done"], state["seconds"], state["before"]
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(self.optimizers.all, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return True

    def begin_from(self, folder: Path) -> None:
        """Begin with the weights and taught tower of the run in ``folder``; its recipe is recorded with this one's."""
        state = torch.load(folder / "state.pt", weights_only=True)
        self.before = {key: state.get(key) for key in ("recipe", "done", "seconds", "before")}
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.heads.load_state_dict(state["heads"])
        self.done = self.recipe.tower_steps


@torch.no_grad()
def quick_accuracy(run: Run) -> dict[str, float]:
    """Share of rows whose every answer comes out right, with all answers masked, by threshold decoding.

    The rows are training-like chats of another seed, the weights the averaged ones.
    """
    result = {}
    for kind in ("short", "json"):
        _kind, samples, _canvas = draw(2_000_000, run.recipe.seed + 1, {kind: 1.0})
        batch = collate(kind, samples, 16 if kind == "short" else 64, run.tokenizer)
        with torch.autocast("cpu", torch.bfloat16):
            features, _pooled = run.average.look(batch.pixels)
            ids = torch.where(batch.share > 0, run.mask_id, batch.ids)
            while (open_ := ids == run.mask_id).any():
                logits = run.average(features, ids, batch.image_at, batch.seen)
                confidence, token = logits.float().softmax(-1).max(-1)
                confidence = confidence.masked_fill(~open_, -1.0)
                chosen = confidence >= 0.9
                chosen[torch.arange(len(ids)), confidence.argmax(1)] = True
                ids = torch.where(chosen & open_, token, ids)
        result[kind] = round((ids == batch.ids).all(1).float().mean().item(), 3)
    return result


def train(run: Run) -> None:
    """Run to the recipe's last step; logs, measures and saves on the way."""
    run.folder.mkdir(parents=True, exist_ok=True)
    recent: dict[str, float] = {}
    begun, before, first = time.monotonic(), run.seconds, run.done
    while run.done < run.recipe.steps:
        figures = run.step()
        kind, loss = str(figures["kind"]), float(figures["loss"])
        recent[kind] = 0.95 * recent.get(kind, loss) + 0.05 * loss
        spent = time.monotonic() - begun
        run.seconds = before + spent
        if run.done % 100 == 0 and run.processes.first:
            line: dict[str, float] = {"step": run.done, "seconds": round(run.seconds)}
            line |= {f"loss_{name}": round(value, 4) for name, value in recent.items()}
            line |= {"teaching": round(float(figures["teaching"]), 4), "tower": round(float(figures["tower"]), 3)}
            if run.done % 500 == 0:
                line |= quick_accuracy(run) if run.done > run.recipe.tower_steps else {}
                run.save()
            with (run.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            left = spent / (run.done - first) * (run.recipe.steps - run.done) / 60
            print(line, f"about {left:.0f} min left at this pace", flush=True)
    if run.processes.first:
        run.save()


def main() -> None:
    """Train, or go on training, by the command line's recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/reference"), help="folder of state and log")
    parser.add_argument("--begin-from", type=Path, metavar="FOLDER", help="begin with the weights of another run")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    torch.set_num_threads(arguments.pop("threads"))
    out, begin_from = arguments.pop("out"), arguments.pop("begin_from")
    run = Run(Recipe(**arguments), out)
    resumed = run.resume()
    if begin_from is not None and not resumed:
        run.begin_from(begin_from)
    if run.processes.first:
        parameters = sum(p.numel() for p in run.model.parameters()) / 1e6
        print(f"{parameters:.2f} M parameters, {'resumed at' if resumed else 'from'} step {run.done}", flush=True)
    train(run)
    run.processes.close()


if __name__ == "__main__":
    main()

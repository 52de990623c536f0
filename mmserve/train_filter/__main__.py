"""Train a model's commit filter on its own trajectories: ``python -m mmserve.train_filter --model PATH``.

The filter is what the commit policy ``learned`` asks (Learn2PD, arXiv 2509.25188). It is written into the model's
folder, where the server finds it, with a record of how it was made and how well it does on prompts kept aside. For any
diffusion checkpoint: ``--prompts FILE`` names prompts of the kind it will get, one a line; without it, items of the
bundled models' training data are asked. The same seed gives the same filter.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

import torch

from mmserve.config import BUNDLED, ModelConfig
from mmserve.errors import ConfigError, MMServeError
from mmserve.models.base import CanvasModel
from mmserve.models.commit_filter import FILTER, save_filter
from mmserve.models.registry import load_model, model_folder
from mmserve.train_filter.prompts import reference_requests, written_requests
from mmserve.train_filter.train import train


def main(given: list[str] | None = None) -> int:
    """Run the command line, or ``given`` arguments; 0, or 1 where something is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=BUNDLED, help="checkpoint directory, 'bundled' or 'hub:owner/name'")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default {FILTER} in the model's folder")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line (default: reference items)")
    parser.add_argument("--limit", type=int, default=306, help="prompts at most (default 306)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="canvas of each of --prompts (default 128)")
    parser.add_argument("--steps", type=int, default=4000, help="training steps (default 4000)")
    parser.add_argument("--seed", type=int, default=0, help="which items are drawn, and the filter's start (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    try:
        model = load_model(ModelConfig(path=arguments.model))
        if isinstance(model, CanvasModel):
            raise ConfigError(f"{arguments.model} denoises random tokens; a filter is for models that fill masks")
        prompts = (
            written_requests(model, arguments.prompts, arguments.max_new_tokens)
            if arguments.prompts is not None
            else reference_requests(model, arguments.seed)
        )
        requests = list(islice(prompts, arguments.limit))
        commit_filter, record = train(model, requests, seed=arguments.seed, steps=arguments.steps, progress=_progress)
        path = arguments.out or model_folder(arguments.model) / FILTER
    except (ConfigError, MMServeError) as error:
        print(f"train_filter: {error}", file=sys.stderr)
        return 1
    save_filter(commit_filter, path, record)
    for name, value in record["held_out"].items():
        print(f"{name}: {value}")
    print(f"wrote {path}")
    return 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

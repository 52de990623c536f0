"""Implementation of ``mmserve train-filter``.

The filter is used by the commit policy ``learned`` (Learn2PD, arXiv 2509.25188). It is written into the model's folder,
where the server finds it, with metadata about its training and its accuracy on held-out prompts. For any diffusion
checkpoint: ``--prompts FILE`` contains representative prompts, one a line; without it, items of the bundled models'
training data are used. The result is deterministic for a seed.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice

import torch

from mmserve.config import ModelConfig
from mmserve.errors import ConfigError
from mmserve.models.base import CanvasModel
from mmserve.models.commit_filter import FILTER, save_filter
from mmserve.models.registry import load_model, model_folder
from mmserve.train_filter.prompts import reference_requests, written_requests
from mmserve.train_filter.train import train


def run(arguments: argparse.Namespace) -> None:
    """Train and write a filter; raises ``ConfigError`` for invalid arguments."""
    torch.set_num_threads(arguments.threads)
    model = load_model(ModelConfig(path=arguments.model))
    if isinstance(model, CanvasModel):
        raise ConfigError(f"{arguments.model} denoises random tokens; a filter is for models that fill masks")
    if model.spec.causal:
        raise ConfigError(f"{model.spec.name!r} decodes token by token: a filter is for diffusion models")
    prompts = (
        written_requests(model, arguments.prompts, arguments.max_new_tokens)
        if arguments.prompts is not None
        else reference_requests(model, arguments.seed)
    )
    requests = list(islice(prompts, arguments.limit))
    commit_filter, record = train(model, requests, seed=arguments.seed, steps=arguments.steps, progress=_progress)
    path = arguments.out or model_folder(arguments.model) / FILTER
    save_filter(commit_filter, path, record)
    for name, value in record["held_out"].items():
        print(f"{name}: {value}")
    print(f"wrote {path}")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

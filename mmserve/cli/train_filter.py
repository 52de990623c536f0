"""Train the filter of the commit policy 'learned' on a model's own answers, and write it into the checkpoint folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmserve.cli.tune import require_writable
from mmserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve train-filter``."""
    parser.add_argument("--model", default="bundled", help="checkpoint directory, 'bundled' or 'hub:owner/name'")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: commit_filter.safetensors in the model's folder)",
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts, one a line (default: questions about scenes)"
    )
    parser.add_argument("--limit", type=int, default=306, help="largest number of prompts (default 306)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, help="tokens of the answer to each of --prompts (default 128)"
    )
    parser.add_argument("--steps", type=int, default=4000, help="training steps (default 4000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the questions and of the filter's initial weights (default 0)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")


def run(arguments: argparse.Namespace) -> int:
    """Train, with progress on stderr, and print the quality of the filter on held-out prompts."""
    from mmserve.models.commit_filter import FILTER  # imports torch
    from mmserve.models.registry import model_folder
    from mmserve.train_filter.command import run

    if min(arguments.limit, arguments.max_new_tokens, arguments.steps, arguments.threads) < 1:
        raise ConfigError("--limit, --max-new-tokens, --steps and --threads must be at least 1")
    out = arguments.out or model_folder(arguments.model) / FILTER
    require_writable(out, f"copy it into the model's folder as {FILTER}")
    run(arguments)
    return 0

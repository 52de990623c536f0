"""Measure which decode policies are fastest on a model's prompts, and write them to its policy.json."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmserve.cli.options import add_config, add_json, print_json, show_progress
from mmserve.core.tuning import BALANCED, FAST, FLOORS, Measured, Pair, fastest
from mmserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve tune``."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with text and, optionally, images, videos (paths), schema, truth and max_new_tokens (default: "
        "questions about scenes; only for the bundled models)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: policy.json in the model's folder)"
    )
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="largest number of prompts (default 100)")
    parser.add_argument("--repeats", type=int, default=3, help="times that each prompt is measured (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the questions of the bundled models (default 1)")
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, with progress on stderr, write the file, and print the measured curve."""
    from mmserve.assembly import BackgroundServer  # imports torch
    from mmserve.bench.settings import measured_config
    from mmserve.models.names import SHIPPED
    from mmserve.models.policy_file import NO_FILE, POLICY_FILE, row_data, save_policies
    from mmserve.models.registry import model_folder
    from mmserve.observe.machine import describe
    from mmserve.tune.measure import measure, pairs_for
    from mmserve.tune.prompts import bundled_prompts, read_prompts

    if min(arguments.limit, arguments.repeats) < 1:
        raise ConfigError("--limit and --repeats must be at least 1")
    config = measured_config(arguments)
    entry = config.one_model("tune")
    out = arguments.out or model_folder(entry.path) / POLICY_FILE
    require_writable(out, 'make the server read it with `policies = "FILE"` under [[models]]')
    if arguments.prompts is not None:
        prompts = read_prompts(arguments.prompts)[: arguments.limit]
    elif entry.path in SHIPPED:
        prompts = bundled_prompts(arguments.limit, arguments.seed)
    else:
        raise ConfigError("--prompts is required: only the bundled models have built-in questions")
    # The present file is about to be replaced, so it may be invalid.
    config = replace(config, models=(replace(entry, policies=NO_FILE),))
    with BackgroundServer(config) as server, server.client(3600) as client:
        model = client.describe()
        pairs = pairs_for(model)
        curve = measure(client, model.name, prompts, pairs, arguments.repeats, show_progress)
    chosen = {name: fastest(curve, floor) for name, floor in FLOORS.items()}
    default = chosen[BALANCED]
    assert default is not None, "plain decoding is as good as itself"
    measured: dict[str, Any] = {
        "model": model.name,
        "dtype": model.dtype,
        "prompts": len(prompts),
        "with_truth": sum(prompt.right is not None for prompt in prompts),
        "with_schema": sum(prompt.schema is not None for prompt in prompts),
        "repeats": arguments.repeats,
        "source": "bundled" if arguments.prompts is None else arguments.prompts.name,
        "machine": describe(),
    }
    save_policies(out, pairs[0], default.pair, curve, measured)
    if arguments.json:
        rows = [row_data(row) for row in curve]
        print_json({"out": str(out), "default": str(default.pair), "curve": rows, "measured": measured})
    else:
        for row in sorted(curve, key=lambda row: row.time_ratio):
            print(_line(row, pairs[0], {name: found.pair for name, found in chosen.items() if found is not None}))
        print(f"wrote {out}: the default is {default.pair}")
    return 0


def require_writable(out: Path, use: str) -> None:
    """Raise ``ConfigError`` if ``out`` cannot be written, before measurements that take an hour. ``use``: advice
    about another file, for the error."""
    beside = out if out.exists() else out.parent
    if not out.parent.is_dir() or not os.access(beside, os.W_OK):
        raise ConfigError(f"{out} cannot be written: choose another file with --out, and {use}")


def _line(row: Measured, plain: Pair, chosen: dict[str, Pair]) -> str:
    names = [name for name in (BALANCED, FAST) if chosen.get(name) == row.pair] + ["exact"] * (row.pair == plain)
    accuracy = "" if row.accuracy is None else f", accuracy {row.accuracy:.1%}"
    return (
        f"{row.pair}: {1 / row.time_ratio:.2f} x as fast, quality {row.quality:.4f}{accuracy}, agreement "
        f"{row.agreement:.4f}, {row.forwards:.1f} forwards" + (f"  <- {', '.join(names)}" if names else "")
    )

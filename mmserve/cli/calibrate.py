"""Calibrate the probabilities of typed questions on known answers, and write them to the model's decisions.json."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmserve.cli.options import add_config, add_json, any_port, print_json, read_config, show_progress
from mmserve.cli.tune import require_writable
from mmserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve calibrate``."""
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="JSON lines with text, images (paths) and questions; a question has type, text, answer and, depending on "
        "its type, options, low, high, instructions (default: questions about scenes; only for the bundled models)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: decisions.json in the model's folder)"
    )
    parser.add_argument(
        "--limit", type=int, default=2000, metavar="N", help="number of questions about scenes (default 2000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the scenes (default 1)")
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask the questions, with progress on stderr, fit on one half, report the error on the other half, write the
    file."""
    from mmserve.assembly import BackgroundServer  # imports torch
    from mmserve.calibrate.fit import FEWEST, calibration_error, fitted
    from mmserve.calibrate.items import bundled_items, judged, read_items
    from mmserve.core.decisions import Calibration, Scaling
    from mmserve.models.calibration import CALIBRATION_FILE, load_calibration, save_calibration
    from mmserve.models.names import SHIPPED
    from mmserve.models.registry import model_folder
    from mmserve.observe.machine import describe

    if arguments.limit < 2:
        raise ConfigError("--limit must be at least 2")
    config = any_port(read_config(arguments))
    entry = config.one_model("calibrate")
    folder = model_folder(entry.path)
    out = arguments.out or folder / CALIBRATION_FILE
    require_writable(out, f"copy it into the model's folder as {CALIBRATION_FILE}")
    if arguments.questions is not None:
        items = read_items(arguments.questions)
    elif entry.path in SHIPPED:
        items = bundled_items(arguments.limit, arguments.seed)
    else:
        raise ConfigError("--questions is required: only the bundled models have built-in questions")
    if sum(len(item.questions) for item in items) < 2:
        raise ConfigError("--questions must have at least two questions: the error is measured on every second one")
    with BackgroundServer(config) as server, server.client(3600) as client:
        model = client.describe()
        found = list(judged(client, items, model.name, load_calibration(folder), show_progress))
    learned, held = found[::2], found[1::2]
    kinds = fitted(learned)
    plain = Calibration()
    new = Calibration(kinds)
    rows: list[dict[str, Any]] = []
    for kind in (*sorted({each.kind for each in held}), "all"):
        own = [each for each in held if kind in (each.kind, "all")]
        right = [each.right for each in own]
        before, after = (
            calibration_error([c.of(each.kind).probabilities(each.log_probabilities) for each in own], right)
            for c in (plain, new)
        )
        best = [each.log_probabilities.index(max(each.log_probabilities)) for each in own]
        accuracy = sum(one == other for one, other in zip(best, right, strict=True)) / len(own)
        scaling = kinds.get(kind, Scaling())
        own_scaling = {} if kind == "all" else {"temperature": scaling.temperature, "bias": scaling.bias}
        rows.append(
            {"kind": kind, "n": len(own), "accuracy": accuracy, "before": before, "after": after, **own_scaling}
        )
    measured: dict[str, Any] = {
        "model": model.name,
        "questions": len(found),
        "source": "bundled" if arguments.questions is None else arguments.questions.name,
        "expected_calibration_error": {row["kind"]: round(row["after"], 4) for row in rows},
        "machine": describe(),
    }
    save_calibration(out, Calibration(kinds, measured))
    if arguments.json:
        print_json({"out": str(out), "rows": rows, "measured": measured})
        return 0
    for row in rows:
        fit = f", temperature {row['temperature']:.3f}, bias {row['bias']:.3f}" if "temperature" in row else ""
        if row["kind"] not in kinds and row["kind"] != "all":
            fit = f", unchanged: at least {2 * FEWEST} questions of this kind are needed"
        print(
            f"{row['kind']}: {row['n']} questions, {row['accuracy']:.1%} right, expected calibration error "
            f"{row['before']:.4f} -> {row['after']:.4f}{fit}"
        )
    print(f"wrote {out}")
    return 0

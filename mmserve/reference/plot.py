"""Loss and accuracy of a training run over its steps, as PNG: ``python -m mmserve.reference.plot RUN``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError

#: Colours of the kinds of subject, one palette for both panels (Okabe and Ito's, safe for colour-blind readers).
PALETTE = {
    "image": "#0072b2",
    "listing": "#56b4e9",
    "json": "#d55e00",
    "video": "#009e73",
    "narration": "#66c2a5",
    "text": "#cc79a7",
    "pair": "#e69f00",
    "cells": "#f0e442",
    "tower": "#999999",
}


def plot(folder: Path) -> Path:
    """Draw ``folder/log.jsonl`` into ``folder/training.png``; raises ``ConfigError`` without a log."""
    import matplotlib.figure  # an extra: only this needs it

    path = folder / "log.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} has no log.jsonl: train first (python -m mmserve.reference.train)")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    figure = matplotlib.figure.Figure(figsize=(9, 3.6), layout="constrained", dpi=110)
    losses, accuracies = figure.subplots(1, 2)
    for kind, color in PALETTE.items():
        for axes, key, style in ((losses, f"loss_{kind}", "-"), (accuracies, kind, ":" if kind == "tower" else "o-")):
            steps, values = _series(lines, key)
            if steps:
                axes.plot(steps, values, style, color=color, label=kind, linewidth=1.4, markersize=3)
    losses.set(xlabel="step", ylabel="loss (smoothed)", yscale="log", title="training loss")
    accuracies.set(xlabel="step", ylabel="rows all right", ylim=(0, 1.02), title="accuracy on held-out rows")
    for axes in (losses, accuracies):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, ncols=2)
    out = folder / "training.png"
    figure.savefig(out)
    return out


def _series(lines: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps at which ``key`` was logged, and its values; a resumed run's repeated steps count once, the latest."""
    values = {line["step"]: line[key] for line in lines if key in line}
    return sorted(values), [values[step] for step in sorted(values)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="folder that holds log.jsonl")
    print(f"wrote {plot(parser.parse_args().run)}")


if __name__ == "__main__":
    main()

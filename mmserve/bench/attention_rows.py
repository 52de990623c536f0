"""Rows of ``mmserve bench attention``, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmserve.bench.plots import drawn

#: The fields that identify a row.
KEYS = ("measured", "stage", "density", "kept")
_BASELINES = {"random": "--", "oracle": ":"}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Distance of the logits and accuracy against density, a line a builder, prefill beside decode, as PNG."""
    with drawn(path, 9, 6.5) as figure:
        axes = figure.subplots(2, 2, sharex=True, sharey="row")
        dense = next(row["accuracy"] for row in rows if row["measured"] == "dense")
        for column, stage in enumerate(("prefill", "decode")):
            there = [row for row in rows if row.get("stage") == stage]
            for name in dict.fromkeys(row["measured"] for row in there):
                line = sorted((row for row in there if row["measured"] == name), key=lambda row: row["density"])
                style = {"color": "black"} if name in _BASELINES else {}
                for place, figure_of in enumerate(("nats", "accuracy")):
                    densities, made = [row["density"] for row in line], [row[figure_of] for row in line]
                    axes[place][column].plot(
                        densities, made, f"o{_BASELINES.get(name, '-')}", ms=4, label=name, **style
                    )
            axes[0][column].set(title=stage, yscale="log")
            axes[1][column].axhline(dense, color="#999999", linewidth=1)
            axes[1][column].set(xscale="log", xlabel="density", ylim=(0, 1.03))
            axes[0][column].legend(fontsize=8)
            densities = sorted({row["density"] for row in there})
            axes[1][column].set_xticks(densities, [f"{100 * density:g}%" for density in densities])
            axes[1][column].minorticks_off()
        axes[0][0].set_ylabel("nats from dense logits")
        axes[1][0].set_ylabel("accuracy (grey: dense)")

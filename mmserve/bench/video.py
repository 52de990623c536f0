"""Costs of video streams, and accuracy of answers about them: ``mmserve bench video``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmserve.bench.measures import Figures, Progress
from mmserve.bench.plots import drawn
from mmserve.bench.sections import run_sections

#: Colours of the memory policies (Okabe and Ito's colour-blind-safe palette).
COLORS = {"window": "#0072b2", "carrier": "#d55e00", "similarity": "#009e73", "group": "#cc79a7"}


def plot(rows: list[Figures], path: Path) -> None:
    """Plot the rows of the sections ``accuracy``, ``sessions`` and ``long``, if present, as PNG."""
    with drawn(path, 10, 3.6) as figure:
        accuracy, memory = figure.subplots(1, 2)
        for policy, color in COLORS.items():
            own = [r for r in rows if r["measured"] == "accuracy: last clip" and r["positions"] == "renumber"]
            own = sorted((r for r in own if r["policy"] == policy), key=lambda r: r["budget"])
            if own:
                middle, budgets = [r["accuracy"] for r in own], [r["budget"] for r in own]
                ends = [[r["accuracy"] - r["low"] for r in own], [r["high"] - r["accuracy"] for r in own]]
                accuracy.errorbar(budgets, middle, ends, fmt="o-", color=color, label=policy, capsize=2)
                accuracy.set_xscale("log")
                accuracy.set_xticks(budgets, [str(budget) for budget in budgets])
        accuracy.set(xlabel="rows of K/V", ylabel="right about the last clip", ylim=(0, 1.02))
        for row in rows:
            if "host_mib" in row:
                most = max(max(row["host_mib"]), 1)
                share = [at / max(1, row["at_seconds"][-1]) for at in row["at_seconds"]]
                memory.plot(share, row["host_mib"], label=f"{row['measured']}: host (MiB)")
                kv = [value / 1024 for value in row["kv_kib"]]
                memory.plot(share, kv, "--", label=f"{row['measured']}: K/V (MiB)")
                memory.set_ylim(0, 1.1 * max(most, memory.get_ylim()[1] / 1.1))
        memory.set(xlabel="share of the run", ylabel="MiB")
        for axes in (accuracy, memory):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)


#: Sections in the order in which they run.
SECTIONS = {name: f"video_{name}" for name in ("decoding", "files", "accuracy", "sessions", "watches", "long", "cuts")}


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """The report of the sections given by ``--tasks``; writes the plot of ``--plot``."""
    report = run_sections(arguments, progress, SECTIONS)
    if arguments.plot is not None:
        plot(report["rows"], arguments.plot)
        progress(f"wrote {arguments.plot}")
    return report

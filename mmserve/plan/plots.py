"""Plots of sweeps as PNG (optional dependency ``plots``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmserve.bench.plots import drawn
from mmserve.plan.sweep import AtRate, AtTarget
from mmserve.plan.workload import Targets

#: Colours (Okabe and Ito's colour-blind-safe palette) and markers.
STYLES = {"split": ("#0072b2", "o"), "prefill/decode": ("#d55e00", "s"), "all in one": ("#009e73", "^")}


def draw(targets: Sequence[AtTarget], loads: Sequence[AtRate], promised: Targets, serial: float, path: Path) -> None:
    """Plot goodput against the target for the first token, and attainment and time to first token against load.

    ``serial``: time of a single request on one worker (seconds). Raises ``ConfigError`` without matplotlib.
    """
    with drawn(path, 13, 3.8) as figure:
        goodput, attainment, ttft = figure.subplots(1, 3)
        for name, (color, marker) in STYLES.items():
            style: dict[str, Any] = {"color": color, "marker": marker, "label": name, "markersize": 4}
            seen = [(row.targets.ttft, found.goodput) for row in targets if (found := row.comparison.named.get(name))]
            if seen:
                goodput.plot(*zip(*seen, strict=True), **style)
            own = [row for row in loads if name in row.attainment]
            if own:
                rates = [row.rate for row in own]
                attainment.plot(rates, [row.attainment[name] for row in own], **style)
                ttft.plot(rates, [row.ttft[name] for row in own], **style)
        goodput.axvline(serial, color="#777777", linestyle=":", linewidth=1)
        goodput.annotate(
            "alone on one worker",
            (serial, 0.98),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            fontsize=7,
            color="#555555",
        )
        goodput.set(xlabel="target: time to first token (s)", ylabel="goodput (requests/s)", title="Goodput by target")
        goodput.set_ylim(bottom=0)
        attainment.axhline(promised.share, color="#777777", linestyle=":", linewidth=1)
        attainment.set(
            xlabel="requests/s",
            ylabel="requests within both targets",
            ylim=(-0.02, 1.04),
            title=f"Attainment: {promised.ttft:g} s, {promised.tpot:g} s a token",
        )
        ttft.axhline(promised.ttft, color="#777777", linestyle=":", linewidth=1)
        ttft.set(
            xlabel="requests/s",
            ylabel="time to first token, 90th percentile (s)",
            yscale="log",
            title="Time to first token",
        )
        for axes in (goodput, attainment, ttft):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)

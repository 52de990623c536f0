"""Tables and measures of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmserve.bench.measures import at_least, at_most, stated
from mmserve.plan.compare import Comparison
from mmserve.plan.fleet import Fleet
from mmserve.plan.search import Found
from mmserve.plan.sweep import AtRate, AtTarget
from mmserve.plan.workload import Targets


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with equal keys as an aligned text table."""
    if not rows:
        return ""
    heads = list(rows[0])
    cells = [heads, *([_shown(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def compared(comparison: Comparison) -> list[dict[str, Any]]:
    """A row for the best choice of each group."""
    return [_row(name, found) for name, found in comparison.named.items()]


def _row(name: str, found: Found) -> dict[str, Any]:
    choice, b = found.choice, found.choice.batching
    kept = bool(found.goodput)
    return {
        "group": name,
        "layout": str(choice.layout) if kept else "none",
        "encode_batch": b.encode_batch if kept else "-",
        "prefill_tokens": b.prefill_tokens if kept else "-",
        "shards": b.shards if kept else "-",
        "goodput_rps": round(found.goodput, 4),
    }


def by_target(rows: Sequence[AtTarget]) -> list[dict[str, Any]]:
    """A row for each target: goodput of each group, its layout, and the recommendation."""
    made = []
    for row in rows:
        cells: dict[str, Any] = {"ttft_s": round(row.targets.ttft, 4), "tpot_s": row.targets.tpot}
        for name, found in row.comparison.named.items():
            cells[f"{name} rps"] = round(found.goodput, 4)
            cells[f"{name} layout"] = str(found.choice.layout) if found.goodput else "-"
        cells["advice"] = row.comparison.advice.partition(":")[0]
        made.append(cells)
    return made


def by_rate(rows: Sequence[AtRate]) -> list[dict[str, Any]]:
    """A row for each load: attainment, and 90th percentiles of both times (seconds)."""
    return [
        {
            "rate_rps": round(row.rate, 4),
            **{f"{name} kept": round(row.attainment[name], 4) for name in row.attainment},
            **{f"{name} ttft_s": round(row.ttft[name], 4) for name in row.ttft},
            **{f"{name} tpot_s": round(row.tpot[name], 4) for name in row.tpot},
        }
        for row in rows
    ]


def by_fleet(rows: Sequence[Fleet]) -> list[dict[str, Any]]:
    """A row for each rate and cell."""
    return [
        {
            "rate_rps": row.rate,
            "cell": str(row.cell.choice.layout),
            "cell_rps": round(row.cell.rate, 4),
            "cells": row.cells,
            "workers": row.workers,
            "fronts": row.fronts,
            "moved_gb_per_s": round(row.moved_bytes / 1e9, 3),
            "cell_ttft_s": round(row.cell.ttft, 4),
        }
        for row in rows
    ]


def of_comparison(comparison: Comparison, targets: Targets) -> list[dict[str, Any]]:
    """The measures of one comparison."""
    what = f"first token within {targets.ttft:g} s, {targets.tpot:g} s a token"
    made = [stated(f"goodput: {name} ({what})", f.goodput, "requests/s") for name, f in comparison.named.items()]
    return [*made, stated("workers", comparison.all_in_one.choice.layout.workers, "workers")]


def of_shape(rows: Sequence[AtTarget], serial: float) -> list[dict[str, Any]]:
    """EPDServe's result as measures: the split meets targets below the serial time, and has no advantage far above
    it."""
    made = [stated("time to first token of one request alone on one worker", serial, "s")]
    below = [row for row in rows if row.targets.ttft < 0.95 * serial]
    kept = [row for row in below if row.comparison.best.goodput]
    for row in kept[-1:]:
        split, rest = _sides(row.comparison)
        made.append(at_least(f"lead of the split at {row.targets.ttft:.3g} s", split - rest, "requests/s", 1e-3))
    for row in [row for row in rows[-1:] if row.comparison.best.goodput]:
        split, rest = _sides(row.comparison)
        ratio = split / rest if rest else float("inf")
        made.append(at_most(f"split over baselines at {row.targets.ttft:.3g} s", ratio, "x", 1.0))
    return made


def _sides(comparison: Comparison) -> tuple[float, float]:
    """Goodput of the best split, and of the best baseline."""
    rest = [found.goodput for name, found in comparison.named.items() if name != "split"]
    return (comparison.split.goodput if comparison.split else 0.0), max(rest)

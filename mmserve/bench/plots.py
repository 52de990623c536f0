"""Plots for ``--plot``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError


@contextmanager
def drawn(path: Path, width: float, height: float) -> Iterator[Any]:
    """A matplotlib figure of ``width`` × ``height`` inches; on exit, all axes get a grid and it is saved as PNG to
    ``path``.

    Raises ``ConfigError`` if matplotlib, an optional dependency, is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'mmserve[plots]'") from error
    figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained", dpi=110)
    yield figure
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

"""Pruners of visual tokens: their names. How much they keep is an option of its own (``core.options.Amounts``)."""

from __future__ import annotations

from typing import Literal

Pruner = Literal[
    "none",
    "random",
    "resize",
    "cls_attention",
    "hired",
    "visionzip",
    "mustdrop",
    "tome",
    "column_attention",
    "fastv",
    "redvtp",
]

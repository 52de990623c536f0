"""The tensors of quantized pages.

Shapes in names: P pages, S positions a page, G key/value heads, K head size, N kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Highest code of each kind; fp8 is E4M3, whose highest number is 448.
LEVELS = {"int8": 255, "int4": 15, "fp8": 448}


@dataclass(frozen=True, eq=False)
class QuantizedPages:
    """Pages ``[P, S, G, K]`` as ``low + scale × code``; fp8 has no ``low``.

    ``codes``: uint8 ``[P, S, G, K]``, for fp8 its bits; for int4 ``[P, S, G, K/2]``, the even channel in the lower
    half. ``scale`` and ``low``: fp32 ``[P, 1, G, K]`` (one for each channel of a page) or ``[P, S, G, 1]`` (for each
    token). ``kept [N, G, K]`` holds tokens at full precision, ``kept_at`` (int32 ``[P, S]``) their indices in it, -1 =
    none.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    low: Tensor | None
    kept: Tensor | None = None
    kept_at: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape ``[P, S, G, K]`` of the decoded pages."""
        return torch.Size((*self.codes.shape[:3], self.codes.shape[3] * (2 if self.kind == "int4" else 1)))

    @property
    def per(self) -> str:
        """``channel`` or ``token``: the granularity of the ranges; ambiguous for a page of one token with one
        channel."""
        return "token" if self.scale.shape[3] == 1 else "channel"

    @property
    def bytes(self) -> int:
        """Memory of all tensors in bytes."""
        parts = (self.codes, self.scale, self.low, self.kept, self.kept_at)
        return sum(part.nbytes for part in parts if part is not None)

    def select(self, pages: Tensor) -> QuantizedPages:
        """The pages with ids ``pages`` (int64), in that order; a copy."""
        # index_select copies whole pages; on a CPU x[pages] took ten times as long.
        return self._each(lambda x: x.index_select(0, pages))

    def narrow(self, first: int, count: int) -> QuantizedPages:
        """``count`` pages from ``first`` on, as a view."""
        return self._each(lambda x: x.narrow(0, first, count))

    def _each(self, part: Callable[[Tensor], Tensor]) -> QuantizedPages:
        """Apply ``part`` to each tensor that has a page dimension."""
        low, kept_at = (None if x is None else part(x) for x in (self.low, self.kept_at))
        return QuantizedPages(self.kind, part(self.codes), part(self.scale), low, self.kept, kept_at)


def checked(kind: str, per: str, head_size: int) -> None:
    """Raise ``ValueError`` for unsupported combinations of kind, granularity and head size."""
    if kind not in LEVELS:
        raise ValueError(f"kind must be one of {', '.join(LEVELS)}, not {kind!r}")
    if per not in ("channel", "token"):
        raise ValueError(f"per must be channel or token, not {per!r}")
    if kind == "int4" and head_size % 2:
        raise ValueError(f"int4 packs two channels into a byte: the head size must be even, not {head_size}")

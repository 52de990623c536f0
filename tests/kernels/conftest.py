"""Kernels run in a mended interpreter."""

from __future__ import annotations

from triton_harness import INTERPRETED

if INTERPRETED:
    from bf16_interpreter import mend

    mend()

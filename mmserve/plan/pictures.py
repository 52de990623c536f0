"""Distinct pictures, to avoid cache hits."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def picture(number: int, side: int) -> bytes:
    """A JPEG of ``side`` × ``side`` pixels, smooth noise seeded with ``number``."""
    coarse = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR).save(out, "JPEG", quality=90)
    return out.getvalue()

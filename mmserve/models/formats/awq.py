"""AWQ (arXiv 2306.00978) as AutoAWQ writes it (``version = "gemm"``): 4 bits, packed along the output.

``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]`` and ``scales [groups, out]``. The eight
outputs in a word have the order 0, 2, 4, 6, 1, 3, 5, 7, from its lowest bits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmserve.models.formats.base import WORD, Files, Made, Read, check, refuse, served, stems, unpacked, wrong

_BITS = 4
_PER_WORD = WORD // _BITS
#: Index in a word of each output 0 to 7.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def find(settings: Mapping[str, Any], files: Files) -> Read:
    """See ``read_quantised``."""
    bits = settings.get("bits", settings.get("w_bit", _BITS))
    if bits != _BITS:
        refuse(files, "bits", bits, f"{_BITS}")
    version = settings.get("version", "gemm")
    if str(version).lower() != "gemm":
        refuse(files, "version", version, "'gemm'")
    made = {f"{stem}.weight": _made(stem, files) for stem in stems(files, ".qweight")}
    return Read(f"awq, {_BITS} bits", made)


def _made(stem: str, files: Files) -> Made:
    words, scales = files.header(f"{stem}.qweight"), files.header(f"{stem}.scales")
    width, out = words.shape[0], words.shape[-1] * _PER_WORD
    groups = len(scales)
    if width % groups:
        wrong(files, f"{stem}.scales", f"has {groups} groups, which do not divide {width} inputs")
    parts = (
        check(files, f"{stem}.qweight", (width, out // _PER_WORD)),
        check(files, f"{stem}.qzeros", (groups, out // _PER_WORD)),
        check(files, f"{stem}.scales", (groups, out)),
    )

    def make(words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        codes, middle = (_in_order(each).float() for each in (words, zeros))
        grouped = codes.unflatten(0, (groups, -1)).sub_(middle[:, None]).mul_(scales.float()[:, None])
        return grouped.flatten(0, 1).T

    return Made((out, width), served(scales.dtype), parts, make)


def _in_order(words: Tensor) -> Tensor:
    codes = unpacked(words, _BITS, words.shape[-1] * _PER_WORD).unflatten(-1, (-1, _PER_WORD))
    return codes[..., list(_PLACES)].flatten(-2)

"""Python loops compiled by Numba for the present CPU, for computations that PyTorch has no single operation for.

Each is compiled for its signature when its module is imported, and cached on disk if a writable folder is available;
nothing is compiled during a pass. They release the GIL. ``fused`` loops round a product and a sum once (fused
multiply-add). Sums of ``reordered`` loops are accumulated in as many parts as a vector has lanes. In both cases a
result depends only on the numbers and their count, not on memory alignment or neighbouring data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])

#: LLVM's flags. The sign of a zero is not preserved: no result depends on it.
_FUSED = {"contract", "nsz"}
_REORDERED = {*_FUSED, "reassoc", "arcp"}


def compiled(signature: str | Sequence[str], *, fused: bool = True, reordered: bool = False) -> Callable[[F], F]:
    """Compile a function of Numba's subset of Python for argument types such as ``void(f4[:, ::1], i8)``."""
    flags = _REORDERED if reordered else _FUSED if fused else False

    def compile_(function: F) -> F:
        settings: dict[str, Any] = {"nogil": True, "fastmath": flags, "error_model": "numpy"}
        try:
            made: Any = numba.njit(signature, cache=True, **settings)(function)
        except RuntimeError:  # no writable folder for the cache
            made = numba.njit(signature, **settings)(function)
        return cast("F", made)

    return compile_

"""Loops in Python that Numba compiles for the processor at hand: what runs on a CPU where PyTorch has no one operation.

Each is compiled for the types of its signature when its module is imported, and kept on disk where there is a place
to write to; so nothing is compiled in the middle of a pass. They run without Python's lock. Loops that fuse a product
and a sum (``fused``) round once for both. Sums of ``reordered`` loops are added up in as many parts as a vector has.
Either way a result depends on the numbers and on how many there are, not on where they lie or what is beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])

#: LLVM's flags. A zero's sign is not kept: no number that is read from here depends on it.
_FUSED = {"contract", "nsz"}
_REORDERED = {*_FUSED, "reassoc", "arcp"}


def compiled(signature: str | Sequence[str], *, fused: bool = True, reordered: bool = False) -> Callable[[F], F]:
    """Compile a function of Numba's subset of Python for argument types such as ``void(f4[:, ::1], i8)``."""
    flags = _REORDERED if reordered else _FUSED if fused else False

    def compile_(function: F) -> F:
        settings: dict[str, Any] = {"nogil": True, "fastmath": flags, "error_model": "numpy"}
        try:
            made: Any = numba.njit(signature, cache=True, **settings)(function)
        except RuntimeError:  # no folder to keep it in
            made = numba.njit(signature, **settings)(function)
        return cast("F", made)

    return compile_

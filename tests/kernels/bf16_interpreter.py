"""Triton's interpreter with bfloat16 mended.

The interpreter keeps bfloat16 as 16-bit integers. As of Triton 3.7 it multiplies and adds those integers, and truncates
where a GPU rounds to the nearest. Here values are widened to fp32 before they are computed with, which is exact, and
rounded to the nearest even when they are narrowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_MENDED = "mended for bfloat16"
_FLOATS = (tl.bfloat16, tl.float16, tl.float32)


def widen(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bfloat16 ``bits`` (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) of fp32 ``values``, to the nearest even; any NaN becomes the quiet one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(np.shape(values))
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def mend() -> None:
    """Teach the interpreter bfloat16; a second call changes nothing."""
    if getattr(InterpreterBuilder, _MENDED, False):
        return
    setattr(InterpreterBuilder, _MENDED, True)
    dot, convert, cast, binary = (
        InterpreterBuilder.create_dot,
        InterpreterBuilder.create_fp_to_fp,
        InterpreterBuilder.cast_impl,
        InterpreterBuilder.binary_op,
    )

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, _widened(a), _widened(b), *rest)

    def binary_op(self: Any, left: TensorHandle, right: TensorHandle, op: Any) -> TensorHandle:
        if not _is_bf16(left):
            return binary(self, left, right, op)
        out = op(_widened(left).data, _widened(right).data)
        return TensorHandle(out, tl.int1) if out.dtype == np.bool_ else TensorHandle(narrow(out), tl.bfloat16)

    def cast_impl(self: Any, value: TensorHandle, to: tl.dtype) -> TensorHandle:
        if _is_bf16(value) and to.scalar != tl.bfloat16:
            return cast(self, _widened(value), to)
        if to.scalar == tl.bfloat16 and not _is_bf16(value):
            return TensorHandle(narrow(value.data.astype(np.float32)), tl.bfloat16)
        return cast(self, value, to)

    def create_fp_to_fp(self: Any, value: TensorHandle, to: tl.dtype, rounding: Any) -> TensorHandle:
        kinds = (value.dtype.scalar, to.scalar)
        if tl.bfloat16 in kinds and all(kind in _FLOATS for kind in kinds):
            return cast_impl(self, value, to)
        return convert(self, value, to, rounding)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.binary_op = binary_op


def _is_bf16(value: TensorHandle) -> bool:
    return bool(value.dtype.scalar == tl.bfloat16)


def _widened(value: TensorHandle) -> TensorHandle:
    return interpreter.TensorHandle(widen(value.data), tl.float32) if _is_bf16(value) else value

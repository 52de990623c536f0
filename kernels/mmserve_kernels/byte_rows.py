"""Quantization of rows to bytes with a scale each, the inputs of products with 8-bit weights.

Symmetric quantization of each row by its absolute maximum, as in LLM.int8() (arXiv 2208.07339) for rows without
outliers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmserve_kernels.compiled import compiled

#: The byte of a zero. CPUs multiply unsigned bytes of rows with signed ones of weights.
ZERO = 128
_MOST, _MIDDLE = np.float32(127), np.float32(128.5)


@compiled("void(f4[:, ::1], u1[:, ::1], f4[::1])", fused=False)
def _bytes(x_RK: np.ndarray, out_RK: np.ndarray, scales_R: np.ndarray) -> None:
    for r in range(x_RK.shape[0]):
        row, out = x_RK[r], out_RK[r]
        most = np.float32(0)
        for k in range(len(row)):
            most = max(most, abs(row[k]))
        scales_R[r] = most / _MOST
        times = _MOST / most if most > 0 else np.float32(0)
        for k in range(len(row)):
            out[k] = np.uint8(np.int32(row[k] * times + _MIDDLE))  # from 1 to 255, halves rounded upwards


def byte_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes (uint8 ``[R, K]``) and scales (fp32 ``[R, 1]``) of fp32 rows: ``(bytes - ZERO) * scale`` restores the row
    to within half a scale. A row of zeros has scale 0."""
    x_RK = x_RK.contiguous()
    bytes_RK, scales_R = torch.empty(x_RK.shape, dtype=torch.uint8), torch.empty(len(x_RK))
    _bytes(x_RK.numpy(), bytes_RK.numpy(), scales_R.numpy())
    return bytes_RK, scales_R[:, None]

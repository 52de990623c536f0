"""RMS norm and SiLU of rows on a CPU, as compiled loops: bitwise independent of other rows, or elements.

The last bits of PyTorch's operations differ at the end of a tensor. These take about as long; they are used with
compiled layers (``layer_rows``), whose rows must be bitwise equal to those of uncompiled layers.

Shapes in names: R rows, D elements of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmserve_kernels.compiled import compiled

_LANES = 16  # number of partial sums of squares
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
#: exp is 2^n times a polynomial (Cephes' ``expf``).
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_MOST = np.float32(87.0)  # beyond it, 2^n is not a normal number


@compiled("void(f4[:, ::1], f4[::1], f4, f4[:, ::1])", fused=False)
def norm_rows(x_RD: np.ndarray, weight_D: np.ndarray, eps: np.float32, out_RD: np.ndarray) -> None:
    """RMS norm of each row; for compiled code."""
    size = x_RD.shape[1]
    parts = np.empty(_LANES, np.float32)
    for r in range(x_RD.shape[0]):
        x, out = x_RD[r], out_RD[r]
        parts[:] = np.float32(0)
        whole = size - size % _LANES
        for i in range(0, whole, _LANES):
            for j in range(_LANES):
                parts[j] += x[i + j] * x[i + j]
        for j in range(size - whole):
            parts[j] += x[whole + j] * x[whole + j]
        total = np.float32(0)
        for j in range(_LANES):
            total += parts[j]
        scale = _ONE / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[i] = x[i] * scale * weight_D[i]


@compiled("f4(f4)", fused=False)
def exp_of(y: np.float32) -> np.float32:
    """exp(y), with ``y`` clamped to ±87; for compiled code."""
    y = y if y < _MOST else _MOST
    y = y if y > -_MOST else -_MOST
    n = np.floor(y * _LOG2_E + _HALF)
    y = y - n * _LN2_HIGH
    y = y - n * _LN2_LOW
    z = _P0 * y + _P1
    z = z * y + _P2
    z = z * y + _P3
    z = z * y + _P4
    z = z * y + _P5
    z = z * y * y + y + _ONE
    return np.float32(z * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32))


@compiled("f4(f4)", fused=False)
def silu_of(x: np.float32) -> np.float32:
    """x / (1 + exp(-x)); for compiled code."""
    return np.float32(x / (_ONE + exp_of(-x)) if x > -_MOST else x * _ZERO)


@compiled("void(f4[:, ::1], f4[:, ::1])", fused=False)
def _silu_rows(x_RD: np.ndarray, out_RD: np.ndarray) -> None:
    for r in range(x_RD.shape[0]):
        x, out = x_RD[r], out_RD[r]
        for i in range(len(x)):
            out[i] = silu_of(x[i])


def takes(x: Tensor) -> bool:
    """Whether ``rms_norm`` and ``silu`` support ``x``: a dense fp32 tensor on a CPU, without gradients."""
    return x.dtype == torch.float32 and x.is_cpu and type(x) is Tensor and not torch.is_grad_enabled() and x.ndim > 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm (arXiv 1910.07467) of ``x [..., D]`` times ``weight [D]``; ``takes(x)`` must be true."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    made = torch.empty(rows.shape)
    norm_rows(rows.numpy(), weight.detach().numpy(), np.float32(eps), made.numpy())
    return made.view(x.shape)


def silu(x: Tensor) -> Tensor:
    """SiLU of ``x [..., D]``; ``takes(x)`` must be true."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    made = torch.empty(rows.shape)
    _silu_rows(rows.numpy(), made.numpy())
    return made.view(x.shape)

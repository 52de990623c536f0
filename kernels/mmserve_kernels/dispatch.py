"""Selection of an op's implementation: once, when a model or its K/V store is created, and logged.

An op ``NAME`` is a function of that name in ``kernel.py`` (Triton, on GPUs) and in ``reference.py`` (plain PyTorch: the
specification) of its package, and, if the latter is too slow to serve with, in ``cpu.py`` (PyTorch, tuned for a CPU),
all with the same signature. There is no monkey-patching, and no fallback during a pass: whether a kernel can run is
determined by device, dtype and head size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import torch

logger = logging.getLogger("mmserve.kernels")

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: Minimum compute capability with the features that the kernels use (bf16 matrix products); AMD's numbers are higher.
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Op:
    """The module of an op, and the inputs supported by its kernel."""

    package: str
    pytorch: str = "reference"  # the module used if the kernel is not: ``reference`` or ``cpu``
    dtypes: frozenset[torch.dtype] = FLOATS
    max_head_size: int | None = None  # None = any
    max_quantized: int | None = None  # limit for quantized pages, if it differs


@dataclass(frozen=True)
class Implementation:
    """A selected implementation. ``path``: ``triton`` or ``pytorch``; ``reason``: of the selection, for the log."""

    op: str
    path: str
    reason: str
    run: Callable[..., Any]


#: All ops by function name. To add one, create a package with its files, and add a line here.
OPS: dict[str, Op] = {
    "attention_scores": Op("mmserve_kernels.attention_scores", max_head_size=256),
    "cached_attention": Op("mmserve_kernels.cached_attention", "cpu", max_head_size=256, max_quantized=128),
    "commit_scores": Op("mmserve_kernels.commit_scores"),
    "kv_quant": Op("mmserve_kernels.kv_quant", max_head_size=128),
    "rope_scatter": Op("mmserve_kernels.rope_scatter", "cpu", max_head_size=256),
    "sparse_attention": Op("mmserve_kernels.sparse_attention", max_head_size=256),
}


def pick(
    op: str, device: torch.device, dtype: torch.dtype, head_size: int | None = None, *, quantized: bool = False
) -> Implementation:
    """The implementation of ``op`` for tensors of ``dtype`` on ``device`` with head size ``head_size``, over
    ``quantized`` or plain pages.

    On a GPU that is the kernel; if it does not support the arguments, PyTorch operations on that GPU, with the reason
    logged as a warning. Raises ``ValueError`` for an unknown op.
    """
    if op not in OPS:
        raise ValueError(f"no op is called {op!r}; there are {', '.join(sorted(OPS))}")
    of = OPS[op]
    most = of.max_quantized if quantized and of.max_quantized is not None else of.max_head_size
    lacking = _lacking(of, device, dtype, head_size, most)
    path, module = ("pytorch", of.pytorch) if lacking else ("triton", "kernel")
    level = logging.WARNING if lacking and device.type == "cuda" else logging.DEBUG
    reason = lacking or _gpu_name(device)
    logger.log(level, "%s runs as %s: %s", op, path, reason)
    run = getattr(import_module(f"{of.package}.{module}"), op)
    return Implementation(op, path, reason, run if lacking else _on(device, run))


def _on(device: torch.device, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with ``device`` as the current device, which Triton launches on regardless of the tensors' device."""

    @wraps(run)
    def there(*arguments: Any, **options: Any) -> Any:
        with torch.cuda.device(device):
            return run(*arguments, **options)

    return there


def _lacking(op: Op, device: torch.device, dtype: torch.dtype, head_size: int | None, most: int | None) -> str:
    """Why the kernel, which supports head sizes up to ``most``, cannot run; "" = it can."""
    if device.type != "cuda":
        return f"kernels run on GPUs, and the device is {device.type}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 would run kernels on the CPU; unset it"
    if dtype not in op.dtypes:
        return f"the kernel does not take {str(dtype).removeprefix('torch.')}"
    if most is not None and (head_size is None or not 0 < head_size <= most):
        return f"the kernel takes heads of up to {most} dimensions, not {head_size}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{_gpu_name(device)} is older than compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return ""


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)

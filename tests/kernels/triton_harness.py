"""What the tests of Triton kernels share: where they run, poisoned tensors, and how close a result must be.

``tests/conftest.py`` asks for the interpreter before anything imports Triton.
``TRITON_INTERPRET=0 pytest tests/kernels`` runs the same tests on a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

#: Mark of modules that run kernels.
runs_kernels = pytest.mark.skipif(
    not INTERPRETED and DEVICE.type == "cpu", reason="kernels run on a GPU, or on the CPU with TRITON_INTERPRET=1"
)

#: Relative and absolute error allowed against fp64, of values around 1: a few roundings of the dtype.
TOLERANCES = {
    torch.float32: (2e-5, 4e-6),
    torch.float16: (4e-3, 2e-3),
    torch.bfloat16: (3e-2, 1e-2),
}


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of NaN: whoever reads it before writing it is found out."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def assert_near(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """``actual`` is ``exact`` (fp64) but for the roundings of ``dtype``; ``scale``: how large values are."""
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double().cpu(), exact.double().cpu(), rtol=relative, atol=absolute * scale)

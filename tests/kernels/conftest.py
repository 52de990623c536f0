"""Kernels run in a mended interpreter, and write into memory that holds poison."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from triton_harness import DEVICE, INTERPRETED

if INTERPRETED:
    from bf16_interpreter import mend
    from quick_interpreter import quicken

    mend()
    quicken()


@pytest.fixture(autouse=True, scope="module")
def uninitialised_memory_is_poison() -> Iterator[None]:
    """What ``torch.empty`` and its kin give is NaN, or the largest integer: whoever leaves it so is found out.

    Not on a GPU, where that mode asks for more than this.
    """
    torch.use_deterministic_algorithms(DEVICE.type == "cpu")
    yield
    torch.use_deterministic_algorithms(False)

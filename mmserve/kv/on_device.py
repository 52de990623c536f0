"""Integers of the host, such as rows and pages, as tensors on the model's device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """``array`` as a tensor on ``device``; on a CPU it shares the array's memory.

    A GPU's copy comes from pinned memory and is queued: from pageable memory the host would wait for all work that is
    queued before it, and what follows would start late.
    """
    made = torch.from_numpy(array)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)

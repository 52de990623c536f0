"""Transfer of integer arrays, such as rows and pages, to the model's device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """``array`` as a tensor on ``device``; on a CPU it shares the array's memory.

    For a GPU it is copied asynchronously from pinned memory: a copy from pageable memory would block the host until all
    queued work is done.
    """
    made = torch.from_numpy(array)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)

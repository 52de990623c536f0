"""Transfer of small arrays, such as rows, pages and biases, to the model's device."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

#: Bytes of a staging buffer, and the alignment of the copies in it.
STAGING_BYTES, _ALIGNMENT = 1 << 20, 64


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """``array`` as a tensor on ``device``; on a CPU it shares the array's memory.

    For a GPU it is copied asynchronously from pinned memory: a copy from pageable memory would block the host until all
    queued work is done.
    """
    made = torch.from_numpy(array)
    if device.type != "cuda":
        return made.to(device)
    if made.nbytes > STAGING_BYTES // 2:
        return made.pin_memory().to(device, non_blocking=True)
    if device not in _thread.staging:
        _thread.staging[device] = _Staging(device)
    return _thread.staging[device].copied(made)


class _Staging:
    """Pinned memory that one thread's copies to a GPU are made from: allocating it for each copy takes longer than the
    copy.

    The two halves are used in turn. A half is reused once the copies from it are done, which an event reports.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.inference_mode(mode=False):  # an inference tensor could not be written outside of that mode
            self._halves = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True).chunk(2)
        self._copied = torch.cuda.Event(), torch.cuda.Event()
        self._half, self._used = 0, 0

    def copied(self, array: Tensor) -> Tensor:
        """``array``, of at most half of the memory, on the device."""
        if self._used + array.nbytes > len(self._halves[self._half]):
            self._copied[self._half].record(torch.cuda.current_stream(self._device))
            self._half, self._used = 1 - self._half, 0
            self._copied[self._half].synchronize()
        bytes_ = self._halves[self._half][self._used : self._used + array.nbytes]
        self._used += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return bytes_.view(array.dtype).view(array.shape).copy_(array).to(self._device, non_blocking=True)


class _Thread(threading.local):
    """The staging buffers of a thread, by device: its copies and events are in the order of its stream."""

    def __init__(self) -> None:
        self.staging: dict[torch.device, _Staging] = {}


_thread = _Thread()

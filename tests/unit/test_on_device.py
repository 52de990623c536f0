"""Integers of the host on the model's device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmserve.decode.logits import GPU_SLICE_ELEMENTS, SLICE_ELEMENTS, slice_rows
from mmserve.kv.on_device import STAGING_BYTES, on_device

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to copy to")


def test_values_and_dtype_stay() -> None:
    rows = np.array([3, 1, 2])
    made = on_device(rows, CPU)
    assert made.dtype == torch.int64 and made.tolist() == [3, 1, 2]


@gpu
def test_a_copy_to_a_gpu_does_not_wait_for_what_is_queued() -> None:
    device = torch.device("cuda")
    torch.cuda._sleep(200_000_000)  # some 100 ms
    made = on_device(np.arange(5), device)
    assert not torch.cuda.current_stream(device).query(), "the host waited"
    assert made.tolist() == list(range(5))


@gpu
def test_memory_that_copies_are_made_from_is_reused_only_after_they_are_done() -> None:
    device = torch.device("cuda")
    sizes = np.random.default_rng(0).integers(1, STAGING_BYTES // 16, 100)
    arrays = [np.full((2, size), number) for number, size in enumerate(sizes)]
    assert any(array.nbytes > STAGING_BYTES // 2 for array in arrays), "one does not fit"
    assert sum(array.nbytes for array in arrays) > 10 * STAGING_BYTES
    torch.cuda._sleep(200_000_000)  # some 100 ms
    made = [on_device(array, device) for array in arrays]
    for array in arrays:
        array.fill(-1)
    assert [(one.shape, one.unique().tolist()) for one in made] == [((2, s), [n]) for n, s in enumerate(sizes)]


def test_a_slice_on_a_gpu_has_more_rows() -> None:
    vocabulary = 126_464
    assert slice_rows(vocabulary, CPU) == SLICE_ELEMENTS // vocabulary == 33
    assert slice_rows(vocabulary, torch.device("cuda")) == GPU_SLICE_ELEMENTS // vocabulary == 530

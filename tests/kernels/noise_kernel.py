"""The noise of ``commit_scores`` as a kernel of its own, to be run and to be compiled."""

import triton
import triton.language as tl
from mmserve_kernels.commit_scores import kernel


@triton.jit
def noise(seeds, out, COUNT: tl.constexpr):
    """Noise of ``COUNT`` tokens for each seed."""
    row = tl.program_id(0)
    i = tl.arange(0, COUNT)
    tl.store(out + row * COUNT + i, kernel._gumbel(tl.load(seeds + row), 0, COUNT))

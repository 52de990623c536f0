"""KVShare (arXiv 2503.16525, version 2): what counts is what a deviation does to the output of attention, in the prompt
and then, token by token, in its answer ("dual-stage high deviation").

The paper's rule: a position's score is the attention that it draws, a column of the matrix summed, times how far its
values are off (L1); keys would choose nearly the same. In prefill a share with the highest scores is run again. At each
step of decoding scores are taken again, with the attention of the token at hand, and a few more positions are run (3 in
its measurements): tokens take longer.
What is decided here: one layer scores for all, as in ``Blend``; heads are summed before the product; what was run is
not run again. Which rows a pass runs is fixed before it, so those beside a token are what the token before it attended
to, and those beside the first one have the highest scores that prefill left. In masked diffusion it is what those
positions attended to that the pass before proposed tokens for, mostly all that are masked in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.core.policies import image_reuse as numbers
from mmserve.core.values import Checked
from mmserve.kv.reuse.base import largest, share_of


@dataclass(frozen=True, kw_only=True)
class KvShare(numbers.KvShare, Checked):
    """The ``recompute`` share of all images' positions with the highest scores at the last of ``layers``, and then
    ``each_step`` more in every pass that decodes, until all were run; of equal ones the first."""

    weighed: ClassVar[bool] = True

    def count(self, sizes: Sequence[int]) -> int:
        return share_of(sum(sizes), self.recompute)

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        return largest(deviation, self.count(sizes))

"""KVShare (arXiv 2503.16525, version 2): positions are scored by the effect of their deviation on the attention output,
in the prompt and then in each decode step ("dual-stage high deviation").

The paper's rule: a position's score is the attention that it receives (a column sum of the attention matrix) times the
deviation of its values (L1); keys would give nearly the same selection. In prefill the share with the highest scores is
recomputed. In each decode step the scores are computed again with the attention of the current token, and a few more
positions are recomputed (3 in its measurements), which makes steps slower.

Decided here: one layer scores for all, as in ``Blend``; heads are summed before the product; a position is recomputed
only once. The rows of a pass are fixed before it, so positions are selected by the attention of the previous token, and
for the first token by the highest scores that prefill left. In masked diffusion, the attention is that of the positions
for which the previous pass made candidates, usually all masked ones of the block.
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
    """The share ``recompute`` of all images' positions with the highest scores at the last of ``layers``, and
    ``each_step`` more in every decode pass, until all were recomputed; ties go to the first position."""

    by_attention: ClassVar[bool] = True

    def count(self, sizes: Sequence[int]) -> int:
        return share_of(sum(sizes), self.recompute)

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        return largest(deviation, self.count(sizes))

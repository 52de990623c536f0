"""Expected attention (arXiv 2510.00636): the attention of future queries, estimated from past ones.

Queries are assumed to be normally distributed, with the mean and covariance of those observed, rotated to the future
positions on average; that gives the expected attention to a key. It is weighted by the norm of the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.core.policies import kv_reduction as numbers
from mmserve.kv.reduction.base import Budgeted, LayerView, Signal, best, check_budget


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(numbers.ExpectedAttention, Budgeted):
    """Keeps ``budget`` positions, including the first ``sinks``; queries are expected at the next ``future`` positions.

    The first ``sinks`` queries are not used, because they differ from all others.
    """

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.QUERIES})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks)

    def first_query(self, prompt: int) -> int:
        return self.sinks

    def select(self, view: LayerView, count: int) -> Tensor:
        expected_GL = self._expected(view) * view.values_LGK[self.sinks :].float().norm(dim=-1).T
        return best(F.pad(expected_GL, (self.sinks, 0), value=torch.inf), count)

    def _expected(self, view: LayerView) -> Tensor:
        """The expected share of attention of each position after the sinks, mean over the heads of a group."""
        assert view.query_mean_HK is not None and view.query_covariance_HKK is not None
        cos, sin = view.ahead(self.future)
        mean_HK = rotate(view.query_mean_HK, cos, sin)
        half_HKK = rotate(view.query_covariance_HKK, cos, sin)
        covariance_HKK = rotate(half_HKK.mT, cos, sin)
        keys_GKL = view.keys_LGK[self.sinks :].float().permute(1, 2, 0)
        heads, size, _length = keys_GKL.shape
        mean_GUK, covariance_GUKK = (x.unflatten(0, (heads, -1)) for x in (mean_HK, covariance_HKK))
        spread_GUL = ((covariance_GUKK @ keys_GKL[:, None]) * keys_GKL[:, None]).sum(2)
        scores_GUL = mean_GUK @ keys_GKL / size**0.5 + spread_GUL / (2 * size)
        return scores_GUL.softmax(-1).mean(1)

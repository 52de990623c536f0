"""The decoder's attention over a prompt, for pruners that score visual tokens by it.

The prompt runs through the first layers separately, without pages, so that the result does not depend on other
requests. Shapes in names: L positions, D hidden, H query heads, G key/value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.dispatch import pick
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.models.alone import attention_alone
from mmserve.models.base import Attention, LoadedModel, Model
from mmserve.models.decoder import DecoderLayer, DeepRows
from mmserve.prune.base import Evidence

#: Page size that the kernel is given: the same for prompts of all lengths, because it is compiled for each page size.
_PAGE = 64


def shown_by(model: Model) -> frozenset[Evidence]:
    """The kinds of evidence that the decoder of ``model`` can provide for a prompt."""
    if not isinstance(model, LoadedModel) or model.spec.attention not in (Attention.FULL, Attention.CAUSAL):
        return frozenset()
    if not model.decoder.config.plain_attention:
        return frozenset()
    masked = frozenset() if model.spec.causal else frozenset({Evidence.MASK_ROWS})
    return frozenset({Evidence.LAST_ROW}) | masked


def column_sums(scores: Callable[..., Tensor], q_RHK: Tensor, k_LGK: Tensor, limit_R: Tensor | None = None) -> Tensor:
    """Attention of rotated queries to each of the rotated keys, summed over queries: ``[L, H]``.

    ``scores``: the op ``attention_scores``; ``limit_R``: how many leading keys each query attends to (None = all).
    """
    keys_PSGK = F.pad(k_LGK, (0, 0, 0, 0, 0, -len(k_LGK) % _PAGE)).unflatten(0, (-1, _PAGE))
    table = torch.arange(len(keys_PSGK), device=k_LGK.device)
    return scores(q_RHK, keys_PSGK, Ragged((len(q_RHK),), (len(k_LGK),), (table,), table[:0], limit_R))


class PromptAttention:
    """Attention of the first layers of a model's decoder over a prompt; holds no state of any request."""

    def __init__(self, model: LoadedModel) -> None:
        config = model.decoder.config
        self._decoder, self._causal = model.decoder, model.spec.causal
        self._scores = pick("attention_scores", model.device, model.dtype, config.head_dim).run
        self._layer = {
            Evidence.LAST_ROW: min(1, config.num_layers - 1),
            Evidence.MASK_ROWS: config.num_layers // 2,
        }

    def to_positions(
        self, kind: Evidence, x_LD: Tensor, positions: Tensor, prompt: int, deep: DeepRows | None = None
    ) -> Tensor:
        """Attention (fp32 ``[prompt]``) to each of the first ``prompt`` positions, for evidence of ``kind``.

        ``x_LD``: the embedded prompt and, with full attention, the masked answer after it; ``positions``: int64
        ``[L]``, or ``[axes, L]``; ``deep``: visual features added after the first layers.
        """
        cos, sin = self._decoder.rotary(positions)
        x_LD = self.run_before(self._layer[kind], x_LD, cos, sin, deep)
        layer = self._decoder.layers[self._layer[kind]]
        assert isinstance(layer, DecoderLayer)
        asking = slice(prompt - 1, prompt) if kind is Evidence.LAST_ROW else slice(prompt, None)
        q_RHK, k_LGK = layer.queries_and_keys(x_LD, asking)
        rows_RHK, k_LGK = rotate(q_RHK, cos[asking], sin[asking]), rotate(k_LGK, cos, sin)
        return column_sums(self._scores, rows_RHK, k_LGK)[:prompt].mean(1) / len(rows_RHK)

    def run_before(self, depth: int, x_LD: Tensor, cos: Tensor, sin: Tensor, deep: DeepRows | None) -> Tensor:
        """The input of the layer at ``depth`` for the prompt: all of the computation except for the scores."""
        for index in range(depth):
            x_LD = self._decoder.layers[index](x_LD, cos, sin, index, self._attend)
            if deep is not None and index < len(deep.features_LnD):
                x_LD = x_LD.index_add(0, deep.rows, deep.features_LnD[index])
        return x_LD

    def _attend(self, _layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return attention_alone(q, k, v, cos, sin, causal=self._causal)

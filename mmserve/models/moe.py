"""A mixture-of-experts feed-forward, with the router of DeepSeek-V3 (arXiv 2412.19437), as LLaDA2.x and GLM-4.5 have
it, or that of Mixtral (arXiv 2401.04088), as Qwen3-MoE has it too.

Shapes in names: N tokens, D hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.models.silu import silu


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixture of experts of a decoder's layers from ``first_layer`` on; earlier layers are dense.

    Of ``experts``, which are in ``groups`` of equal size, each token uses the ``top_k`` best of its ``kept_groups``
    best groups, with weights that sum to ``scale``. A shared expert of size ``shared_size`` (0 = none) is used for
    every token. Sizes are intermediate sizes. ``softmax``: scores are softmax probabilities over all experts, without
    groups or a bias, and weights sum to ``scale`` only if ``normed``.
    """

    experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    first_layer: int = 0
    dense_layers: frozenset[int] = frozenset()  # layers after the first that are also dense
    softmax: bool = False
    normed: bool = True

    def has(self, layer: int) -> bool:
        """Whether ``layer`` has experts."""
        return layer >= self.first_layer and layer not in self.dense_layers

    def __post_init__(self) -> None:
        if self.experts % self.groups or self.experts // self.groups < 2:
            raise ValueError(f"{self.experts} experts cannot be {self.groups} equal groups of at least 2")
        if self.kept_groups > self.groups:
            raise ValueError(f"{self.kept_groups} groups cannot be kept of {self.groups}")
        if self.top_k > self.kept_groups * (self.experts // self.groups):
            raise ValueError(f"{self.kept_groups} groups of {self.groups} do not hold {self.top_k} experts")


class Router(nn.Module):
    """Selects each token's experts and their weights; all in fp32, whatever the model's dtype."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden_size))
        self.expert_bias = None if config.softmax else nn.Parameter(torch.zeros(config.experts))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def scores(self, x_ND: Tensor) -> Tensor:
        """Router scores of all experts for each token: ``[N, E]`` fp32."""
        return F.linear(x_ND.float(), self.weight.float())

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Experts (int64) and their weights (fp32), both ``[N, top_k]``, for tokens ``x_ND``.

        Sigmoid scores; the bias affects the selection, not the weights, and a group is ranked by its two best experts.
        Or the experts of highest softmax probability (``softmax``).
        """
        c = self.config
        logits_NE = self.scores(x_ND)
        if self.expert_bias is None:
            weights, chosen = logits_NE.softmax(-1).topk(c.top_k, dim=-1)
            return chosen, (weights / weights.sum(-1, keepdim=True) if c.normed else weights) * c.scale
        scores_NE = logits_NE.sigmoid()
        biased = (scores_NE + self.expert_bias.float()).unflatten(-1, (c.groups, -1))
        groups = biased.topk(2, dim=-1).values.sum(-1).topk(c.kept_groups, dim=-1).indices
        dropped = torch.ones_like(biased[..., 0], dtype=torch.bool).scatter(-1, groups, False)
        chosen = biased.masked_fill(dropped[..., None], -torch.inf).flatten(-2).topk(c.top_k, dim=-1).indices
        weights = scores_NE.gather(-1, chosen)
        if c.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * c.scale


class Expert(nn.Module):
    """A SwiGLU feed-forward without biases."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))


class MoE(nn.Module):
    """The experts of one layer, run one after another.

    An expert runs a multiple of ``row_floor`` rows, padded with zeros, so that a token's result does not depend on the
    number of other tokens of the expert.
    """

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.router = Router(config, hidden_size)
        self.experts = nn.ModuleList(Expert(hidden_size, config.expert_size) for _ in range(config.experts))
        self.shared = Expert(hidden_size, config.shared_size) if config.shared_size else None
        self.row_floor = 1

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` of ``x [..., D]``, in its dtype; outputs of a token's experts are summed in fp32."""
        x_ND = x.flatten(0, -2)
        chosen, weights = self.router(x_ND)
        # Outputs are summed at the end, in the order of selection: no sum depends on the batch.
        parts = torch.empty(*chosen.shape, x.shape[-1], device=x.device)
        for index in chosen.unique().tolist():
            token, choice = (chosen == index).nonzero(as_tuple=True)
            rows = F.pad(x_ND[token], (0, 0, 0, -len(token) % self.row_floor))
            parts[token, choice] = self.experts[index](rows)[: len(token)].float()
        out = (parts * weights[..., None]).sum(1).to(x.dtype).view(x.shape)
        return out if self.shared is None else out + self.shared(x)

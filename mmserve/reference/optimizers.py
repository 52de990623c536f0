"""The optimizers of a training run, each for its parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from mmserve.reference.auxiliary import AuxiliaryHeads
from mmserve.reference.model import ReferenceModel
from mmserve.reference.recipe import Recipe


class Optimizers:
    """Muon for the matrices of the tower's and decoder's layers, AdamW for everything else; of an adapter's matrices
    Muon only where the recipe has ``adapter_muon``."""

    def __init__(self, model: ReferenceModel, heads: AuxiliaryHeads, recipe: Recipe) -> None:
        matrices: list[Tensor] = []
        rest: list[Tensor] = list(heads.parameters())
        by_muon = recipe.trained != "adapter" or recipe.adapter_muon
        for name, parameter in model.named_parameters():
            if recipe.trained == "adapter" and not parameter.requires_grad:
                continue
            is_matrix = parameter.dim() == 2 and ".layers." in name and by_muon
            (matrices if is_matrix else rest).append(parameter)
        adam = torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.all: tuple[torch.optim.Optimizer, ...] = (adam,)
        self.rates: tuple[float, ...] = (recipe.adam_lr,)
        if matrices:
            decay = recipe.muon_decay
            muon = torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            self.all, self.rates = (muon, adam), (recipe.muon_lr, recipe.adam_lr)

    def step(self, factor: float) -> None:
        """Update with ``factor`` of the full learning rates, and clear the gradients."""
        for optimizer, rate in zip(self.all, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Clear the gradients."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)
